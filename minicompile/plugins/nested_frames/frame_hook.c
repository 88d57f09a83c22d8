/* PEP 523: stands between CPython and the frames that eager code starts.

   start(leave, never, quiet)  before all else: the three answers below, as objects
   enter(decide, serial, function, ...)
       calls function(...) with the hook on in this thread; the function's own frame runs as it is. For a frame
       below it whose code has no decision for `serial` yet, decide(function) makes one:
           leave  run it as it is            never  the same, for every serial
           quiet  never, and the hook is off below it
           entry  entry(function, *locals) gives the frame's result, or `leave`: run this one as it is
       Entries are referred to weakly: who decides keeps them alive, and drops one to be asked again.
   away()                      the hook off in this thread, whatever is running (after a fork)

   In CPython: Python/ceval.c, Include/internal/pycore_frame.h. The real compiler: torch/csrc/dynamo/eval_frame.c. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#if PY_VERSION_HEX >= 0x030C0000
#undef _PyGC_FINALIZED
#endif
#define Py_BUILD_CORE
#include <internal/pycore_frame.h>
#undef Py_BUILD_CORE

typedef struct _PyInterpreterFrame Frame;

#if PY_VERSION_HEX >= 0x030D0000
#define CODE(f) ((PyCodeObject *)(f)->f_executable)
#define FUNCTION(f) ((f)->f_funcobj)
#elif PY_VERSION_HEX >= 0x030C0000
#define CODE(f) ((f)->f_code)
#define FUNCTION(f) ((f)->f_funcobj)
#else
#define CODE(f) ((f)->f_code)
#define FUNCTION(f) ((PyObject *)(f)->f_func)
#endif

#if PY_VERSION_HEX >= 0x030C0000
#define LIMIT(ts) ((ts)->py_recursion_limit)
#define REMAINING(ts) ((ts)->py_recursion_remaining)
#define C_REMAINING(ts) ((ts)->c_recursion_remaining)
#else
#define LIMIT(ts) ((ts)->recursion_limit)
#define REMAINING(ts) ((ts)->recursion_remaining)
#define C_REMAINING(ts) ignored /* one counter for both */
static int ignored;
#define PyUnstable_Eval_RequestCodeExtraIndex _PyEval_RequestCodeExtraIndex
#define PyUnstable_Code_GetExtra _PyCode_GetExtra
#define PyUnstable_Code_SetExtra _PyCode_SetExtra
#endif

#define DEEP (1 << 20) /* bytes of C stack after which frames run without the hook */
#define EVALUATOR 2    /* what running a frame counts against the limit on C recursion */
#define SPARE 50       /* levels of Python's recursion limit that an entry may use for itself */

typedef struct {
    PyObject *decide; /* NULL: the hook is off */
    uint64_t serial;
    PyCodeObject *passing; /* the next frame of this code is the one that enter() was asked to run */
    int depth, c_left;     /* of the frame that an entry stands in for, or of a quiet one: its recursion depth (-1:
                              there is no such frame), and how much deeper C code may recurse */
} Thread;

static _Thread_local Thread here = {.depth = -1};
static _Thread_local char *base; /* the shallowest place on the C stack that was seen */
static int entered; /* calls of enter() under way, in all threads */
static _Thread_local int entered_here;

typedef struct {
    uint64_t serial;
    PyObject *entry; /* a weak reference; NULL: leave */
} Decision;

static Py_ssize_t slot;
static Decision never_slot, quiet_slot;
static PyObject *leave, *never, *quiet, *discarded;

static void free_decision(void *found) {
    if (!found || found == &never_slot || found == &quiet_slot) return;
    Py_XDECREF(((Decision *)found)->entry);
    PyMem_Free(found);
}

static PyObject *hook(PyThreadState *ts, Frame *frame, int throwing);

static void install(int on) { /* another hook (torch's, a debugger's) is left in its place */
    PyInterpreterState *interpreter = PyInterpreterState_Get();
    _PyFrameEvalFunction now = _PyInterpreterState_GetEvalFrameFunc(interpreter);
    if (now == (on ? _PyEval_EvalFrameDefault : hook))
        _PyInterpreterState_SetEvalFrameFunc(interpreter, on ? hook : _PyEval_EvalFrameDefault);
}

