/* Snapshot(gets, enumerated, parts, lists, classes, calls): facts about objects, tuples of rows, by pointer.
   unchanged() is true while all of them hold. Nothing here runs Python code: calls are of C functions. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

typedef struct {
    PyObject_HEAD
    uint64_t *versions; /* of the dicts in gets and enumerated, when last found as noted */
    PyObject *facts;
} Snapshot;

enum {gets, enumerated, parts, lists, classes, calls, kinds};
#define AT(row, i) PyTuple_GET_ITEM(row, i)

static PyObject *snapshot_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    int fit = PyTuple_GET_SIZE(args) == kinds;
    for (int i = 0; fit && i < kinds; i++) fit = PyTuple_Check(AT(args, i));
    if (!fit) return PyErr_Format(PyExc_TypeError, "Snapshot takes %d tuples", kinds);
    Snapshot *self = (Snapshot *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->facts = Py_NewRef(args);
    Py_ssize_t dicts = PyTuple_GET_SIZE(AT(args, gets)) + PyTuple_GET_SIZE(AT(args, enumerated));
    self->versions = PyMem_Calloc(dicts + 1, sizeof(uint64_t));
    if (!self->versions) { Py_DECREF(self); return PyErr_NoMemory(); }
    return (PyObject *)self;
}

static int snapshot_traverse(Snapshot *self, visitproc visit, void *arg) {
    Py_VISIT(self->facts);
    return 0;
}

static int snapshot_clear(Snapshot *self) {
    Py_CLEAR(self->facts);
    return 0;
}

static void snapshot_dealloc(Snapshot *self) {
    PyObject_GC_UnTrack(self);
    snapshot_clear(self);
    PyMem_Free(self->versions);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

#define EACH(kind) \
    for (Py_ssize_t i = 0, n = PyTuple_GET_SIZE(AT(self->facts, kind)); i < n; i++) { \
        PyObject *row = AT(AT(self->facts, kind), i);
#define END }

/* The version of a dict, which every write changes; 0 from 3.13 on: attributes are stored there without a new one. */
static uint64_t version_of(PyObject *dict) {
#if PY_VERSION_HEX < 0x030D0000
    return ((PyDictObject *)dict)->ma_version_tag;
#else
    return 0;
#endif
}

static int items_hold(PyObject *dict, PyObject *keys, PyObject *values) {
    for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(keys); k++) {
        PyObject *found = PyDict_GetItemWithError(dict, AT(keys, k));
        if (!found && PyErr_Occurred()) { PyErr_Clear(); return 0; }
        if ((found ? found : Py_Ellipsis) != AT(values, k)) return 0;
    }
    return 1;
}

static int keys_hold(PyObject *dict, PyObject *keys) {
    PyObject *key, *value;
    Py_ssize_t at = 0, k = 0, size = PyTuple_GET_SIZE(keys);
    while (PyDict_Next(dict, &at, &key, &value)) if (k >= size || AT(keys, k++) != key) return 0;
    return k == size;
}

/* (dict, keys, values or Ellipsis for none), (dict, all keys in order) */
static int dicts_hold(Snapshot *self) {
    uint64_t *known = self->versions, version;
    EACH(gets)
        version = version_of(AT(row, 0));
        if ((version == 0 || version != *known) && !items_hold(AT(row, 0), AT(row, 1), AT(row, 2))) return 0;
        *known++ = version; /* written perhaps, but with what was there */
    END
    EACH(enumerated)
        version = version_of(AT(row, 0));
        if ((version == 0 || version != *known) && !keys_hold(AT(row, 0), AT(row, 1))) return 0;
        *known++ = version;
    END
    return 1;
}

/* (C function without arguments, what it gives), (reader, object, what it reads), (list, items), (class, version) */
static int others_hold(Snapshot *self) {
    EACH(calls)
        PyObject *found = PyObject_CallNoArgs(AT(row, 0));
        if (!found) { PyErr_Clear(); return 0; }
        Py_DECREF(found); /* a bool, None or a small number: these live on */
        if (found != AT(row, 1)) return 0;
    END
    EACH(parts)
        PyObject *reader = AT(row, 0), *object = AT(row, 1), *found;
        if (reader == (PyObject *)&PyType_Type) {
            if ((PyObject *)Py_TYPE(object) != AT(row, 2)) return 0;
            continue;
        }
        if (reader == Py_None) found = PyObject_GenericGetDict(object, NULL);
        else found = Py_TYPE(reader)->tp_descr_get(reader, object, (PyObject *)Py_TYPE(object));
        if (!found) { PyErr_Clear(); return 0; }
        Py_DECREF(found); /* the object keeps it */
        if (found != AT(row, 2)) return 0;
    END
    EACH(lists)
        PyObject *list = AT(row, 0), *items = AT(row, 1);
        Py_ssize_t size = PyList_GET_SIZE(list);
        if (size != PyTuple_GET_SIZE(items)) return 0;
        for (Py_ssize_t k = 0; k < size; k++) if (PyList_GET_ITEM(list, k) != AT(items, k)) return 0;
    END
    EACH(classes)
        unsigned version = ((PyTypeObject *)AT(row, 0))->tp_version_tag;
        if (version == 0 || version != (unsigned)PyLong_AsUnsignedLong(AT(row, 1))) return 0;
    END
    return 1;
}

static PyObject *unchanged(Snapshot *self, PyObject *ignored) {
    return PyBool_FromLong(others_hold(self) && dicts_hold(self));
}

static PyObject *class_version(PyObject *module, PyObject *type) {
    PyObject *name = PyUnicode_InternFromString("__init__");
    if (!name) return NULL;
    _PyType_Lookup((PyTypeObject *)type, name); /* a lookup gives the class a version */
    Py_DECREF(name);
    return PyLong_FromUnsignedLong(((PyTypeObject *)type)->tp_version_tag);
}

static PyMethodDef methods[] = {{"unchanged", (PyCFunction)unchanged, METH_NOARGS, "Whether every fact still holds."}, {0}};

static PyTypeObject SnapshotType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "minicompile_snapshot.Snapshot",
    .tp_basicsize = sizeof(Snapshot),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = snapshot_new,
    .tp_traverse = (traverseproc)snapshot_traverse,
    .tp_clear = (inquiry)snapshot_clear,
    .tp_dealloc = (destructor)snapshot_dealloc,
    .tp_methods = methods,
};

static PyMethodDef functions[] = {{"class_version", class_version, METH_O, "The class's version tag, 0 if it has none."}, {0}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "minicompile_snapshot", NULL, -1, functions};

PyMODINIT_FUNC PyInit_minicompile_snapshot(void) {
    if (PyType_Ready(&SnapshotType) < 0) return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (module && PyModule_AddObjectRef(module, "Snapshot", (PyObject *)&SnapshotType) < 0) return NULL;
    return module;
}
