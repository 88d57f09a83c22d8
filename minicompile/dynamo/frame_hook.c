/* A PEP 523 hook: calls of chosen Python functions run another callable instead. Built by native.py.

   Each code object's extra slot holds one of: nothing (the callback is asked, once), SKIP, or a callable.
   The callable gets `entry(function, *locals)`, the locals being the frame's parameters as bound; what it
   returns or raises is the call's outcome. Each thread has its own switch, off at first.
   Generators and coroutines are left alone. In CPython: Python/ceval.c, Include/internal/pycore_frame.h.
   The real compiler: torch/csrc/dynamo/eval_frame.c, which rebuilds a frame instead. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#undef _PyGC_FINALIZED /* 3.12 defines it twice */
#define Py_BUILD_CORE
#include <internal/pycore_frame.h>
#undef Py_BUILD_CORE

#if PY_VERSION_HEX >= 0x030D0000
#define CODE_OF(frame) ((PyCodeObject *)(frame)->f_executable)
#else
#define CODE_OF(frame) ((frame)->f_code)
#endif
#if PY_VERSION_HEX >= 0x030C0000
#define FUNCTION_OF(frame) ((frame)->f_funcobj)
#else
#define FUNCTION_OF(frame) ((PyObject *)(frame)->f_func)
#define PyUnstable_Eval_RequestCodeExtraIndex _PyEval_RequestCodeExtraIndex
#define PyUnstable_Code_GetExtra _PyCode_GetExtra
#define PyUnstable_Code_SetExtra _PyCode_SetExtra
#endif

#define SKIP ((void *)1)
#define MORE_DEPTH 5000 /* a hooked call takes a C call; 3.12 allows those less depth than Python calls */

static Py_ssize_t slot = -1;       /* index of our code extra */
static PyObject *callback = NULL;  /* callback(function) -> callable or None */
static PyObject *discarded = NULL; /* the exception that unwinds a replaced frame */
static _Thread_local int enabled = 0;

/* 3.11: the caller clears the frame. Later the evaluator has to: throw into the frame, which has not started. */
static void discard(PyThreadState *thread, struct _PyInterpreterFrame *frame) {
#if PY_VERSION_HEX >= 0x030C0000
    PyObject *pending = PyErr_GetRaisedException();
#if PY_VERSION_HEX >= 0x030D0000
    frame->instr_ptr = (_Py_CODEUNIT *)CODE_OF(frame)->co_code_adaptive - 1; /* not begun: no traceback entry */
#endif
    PyErr_SetRaisedException(Py_NewRef(discarded));
    Py_XDECREF(_PyEval_EvalFrameDefault(thread, frame, 1));
    PyErr_SetRaisedException(pending);
#endif
}

static PyObject *replace(PyObject *entry, struct _PyInterpreterFrame *frame) {
    PyCodeObject *code = CODE_OF(frame);
    Py_ssize_t count = 1 + code->co_argcount + code->co_kwonlyargcount +
                       !!(code->co_flags & CO_VARARGS) + !!(code->co_flags & CO_VARKEYWORDS);
    PyObject *values[count];
    values[0] = FUNCTION_OF(frame);
    for (Py_ssize_t i = 1; i < count; i++) values[i] = frame->localsplus[i - 1];
    return PyObject_Vectorcall(entry, values, count, NULL);
}

static PyObject *evaluate(PyThreadState *thread, struct _PyInterpreterFrame *frame, int throwflag) {
    if (!enabled || throwflag) return _PyEval_EvalFrameDefault(thread, frame, throwflag);
    PyCodeObject *code = CODE_OF(frame);
    int suspends = CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR | CO_ITERABLE_COROUTINE;
    if (code->co_flags & suspends || !(code->co_flags & CO_OPTIMIZED))
        return _PyEval_EvalFrameDefault(thread, frame, 0);
    void *entry = NULL;
    PyUnstable_Code_GetExtra((PyObject *)code, slot, &entry);
    if (entry == NULL && callback != NULL) {
        enabled = 0; /* the callback is ordinary Python */
        PyObject *asked = Py_NewRef(callback);
        PyObject *found = PyObject_CallOneArg(asked, FUNCTION_OF(frame));
        Py_DECREF(asked);
        enabled = 1;
        if (found == NULL) {
            discard(thread, frame);
            return NULL;
        }
        PyUnstable_Code_GetExtra((PyObject *)code, slot, &entry); /* the callback may have set it */
        if (entry == NULL) {
            entry = found == Py_None ? SKIP : Py_NewRef(found);
            if (PyUnstable_Code_SetExtra((PyObject *)code, slot, entry) < 0) PyErr_Clear();
        }
        Py_DECREF(found);
    }
    if (entry == NULL || entry == SKIP) return _PyEval_EvalFrameDefault(thread, frame, 0);
    Py_INCREF((PyObject *)entry); /* it may be taken out of the slot while it runs */
    PyObject *result = replace(entry, frame);
    Py_DECREF((PyObject *)entry);
    discard(thread, frame);
    return result;
}

static void release(void *entry) {
    if (entry != NULL && entry != SKIP) Py_DECREF((PyObject *)entry);
}

static PyObject *install(PyObject *module, PyObject *function) {
    int remove = function == Py_None;
    Py_XSETREF(callback, remove ? NULL : Py_NewRef(function));
    _PyInterpreterState_SetEvalFrameFunc(PyInterpreterState_Get(), remove ? _PyEval_EvalFrameDefault : evaluate);
    Py_RETURN_NONE;
}

static PyObject *enable(PyObject *module, PyObject *on) {
    int before = enabled, now = PyObject_IsTrue(on);
    if (now < 0) return NULL;
    enabled = now;
#if PY_VERSION_HEX >= 0x030C0000 && PY_VERSION_HEX < 0x030D0000
    static _Thread_local int deepened = 0; /* never taken back: the stack may be deep at that moment */
    if (now && !deepened++) PyThreadState_Get()->c_recursion_remaining += MORE_DEPTH;
#endif
    return PyBool_FromLong(before);
}

/* set(code, callable), set(code, None) to leave its calls alone, set(code) to ask the callback again */
static PyObject *set(PyObject *module, PyObject *args) {
    PyObject *code, *entry = NULL;
    if (!PyArg_ParseTuple(args, "O!|O", &PyCode_Type, &code, &entry)) return NULL;
    void *value = entry == Py_None ? SKIP : (void *)Py_XNewRef(entry);
    if (PyUnstable_Code_SetExtra(code, slot, value) < 0) return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {{"install", install, METH_O}, {"enable", enable, METH_O},
                                {"set", set, METH_VARARGS}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "minicompile_frame_hook", NULL, -1, methods};

PyMODINIT_FUNC PyInit_minicompile_frame_hook(void) {
    slot = PyUnstable_Eval_RequestCodeExtraIndex(release);
    PyObject *kind = PyErr_NewException("minicompile_frame_hook.Discarded", NULL, NULL);
    if (kind == NULL || slot < 0) return NULL;
    discarded = PyObject_CallNoArgs(kind);
    Py_DECREF(kind);
    return discarded == NULL ? NULL : PyModule_Create(&definition);
}