/* Run a frame as it is. While a hook is installed each Python call takes C stack, as it would not without: the
   limit on C recursion leaves them out, and before the stack runs out the hook does. */
static PyObject *evaluate(PyThreadState *ts, Frame *frame, int throwing) {
    char place;
    PyObject *result;
    if (&place > base) base = &place;
    int deep = base - &place > DEEP;
    if (deep) install(0);
    C_REMAINING(ts) += EVALUATOR;
    result = _PyEval_EvalFrameDefault(ts, frame, throwing);
    C_REMAINING(ts) -= EVALUATOR;
    if (deep && entered) install(1);
    return result;
}

/* Free a frame that shall not run. In 3.11 the caller does; later the evaluator, which an exception stops at once. */
static void discard(PyThreadState *ts, Frame *frame) {
#if PY_VERSION_HEX >= 0x030C0000
    PyObject *raised = PyErr_GetRaisedException();
#if PY_VERSION_HEX >= 0x030D0000
    frame->instr_ptr = (_Py_CODEUNIT *)CODE(frame)->co_code_adaptive - 1; /* not begun: no traceback entry */
#endif
    PyErr_SetRaisedException(Py_NewRef(discarded));
    REMAINING(ts) += 2;
    Thread before = here;
    here.decide = NULL; /* for finalizers of its locals */
    PyObject *nothing = evaluate(ts, frame, 1);
    here = before;
    REMAINING(ts) -= 2;
    assert(!nothing);
    (void)nothing;
    PyErr_Clear();
    if (raised) PyErr_SetRaisedException(raised);
#endif
}

/* Ask for a decision and note it; a new reference to the entry. NULL: there is none, or an exception is set. */
static PyObject *decide(PyThreadState *ts, Frame *frame, Decision **found) {
    Thread before = here;
    here.decide = NULL;
    REMAINING(ts) += SPARE;
    PyObject *entry = PyObject_CallOneArg(before.decide, FUNCTION(frame)), *reference = NULL;
    REMAINING(ts) -= SPARE;
    here = before;
    if (!entry) return NULL;
    Decision *made = entry == never ? &never_slot : entry == quiet ? &quiet_slot : NULL;
    if (!made) {
        if (entry != leave && !(reference = PyWeakref_NewRef(entry, NULL))) goto failed;
        if (!(made = PyMem_Malloc(sizeof(Decision)))) goto failed;
        *made = (Decision){here.serial, reference};
    }
    *found = made;
    if (PyUnstable_Code_SetExtra((PyObject *)CODE(frame), slot, made) < 0) goto failed;
    if (reference) return entry;
failed:
    Py_DECREF(entry);
    return NULL;
}

static PyObject *entry_of(Decision *found) {
    if (!found->entry) return NULL;
#if PY_VERSION_HEX >= 0x030D0000
    PyObject *entry = NULL;
    PyWeakref_GetRef(found->entry, &entry);
    return entry;
#else
    PyObject *entry = PyWeakref_GetObject(found->entry);
    return entry == Py_None ? NULL : Py_NewRef(entry);
#endif
}

static void stand_aside(PyThreadState *ts) {
    here.decide = NULL;
    here.depth = LIMIT(ts) - REMAINING(ts);
    here.c_left = C_REMAINING(ts);
}

#define SKIPPED (CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR)
#define FUNCTION_BODY (CO_OPTIMIZED | CO_NEWLOCALS)

