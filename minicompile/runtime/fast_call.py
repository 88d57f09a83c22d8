"""A quick way from Python into a C kernel: an extension function instead of ctypes.

ctypes converts every argument by its own rules, one Python call per tensor besides. The extension below is
compiled once per machine; `bind` in it makes a builtin function that fetches the tensors' addresses, lets
other threads run while the kernel does, and calls `fail` with the code a kernel returns when it isn't 0.
Without Python's headers there is no extension, and runtime/cpp.py falls back to ctypes.
The real compiler makes such an entry per kernel: torch/_inductor/codecache.py (CppPythonBindingsCodeCache).
"""

from __future__ import annotations

import ctypes
import functools
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minicompile.errors import BackendError
from minicompile.options import Options
from minicompile.runtime.build import start_build

MOST_ARGUMENTS = 48

Bind = Callable[[int, int, int, Callable[[int], Any]], Callable[..., None]]
"""bind(address, tensors, sizes, fail): the kernel at `address` as a function of tensors, then sizes."""

SOURCE = """\
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>

typedef struct {
    void* function;
    Py_ssize_t tensors, sizes;
    PyObject* fail;
} Kernel;

static PyObject* data_ptr;

// tensors' addresses and sizes travel in the same registers: a kernel is a function of n integers
static int64_t invoke(void* f, Py_ssize_t n, const int64_t* a) {
    switch (n) {
CASES
    }
    return 0;
}

static PyObject* call(PyObject* self, PyObject* const* args, Py_ssize_t n) {
    Kernel* kernel = PyCapsule_GetPointer(self, NULL);
    int64_t a[MOST_ARGUMENTS], code;
    if (n != kernel->tensors + kernel->sizes) {
        return PyErr_Format(PyExc_TypeError, "the kernel takes %zd tensors and %zd sizes, got %zd arguments",
                            kernel->tensors, kernel->sizes, n);
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        if (i < kernel->tensors) {
            PyObject* address = PyObject_VectorcallMethod(data_ptr, &args[i], 1, NULL);
            if (address == NULL) return NULL;
            a[i] = (int64_t)(intptr_t)PyLong_AsVoidPtr(address);
            Py_DECREF(address);
        } else {
            a[i] = PyLong_AsLongLong(args[i]);
        }
        if (a[i] == -1 && PyErr_Occurred()) return NULL;
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
    free(kernel);
}

static PyObject* bind(PyObject* self, PyObject* args) {
    unsigned long long address;
    Py_ssize_t tensors, sizes;
    PyObject* fail;
    if (!PyArg_ParseTuple(args, "KnnO", &address, &tensors, &sizes, &fail)) return NULL;
    if (tensors + sizes > MOST_ARGUMENTS) return PyErr_Format(PyExc_ValueError, "too many arguments");
    Kernel* kernel = malloc(sizeof(Kernel));
    if (kernel == NULL) return PyErr_NoMemory();
    *kernel = (Kernel){(void*)(uintptr_t)address, tensors, sizes, Py_NewRef(fail)};
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
"""


def source() -> str:
    """The extension's C source, with one case for each number of arguments."""
    cases = []
    for n in range(MOST_ARGUMENTS + 1):
        types = ", ".join(["int64_t"] * n) or "void"
        values = ", ".join(f"a[{i}]" for i in range(n))
        cases.append(f"    case {n}: return ((int64_t (*)({types}))f)({values});")
    text = SOURCE.replace("CASES", "\n".join(cases))
    return text.replace("MOST_ARGUMENTS", str(MOST_ARGUMENTS))


def extension(options: Options) -> Bind | None:
    """The extension's `bind`; None where it can't be compiled."""
    return _extension(options.cpp_compiler, options.disk_cache, options.cache_dir)


@functools.cache
def _extension(compiler: str, disk_cache: bool, cache_dir: str) -> Bind | None:
    include = Path(sysconfig.get_path("include"))
    if not (include / "Python.h").exists():
        return None
    flags = [f"-I{include}"] + (
        ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
    )
    options = Options(
        cpp_compiler=compiler, cpp_flags=tuple(flags), disk_cache=disk_cache, cache_dir=cache_dir
    )
    try:
        built = start_build(source(), options).result()
    except BackendError:
        return None
    library = ctypes.PyDLL(
        None, handle=built.libraries[0]._handle
    )  # PyDLL keeps the interpreter locked
    initialise = library.PyInit_minicompile_fast_call
    initialise.restype = ctypes.py_object
    bind: Bind = initialise().bind
    return bind
