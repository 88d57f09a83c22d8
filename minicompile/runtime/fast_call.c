// A quick way from Python into a C kernel: builtin functions instead of ctypes, which converts every argument
// by its own rules, one Python call per tensor besides. Other threads run while a kernel does.
// The real compiler makes such an entry per kernel: torch/_inductor/codecache.py (CppPythonBindingsCodeCache).

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define MOST_ARGUMENTS 48
#define EIGHT(i) a[i], a[i + 1], a[i + 2], a[i + 3], a[i + 4], a[i + 5], a[i + 6], a[i + 7]

typedef struct {
    int64_t (*function)();
    Py_ssize_t tensors, integers, floats;
    PyObject *fail, *module;
} Kernel;

static PyObject* data_ptr;

// tensors' addresses, sizes and the bits of floats travel in the same registers; a kernel doesn't see arguments that it doesn't take
static int64_t invoke(int64_t (*f)(), Py_ssize_t n, const int64_t* a) {
    if (n <= 8) return f(EIGHT(0));
    if (n <= 16) return f(EIGHT(0), EIGHT(8));
    return f(EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24), EIGHT(32), EIGHT(40));
}

static PyObject* call(PyObject* self, PyObject* const* args, Py_ssize_t n) {
    Kernel* kernel = PyCapsule_GetPointer(self, NULL);
    int64_t a[MOST_ARGUMENTS] = {0}, code;
    Py_ssize_t first_float = kernel->tensors + kernel->integers;
    if (n != first_float + kernel->floats) {
        return PyErr_Format(PyExc_TypeError, "the kernel takes %zd tensors and %zd numbers, got %zd arguments",
                            kernel->tensors, kernel->integers + kernel->floats, n);
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        if (i < kernel->tensors) {
            PyObject* address = PyObject_VectorcallMethod(data_ptr, &args[i], 1, NULL);
            if (address == NULL) return NULL;
            a[i] = (int64_t)(intptr_t)PyLong_AsVoidPtr(address);
            Py_DECREF(address);
        } else if (i < first_float) {
            a[i] = PyLong_AsLongLong(args[i]);
        } else {
            double number = PyFloat_AsDouble(args[i]);
            memcpy(&a[i], &number, sizeof number);
        }
        if ((a[i] == -1 || i >= first_float) && PyErr_Occurred()) return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    code = invoke(kernel->function, n, a);
    Py_END_ALLOW_THREADS
    if (code != 0) return PyObject_CallFunction(kernel->fail, "L", (long long)code);
    Py_RETURN_NONE;
}

static PyMethodDef call_method = {"kernel", (PyCFunction)(void (*)(void))call, METH_FASTCALL, NULL};

static void release(PyObject* capsule) {
    Kernel* kernel = PyCapsule_GetPointer(capsule, NULL);
    Py_DECREF(kernel->fail);
    Py_DECREF(kernel->module);
    free(kernel);
}

// bind(address, tensors, integers, floats, fail, module): the kernel at `address` as a function of all of them;
// it keeps `module`, which has its code
static PyObject* bind(PyObject* self, PyObject* args) {
    unsigned long long address;
    Py_ssize_t tensors, integers, floats;
    PyObject *fail, *module;
    if (!PyArg_ParseTuple(args, "KnnnOO", &address, &tensors, &integers, &floats, &fail, &module)) return NULL;
    if (tensors + integers + floats > MOST_ARGUMENTS) return PyErr_Format(PyExc_ValueError, "too many arguments");
    Kernel* kernel = malloc(sizeof(Kernel));
    if (kernel == NULL) return PyErr_NoMemory();
    int64_t (*code)() = (int64_t (*)())(uintptr_t)address;
    *kernel = (Kernel){code, tensors, integers, floats, Py_NewRef(fail), Py_NewRef(module)};
    PyObject* capsule = PyCapsule_New(kernel, NULL, release);
    PyObject* function = capsule == NULL ? NULL : PyCFunction_New(&call_method, capsule);
    Py_XDECREF(capsule);
    return function;
}

static PyMethodDef methods[] = {{"bind", bind, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "minicompile_fast_call", NULL, -1, methods};

PyMODINIT_FUNC PyInit_minicompile_fast_call(void) {
    data_ptr = PyUnicode_InternFromString("data_ptr");
    return data_ptr == NULL ? NULL : PyModule_Create(&module);
}