static PyObject *hook(PyThreadState *ts, Frame *frame, int throwing) {
    PyCodeObject *code = CODE(frame);
    void *extra = NULL;
    if (!here.decide || throwing) return evaluate(ts, frame, throwing);
    if (code == here.passing) {
        here.passing = NULL;
        return evaluate(ts, frame, throwing);
    }
    if (code->co_flags & SKIPPED || (code->co_flags & FUNCTION_BODY) != FUNCTION_BODY || ts->c_tracefunc || ts->c_profilefunc)
        return evaluate(ts, frame, throwing);
    PyUnstable_Code_GetExtra((PyObject *)code, slot, &extra);
    Decision *found = extra;
    if (found == &never_slot) return evaluate(ts, frame, throwing);
    PyObject *entry = NULL, *result;
    if (found != &quiet_slot) {
        int known = found && found->serial == here.serial;
        if (known) entry = entry_of(found);
        if (!entry && (!known || found->entry)) entry = decide(ts, frame, &found);
        if (!entry && PyErr_Occurred()) {
            discard(ts, frame);
            return NULL;
        }
    }
    Thread before = here;
    if (!entry) {
        if (found != &quiet_slot) return evaluate(ts, frame, throwing);
        stand_aside(ts);
        result = evaluate(ts, frame, throwing);
        here = before;
        return result;
    }
    int count = code->co_argcount + code->co_kwonlyargcount + !!(code->co_flags & CO_VARARGS) + !!(code->co_flags & CO_VARKEYWORDS);
    PyObject *arguments[count + 1];
    arguments[0] = FUNCTION(frame);
    for (int i = 0; i < count; i++) arguments[i + 1] = frame->localsplus[i];
    stand_aside(ts);
    REMAINING(ts) += SPARE;
    C_REMAINING(ts) += SPARE;
    result = PyObject_Vectorcall(entry, arguments, count + 1, NULL);
    C_REMAINING(ts) -= SPARE;
    REMAINING(ts) -= SPARE;
    here = before;
    Py_DECREF(entry);
    if (result == leave) {
        Py_DECREF(result);
        return evaluate(ts, frame, throwing);
    }
    discard(ts, frame);
    return result;
}

static PyObject *enter(PyObject *module, PyObject *const *arguments, Py_ssize_t count, PyObject *names) {
    if (count < 3) return PyErr_Format(PyExc_TypeError, "enter(decide, serial, function, ...)");
    PyThreadState *ts = PyThreadState_Get();
    PyObject *function = arguments[2];
    uint64_t serial = PyLong_AsUnsignedLongLong(arguments[1]);
    if (PyErr_Occurred()) return NULL;
    Thread before = here;
    PyCodeObject *own = PyFunction_Check(function) ? (PyCodeObject *)PyFunction_GET_CODE(function) : NULL;
    here = (Thread){arguments[0], serial, own, -1, 0};
    /* what stands between a frame and its own code does not count as recursion */
    int between = before.depth < 0 ? 0 : LIMIT(ts) - REMAINING(ts) - before.depth;
    int c_between = before.depth < 0 ? 0 : before.c_left - C_REMAINING(ts);
    REMAINING(ts) += between;
    C_REMAINING(ts) += c_between;
    entered++;
    entered_here++;
    install(1);
    PyObject *result = PyObject_Vectorcall(function, arguments + 3, count - 3, names);
    entered_here--;
    if (--entered == 0) install(0);
    C_REMAINING(ts) -= c_between;
    REMAINING(ts) -= between;
    here = before;
    return result;
}

static PyObject *away(PyObject *module, PyObject *ignored) {
    here = (Thread){.depth = -1};
    entered = entered_here; /* other threads are no more */
    install(0);
    Py_RETURN_NONE;
}

static PyObject *start(PyObject *module, PyObject *answers) {
    if (!PyArg_ParseTuple(answers, "OOO", &leave, &never, &quiet)) return NULL;
    Py_INCREF(answers); /* holds them */
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"enter", (PyCFunction)(void (*)(void))enter, METH_FASTCALL | METH_KEYWORDS, "Call a function with the hook on."},
    {"away", away, METH_NOARGS, "The hook off in this thread."},
    {"start", start, METH_VARARGS, "Say which objects are the answers."},
    {0}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "minicompile_frame_hook", NULL, -1, functions};

PyMODINIT_FUNC PyInit_minicompile_frame_hook(void) {
    slot = PyUnstable_Eval_RequestCodeExtraIndex(free_decision);
    discarded = PyObject_CallNoArgs(PyExc_BaseException);
    return slot < 0 || !discarded ? NULL : PyModule_Create(&definition);
}
