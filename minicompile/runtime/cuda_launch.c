// From Python into a compiled GPU kernel, by the CUDA driver, which is loaded when the first kernel is.
// What a kernel takes is known when it is bound, so a launch is: numbers into an array, and one call.
// The real compiler: torch/csrc/inductor/static_launcher/cuda.cpp.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define MOST_ARGUMENTS 1024
#define NULL_POINTERS 2  // Triton's kernels end in two pointers to scratch memory, which ours don't need
#define USUAL_SHARED 49152  // bytes of shared memory that need no permission
#define MAX_THREADS_PER_BLOCK 0  // CUfunction_attribute
#define MAX_DYNAMIC_SHARED_SIZE_BYTES 8
#define PREFER_SHARED 1  // CUfunc_cache

typedef struct {
    void *function, *device_context;
    Py_ssize_t pointers, integers, floats;
    int wide;
    unsigned threads, shared;
} Kernel;

static struct {
    int (*get_error_string)(int, const char**);
    int (*get_context)(void**);
    int (*set_context)(void*);
    int (*retain_context)(void**, int);
    int (*load_module)(void**, const void*);
    int (*get_function)(void**, void*, const char*);
    int (*get_attribute)(int*, int, void*);
    int (*set_attribute)(void*, int, int);
    int (*set_cache)(void*, int);
    int (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
} driver;

static const char* const names[] = {
    "cuGetErrorString", "cuCtxGetCurrent", "cuCtxSetCurrent", "cuDevicePrimaryCtxRetain", "cuModuleLoadData",
    "cuModuleGetFunction", "cuFuncGetAttribute", "cuFuncSetAttribute", "cuFuncSetCacheConfig", "cuLaunchKernel",
};

static PyObject* fail(int code) {
    const char* text = NULL;
    driver.get_error_string(code, &text);
    return PyErr_Format(PyExc_RuntimeError, "CUDA error %d: %s", code, text ? text : "unknown");
}

// a thread of autograd may not have a context yet
static int enter(void* context, void** before) {
    int code = driver.get_context(before);
    return code || *before == context ? code : driver.set_context(context);
}

static PyObject* launch(PyObject* self, PyObject* const* args, Py_ssize_t n) {
    Kernel* kernel = PyCapsule_GetPointer(self, NULL);
    Py_ssize_t first_float = kernel->pointers + kernel->integers, count = first_float + kernel->floats;
    if (n != 2 + count) return PyErr_Format(PyExc_TypeError, "the kernel takes %zd arguments, not %zd", count, n - 2);
    int64_t values[count + NULL_POINTERS];
    void* addresses[count + NULL_POINTERS];
    long long grid = PyLong_AsLongLong(args[0]), stream = PyLong_AsLongLong(args[1]);
    for (Py_ssize_t i = 0; i < count; i++) {
        int is_float = i >= first_float;
        if (is_float) {
            double number = PyFloat_AsDouble(args[2 + i]);
            memcpy(&values[i], &number, sizeof number);
        } else {
            values[i] = PyLong_AsLongLong(args[2 + i]);
        }
        int narrow = i >= kernel->pointers && !is_float && !kernel->wide;
        if (narrow && values[i] != (int32_t)values[i]) {
            return PyErr_Format(PyExc_OverflowError, "size %R of a kernel with 32-bit sizes", args[2 + i]);
        }
        addresses[i] = &values[i];
    }
    for (Py_ssize_t i = count; i < count + NULL_POINTERS; i++) {
        values[i] = 0;
        addresses[i] = &values[i];
    }
    if (PyErr_Occurred()) return NULL;
    if (grid != (int32_t)grid) return PyErr_Format(PyExc_OverflowError, "%lld programs", grid);
    if (grid == 0) Py_RETURN_NONE;
    int code;
    Py_BEGIN_ALLOW_THREADS
    void *before, *queue = (void*)(intptr_t)stream;
    code = enter(kernel->device_context, &before);
    if (code == 0) {
        code = driver.launch(
            kernel->function, grid, 1, 1, kernel->threads, 1, 1, kernel->shared, queue, addresses, NULL);
    }
    Py_END_ALLOW_THREADS
    if (code != 0) return fail(code);
    Py_RETURN_NONE;
}

static PyMethodDef launch_method = {"launch", (PyCFunction)(void (*)(void))launch, METH_FASTCALL, NULL};

static void release(PyObject* capsule) { free(PyCapsule_GetPointer(capsule, NULL)); }

static int load_kernel(Kernel* kernel, const char* code, const char* name, int* most_threads) {
    void* module = NULL;  // stays loaded: a CUDA graph may hold its kernel
    int error;
    if ((error = driver.load_module(&module, code))) return error;
    if ((error = driver.get_function(&kernel->function, module, name))) return error;
    if ((error = driver.get_attribute(most_threads, MAX_THREADS_PER_BLOCK, kernel->function))) return error;
    if (kernel->shared <= USUAL_SHARED) return 0;
    if ((error = driver.set_cache(kernel->function, PREFER_SHARED))) return error;
    return driver.set_attribute(kernel->function, MAX_DYNAMIC_SHARED_SIZE_BYTES, kernel->shared);
}

// bind(code, name, device, threads, shared, pointers, integers, floats, wide): loads a kernel, and gives
// launch(grid, stream, *arguments), whose integers have 64 bits if they are wide
static PyObject* bind(PyObject* self, PyObject* args) {
    const char *code, *name;
    Py_ssize_t size;
    int device, most_threads = 0, error;
    Kernel found = {0};
    if (!PyArg_ParseTuple(args, "y#siIInnnp", &code, &size, &name, &device, &found.threads, &found.shared,
                          &found.pointers, &found.integers, &found.floats, &found.wide)) return NULL;
    if (found.pointers + found.integers + found.floats > MOST_ARGUMENTS) {
        return PyErr_Format(PyExc_ValueError, "more than %d arguments", MOST_ARGUMENTS);
    }
    Py_BEGIN_ALLOW_THREADS
    void* before = NULL;
    error = driver.retain_context(&found.device_context, device);
    if (error == 0) error = enter(found.device_context, &before);
    if (error == 0) error = load_kernel(&found, code, name, &most_threads);
    if (before != NULL) driver.set_context(before);
    Py_END_ALLOW_THREADS
    if (error != 0) return fail(error);
    if ((unsigned)most_threads < found.threads) {
        return PyErr_Format(PyExc_RuntimeError, "%u threads, and registers for %d", found.threads, most_threads);
    }
    Kernel* kernel = malloc(sizeof(Kernel));
    if (kernel == NULL) return PyErr_NoMemory();
    *kernel = found;
    PyObject* capsule = PyCapsule_New(kernel, NULL, release);
    PyObject* function = capsule == NULL ? NULL : PyCFunction_New(&launch_method, capsule);
    Py_XDECREF(capsule);
    return function;
}

// open(path): load the driver's library
static PyObject* open_driver(PyObject* self, PyObject* path) {
    const char* text = PyUnicode_AsUTF8(path);
    if (text == NULL) return NULL;
    void* library = dlopen(text, RTLD_NOW);
    if (library == NULL) return PyErr_Format(PyExc_OSError, "%s", dlerror());
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        void* function = dlsym(library, names[i]);
        if (function == NULL) return PyErr_Format(PyExc_OSError, "no %s in %s", names[i], text);
        memcpy((char*)&driver + i * sizeof function, &function, sizeof function);
    }
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"open", open_driver, METH_O, NULL}, {"bind", bind, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "minicompile_cuda_launch", NULL, -1, methods};

PyMODINIT_FUNC PyInit_minicompile_cuda_launch(void) { return PyModule_Create(&module); }
