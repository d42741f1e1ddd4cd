/* The native back end: fast paths, which walk the specs of arguments and outputs as they are.

A Dispatcher is the call of one wrapper. It tries the Fasts of its function in turn: binds the arguments,
matches them with the spec, calls the jitted function with the arrays in them, and makes the output from
its spec. What else happens (no match, a trace, an error) is the slow path's, in _core/slow.py. Specs are
those of _spec/tree.py, stand-ins of static objects those of _spec/static.py.

Invariants:
- Public CPython API only. The GIL is never released; a free-threaded Python doesn't build this.
- Whatever is walked into has a strong reference here, because `==`, registered flattens and copies of
  NumPy arrays run Python code, which may change or free any container of the user's.
- Sizes and items are read anew after each child, for the same reason.
- Sizes of specs are checked as they are walked: a malformed one is an exception, not a crash.
- A tuple or list of ours is hidden from the garbage collector, where anybody finds it, until it is full.
- A guard that raises is no guard that fails: the exception goes to the slow path.
*/

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <string.h>
#include <structmember.h>

#ifdef Py_GIL_DISABLED
#error "The native back end relies on the GIL."
#endif

#ifdef _MSC_VER
#define THREAD_LOCAL __declspec(thread)
#else
#define THREAD_LOCAL _Thread_local
#endif

/* Raised with what Python relies on, here and in _compat.py: in a checkout that was brought up to date,
   what was built before may still be there. */
#define INTERFACE 22

/* As in _spec/tree.py. */
enum { SEQUENCE, DICT, MODULE, NODE };
/* As in _spec/static.py. */
enum { NUMBER, ITEMS, PAIRS, FIELDS, OTHER };

/* A node of a spec is (kind, class, aux, child, ...), a stand-in (reader, class, names, part, ...). */
#define HEAD 3

typedef struct {
    PyTypeObject *static_type, *flags_type, *fast_type, *delegate_type, *dispatcher_type;
    /* Set by `setup`, from Python. */
    PyObject *array_mark;   /* ARRAY, which stands for an array in a spec */
    PyObject *array_type;   /* the class of most arrays */
    PyObject *ndarray_type; /* that of NumPy's */
    PyObject *take;         /* see _core/numpy_inputs.py */
    PyObject *flatten, *same, *unflatten, *wait_for;
    PyObject *opaque_type; /* of stand-ins that ask an object's `==` */
    /* Names of methods and attributes. */
    PyObject *slow_call, *interrupted, *failed_fast, *settle_fast, *entry, *hash, *value;
    PyObject *empty; /* tuple */
} State;

static struct PyModuleDef module_def;

static State *state_of(PyTypeObject *type) {
    return PyModule_GetState(PyType_GetModuleByDef(type, &module_def));
}

static int malformed(void) {
    PyErr_SetString(PyExc_SystemError, "eqxjit: a malformed spec");
    return -1;
}

/* The same where an object is to be returned; `misused` for a wrong call of what is below. */
static PyObject *malformed_object(void) {
    (void)malformed();
    return NULL;
}

static PyObject *misused(const char *usage) {
    PyErr_SetString(PyExc_TypeError, usage);
    return NULL;
}

/* Room for n pointers: on the stack where that is `small`, which holds `n_small`. */
static PyObject **room(PyObject **small, Py_ssize_t n_small, Py_ssize_t n) {
    PyObject **found = small;
    if (n > n_small) {
        found = PyMem_New(PyObject *, (size_t)n);
        if (found == NULL) {
            PyErr_NoMemory();
            return NULL;
        }
    }
    memset((void *)found, 0, (size_t)(n > 0 ? n : 0) * sizeof(PyObject *));
    return found;
}

static void release(PyObject **found, PyObject **small, Py_ssize_t n) {
    for (Py_ssize_t i = 0; i < n; i++) Py_XDECREF(found[i]);
    if (found != small) PyMem_Free((void *)found);
}

/* Defines how the garbage collector goes through objects of a type, and how they die; FIELDS(DO) does
   something for each reference that they hold. */
#define COLLECTED(Type, name, FIELDS)                                                                  \
    static int name##_traverse(Type *self, visitproc visit, void *arg) {                               \
        Py_VISIT(Py_TYPE(self));                                                                       \
        FIELDS(Py_VISIT)                                                                               \
        return 0;                                                                                      \
    }                                                                                                  \
    static int name##_clear(Type *self) {                                                              \
        FIELDS(Py_CLEAR)                                                                               \
        return 0;                                                                                      \
    }                                                                                                  \
    static void name##_dealloc(Type *self) {                                                           \
        PyTypeObject *type = Py_TYPE(self);                                                            \
        PyObject_GC_UnTrack(self);                                                                     \
        (void)name##_clear(self);                                                                      \
        type->tp_free(self);                                                                           \
        Py_DECREF(type);                                                                               \
    }

#define COLLECTED_SLOTS(name)                                                                          \
    {Py_tp_traverse, name##_traverse}, {Py_tp_clear, name##_clear}, {Py_tp_dealloc, name##_dealloc}

/* --- Static: a static object in a spec ----------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    PyObject *frozen; /* the stand-in */
    Py_hash_t hash;
    char ask; /* whether the class may have become a node of JAX's registry */
} Static;

static PyObject *static_vectorcall(PyObject *type, PyObject *const *args, size_t n_args_flag, PyObject *kwnames) {
    Py_ssize_t n = PyVectorcall_NARGS(n_args_flag);
    if (n < 1 || n > 2 || kwnames != NULL) return misused("Static(frozen, ask=False)");
    int ask = n == 2 ? PyObject_IsTrue(args[1]) : 0;
    Py_hash_t hash = ask < 0 ? -1 : PyObject_Hash(args[0]);
    if (hash == -1) return NULL;
    Static *self = PyObject_GC_New(Static, (PyTypeObject *)type);
    if (self == NULL) return NULL;
    self->frozen = Py_NewRef(args[0]);
    self->hash = hash;
    self->ask = (char)ask;
    /* A text or a number leads nowhere. */
    if (PyObject_IS_GC(args[0])) PyObject_GC_Track(self);
    return (PyObject *)self;
}

static int static_traverse(Static *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->frozen);
    return 0;
}

static void static_dealloc(Static *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    Py_DECREF(self->frozen);
    PyObject_GC_Del(self);
    Py_DECREF(type);
}

static Py_hash_t static_hash(Static *self) {
    return self->hash;
}

static PyObject *static_compare(PyObject *self, PyObject *other, int op) {
    if (Py_TYPE(other) != Py_TYPE(self) || (op != Py_EQ && op != Py_NE)) Py_RETURN_NOTIMPLEMENTED;
    Static *a = (Static *)self, *b = (Static *)other;
    int equal = a->hash == b->hash;
    if (equal) {
        equal = PyObject_RichCompareBool(a->frozen, b->frozen, Py_EQ);
        if (equal < 0) return NULL;
    }
    return PyBool_FromLong(op == Py_EQ ? equal : !equal);
}

static PyMemberDef static_members[] = {
    {"frozen", T_OBJECT, offsetof(Static, frozen), READONLY, NULL},
    {"ask", T_BOOL, offsetof(Static, ask), READONLY, NULL}, {NULL, 0, 0, 0, NULL}};

static PyType_Slot static_slots[] = {
    {Py_tp_doc, "Static(frozen, ask=False): a static object in a spec, by its stand-in."},
    {Py_tp_traverse, static_traverse}, {Py_tp_dealloc, static_dealloc}, {Py_tp_hash, static_hash},
    {Py_tp_richcompare, static_compare}, {Py_tp_members, static_members},
    {0, NULL}};

static PyType_Spec static_spec = {
    /* Made by `tp_vectorcall` alone. No `tp_clear`, as of a tuple: a dict may still compare it. */
    .name = "eqxjit._native.Static", .basicsize = sizeof(Static), .slots = static_slots,
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION};

/* --- Flags: the base of entries ------------------------------------------------------------------ */

typedef struct {
    PyObject_HEAD
    char pending; /* whether a call has to be settled in Python */
    char blocks;  /* whether a call waits for its program */
} Flags;

static PyMemberDef flags_members[] = {
    {"pending", T_BOOL, offsetof(Flags, pending), 0, NULL},
    {"blocks", T_BOOL, offsetof(Flags, blocks), 0, NULL}, {NULL, 0, 0, 0, NULL}};

static PyType_Slot flags_slots[] = {
    {Py_tp_doc, "The flags of an entry that a warm call looks at."}, {Py_tp_members, flags_members},
    {0, NULL}};

static PyType_Spec flags_spec = {
    .name = "eqxjit._native.Flags", .basicsize = sizeof(Flags), .slots = flags_slots,
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE};

/* --- Calls in flight ----------------------------------------------------------------------------- */

typedef struct InFlight {
    struct InFlight *outer;
    PyObject *entry;  /* which entry is called */
    PyObject *call;   /* the slow path's Call; NULL for a call from here, which has: */
    PyObject *caller; /* the wrapper's Caller */
    PyObject *const *args;
    Py_ssize_t n_args;
    PyObject *kwnames;
} InFlight;

/* Of this thread. On the C stack, so that nothing is left of a call whatever ends it. */
static THREAD_LOCAL InFlight *innermost = NULL;

static PyObject *call_in_flight(PyObject *jitted, PyObject *const *arrays, Py_ssize_t n, InFlight *call) {
    call->outer = innermost;
    innermost = call;
    PyObject *output = PyObject_Vectorcall(jitted, arrays, (size_t)n | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
    innermost = call->outer;
    return output;
}

static PyObject *tuple_of(PyObject *const *items, Py_ssize_t n) {
    PyObject *made = PyTuple_New(n);
    for (Py_ssize_t i = 0; made != NULL && i < n; i++) PyTuple_SET_ITEM(made, i, Py_NewRef(items[i]));
    return made;
}

static PyObject *keywords_of(PyObject *const *values, PyObject *kwnames) {
    PyObject *made = PyDict_New();
    for (Py_ssize_t i = 0; made != NULL && kwnames != NULL && i < PyTuple_GET_SIZE(kwnames); i++) {
        if (PyDict_SetItem(made, PyTuple_GET_ITEM(kwnames, i), values[i]) < 0) Py_CLEAR(made);
    }
    return made;
}

static PyObject *in_flight(PyObject *Py_UNUSED(module), PyObject *entry) {
    for (InFlight *call = innermost; call != NULL; call = call->outer) {
        if (entry != Py_None && call->entry != entry) continue;
        if (call->call != NULL) return Py_NewRef(call->call);
        PyObject *args = tuple_of(call->args, call->n_args);
        PyObject *kwargs = keywords_of(call->args + call->n_args, call->kwnames);
        PyObject *found = NULL;
        if (args != NULL && kwargs != NULL) found = PyTuple_Pack(4, call->caller, call->entry, args, kwargs);
        Py_XDECREF(args);
        Py_XDECREF(kwargs);
        return found;
    }
    Py_RETURN_NONE;
}

static PyObject *run(PyObject *module, PyObject *const *args, Py_ssize_t n_args) {
    if (n_args != 3 || !PyList_CheckExact(args[1])) return misused("run(jitted, arrays, call)");
    State *state = PyModule_GetState(module);
    /* Another thread may change the list. */
    Py_ssize_t n = PyList_GET_SIZE(args[1]);
    PyObject *small[33], **arrays = room(small, 33, n + 1);
    if (arrays == NULL) return NULL;
    for (Py_ssize_t i = 0; i < n; i++) arrays[i + 1] = Py_NewRef(PyList_GET_ITEM(args[1], i));
    PyObject *output = NULL;
    PyObject *entry = PyObject_GetAttr(args[2], state->entry);
    if (entry != NULL) {
        InFlight call = {.entry = entry, .call = args[2]};
        output = call_in_flight(args[0], arrays + 1, n, &call);
        Py_DECREF(entry);
    }
    release(arrays, small, n + 1);
    return output;
}

/* --- Guards -------------------------------------------------------------------------------------- */

/* 1 if a stand-in is that of a value, 0 if not, -1 with an exception. */
static int same(State *state, PyObject *value, PyObject *frozen);

/* How many guards of this call have run Python. */
static Py_ssize_t n_in_python = 0;

/* The rule itself, for what is rare. */
static int same_in_python(State *state, PyObject *value, PyObject *frozen) {
    n_in_python++;
    PyObject *args[3] = {NULL, value, frozen};
    PyObject *answer = PyObject_Vectorcall(state->same, args + 1, 2 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
    if (answer == NULL) return -1;
    int is_same = PyObject_IsTrue(answer);
    Py_DECREF(answer);
    return is_same;
}

/* By identity: the object lives as long as its reference says so, so an address can't be another's. */
static int is_referent(PyObject *ref, PyObject *value) {
#if PY_VERSION_HEX >= 0x030D0000
    PyObject *found;
    if (PyWeakref_GetRef(ref, &found) < 0) return -1;
    Py_XDECREF(found);
    return found == value;
#else
    PyObject *found = PyWeakref_GetObject(ref);
    return found == value && found != Py_None;
#endif
}

static int same_number(State *state, PyObject *value, PyObject *frozen, PyObject *bits) {
    if (PyBool_Check(value)) return value == bits;
    if (!PyFloat_CheckExact(value) || !PyBytes_CheckExact(bits) ||
        PyBytes_GET_SIZE(bits) != sizeof(double)) {
        return same_in_python(state, value, frozen);
    }
    double a = PyFloat_AS_DOUBLE(value), b;
    memcpy(&b, PyBytes_AS_STRING(bits), sizeof b);
    /* Zeros have two signs, and NaN equals NaN. */
    return memcmp(&a, &b, sizeof a) == 0 || (a != a && b != b);
}

static int same_items(State *state, PyObject *value, PyObject *frozen, Py_ssize_t n) {
    for (Py_ssize_t i = 0; i < n; i++) {
        if (PySequence_Fast_GET_SIZE(value) != n) return 0;
        PyObject *item = Py_NewRef(PySequence_Fast_GET_ITEM(value, i));
        int is_same = same(state, item, PyTuple_GET_ITEM(frozen, HEAD + i));
        Py_DECREF(item);
        if (is_same <= 0) return is_same;
    }
    return PySequence_Fast_GET_SIZE(value) == n;
}

/* The keys come first in the stand-in, then the values; their order counts. */
static int same_pairs(State *state, PyObject *value, PyObject *frozen, Py_ssize_t n) {
    PyObject *key, *item;
    Py_ssize_t position = 0, half = n / 2;
    for (Py_ssize_t i = 0; i < half; i++) {
        /* An `==` of a user's may change the dict in between; `PyDict_Next` never leaves it. */
        if (PyDict_GET_SIZE(value) != half || !PyDict_Next(value, &position, &key, &item)) return 0;
        Py_INCREF(key);
        Py_INCREF(item);
        int is_same = same(state, key, PyTuple_GET_ITEM(frozen, HEAD + i));
        if (is_same > 0) is_same = same(state, item, PyTuple_GET_ITEM(frozen, HEAD + half + i));
        Py_DECREF(key);
        Py_DECREF(item);
        if (is_same <= 0) return is_same;
    }
    return PyDict_GET_SIZE(value) == half;
}

static int same_fields(State *state, PyObject *value, PyObject *frozen, Py_ssize_t n) {
    PyObject *names = PyTuple_GET_ITEM(frozen, 2);
    if (!PyTuple_CheckExact(names) || PyTuple_GET_SIZE(names) != n) return malformed();
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *field = PyObject_GetAttr(value, PyTuple_GET_ITEM(names, i));
        if (field == NULL) return -1;
        int is_same = same(state, field, PyTuple_GET_ITEM(frozen, HEAD + i));
        Py_DECREF(field);
        if (is_same <= 0) return is_same;
    }
    return 1;
}

static int same_parts(State *state, PyObject *value, PyObject *frozen) {
    Py_ssize_t n = PyTuple_GET_SIZE(frozen) - HEAD;
    if (n < 0 || !PyLong_CheckExact(PyTuple_GET_ITEM(frozen, 0))) return malformed();
    if ((PyObject *)Py_TYPE(value) != PyTuple_GET_ITEM(frozen, 1)) return 0;
    long reader = PyLong_AsLong(PyTuple_GET_ITEM(frozen, 0));
    if (reader == NUMBER && n > 0) return same_number(state, value, frozen, PyTuple_GET_ITEM(frozen, HEAD));
    int (*compare)(State *, PyObject *, PyObject *, Py_ssize_t) = NULL;
    if (reader == ITEMS && (PyTuple_Check(value) || PyList_Check(value))) compare = same_items;
    /* The order of other dicts isn't that of their memory. */
    else if (reader == PAIRS && PyDict_CheckExact(value)) {
        compare = same_pairs;
    }
    else if (reader == FIELDS) {
        compare = same_fields;
    }
    if (compare == NULL) return same_in_python(state, value, frozen);
    if (Py_EnterRecursiveCall(" while comparing static objects")) return -1;
    int is_same = compare(state, value, frozen, n);
    Py_LeaveRecursiveCall();
    return is_same;
}

/* By the object's `hash` and `==`, as a dict finds a key. */
static int same_opaque(State *state, PyObject *value, PyObject *frozen) {
    PyObject *expected = PyObject_GetAttr(frozen, state->value);
    PyObject *hash = expected == NULL ? NULL : PyObject_GetAttr(frozen, state->hash);
    int is_same = hash == NULL ? -1 : Py_TYPE(value) == Py_TYPE(expected);
    if (is_same > 0 && hash != Py_None) {
        Py_hash_t now = PyObject_Hash(value), then = PyLong_AsSsize_t(hash);
        is_same = (now == -1 || then == -1) && PyErr_Occurred() ? -1 : now == then;
    }
    if (is_same > 0 && value != expected) {
        /* NumPy's `==` has no single answer. */
        is_same = PyObject_TypeCheck(value, (PyTypeObject *)state->ndarray_type)
                      ? same_in_python(state, value, frozen)
                      : PyObject_RichCompareBool(value, expected, Py_EQ);
    }
    Py_XDECREF(expected);
    Py_XDECREF(hash);
    return is_same;
}

static int same(State *state, PyObject *value, PyObject *frozen) {
    PyTypeObject *type = Py_TYPE(frozen);
    /* Those that stand for themselves: exact types, whose `==` is Python's. */
    if (type == &PyUnicode_Type || type == &PyLong_Type || type == &PyBytes_Type) {
        return value == frozen || (Py_TYPE(value) == type ? PyObject_RichCompareBool(value, frozen, Py_EQ) : 0);
    }
    if (frozen == Py_None) return value == Py_None;
    if (PyWeakref_CheckRef(frozen)) return is_referent(frozen, value);
    if (type == &PyTuple_Type) return same_parts(state, value, frozen);
    if ((PyObject *)type == state->opaque_type) return same_opaque(state, value, frozen);
    return same_in_python(state, value, frozen);
}

/* What a walk over the arguments of a call takes from them. */
typedef struct {
    State *state;
    PyObject **arrays; /* in JAX's order: room for n_arrays */
    Py_ssize_t n_arrays, n_taken;
    Py_ssize_t n_first, n_fun; /* the function's come after the first */
    const char *uses;          /* a byte for each array: whether a program reads it */
    int waits;                 /* whether a NumPy array is too large to be copied */
    PyObject **statics;        /* static objects, in the order of the spec: room for n_statics */
    Py_ssize_t n_statics, n_static;
} Walk;

/* Returns what to pass for a leaf: a new reference, NULL without an exception for what is no array. */
static PyObject *passed_for(State *state, PyObject *leaf, int is_used, int *waits) {
    if ((PyObject *)Py_TYPE(leaf) == state->array_type) return Py_NewRef(leaf);
    PyTypeObject *type = Py_TYPE(leaf);
    if (type == &PyTuple_Type || type == &PyList_Type || type == &PyDict_Type ||
        type == &PyLong_Type || type == &PyFloat_Type || type == &PyUnicode_Type ||
        type == &PyBool_Type || leaf == Py_None) {
        return NULL;
    }
    int is_ndarray = PyObject_TypeCheck(leaf, (PyTypeObject *)state->ndarray_type);
    if (is_ndarray && !is_used) return Py_NewRef(leaf);
    PyObject *array = PyObject_CallOneArg(state->take, leaf);
    if (array == Py_NotImplemented) Py_CLEAR(array);
    if (array == leaf && is_ndarray) *waits = 1;
    return array;
}

static int match_array(Walk *walk, PyObject *value) {
    Py_ssize_t i = walk->n_taken + (walk->n_taken >= walk->n_first ? walk->n_fun : 0);
    if (i >= walk->n_arrays) return malformed();
    PyObject *array = passed_for(walk->state, value, walk->uses[i], &walk->waits);
    if (array == NULL) return PyErr_Occurred() ? -1 : 0;
    walk->arrays[i] = array;
    walk->n_taken++;
    return 1;
}

static int keep(Walk *walk, PyObject *value) {
    if (walk->n_static >= walk->n_statics) return malformed();
    walk->statics[walk->n_static++] = Py_NewRef(value);
    return 1;
}

static int match_static(Walk *walk, PyObject *value, Static *expected) {
    if (keep(walk, value) < 0) return -1;
    if (expected->ask) {
        PyObject *flat = PyObject_CallOneArg(walk->state->flatten, value);
        if (flat == NULL) return -1;
        int is_leaf = flat == Py_None;
        Py_DECREF(flat);
        if (!is_leaf) return 0;
    }
    return same(walk->state, value, expected->frozen);
}

static int match(Walk *walk, PyObject *spec, PyObject *value);

static int match_sequence(Walk *walk, PyObject *spec, PyObject *value, Py_ssize_t n) {
    if (!PyTuple_Check(value) && !PyList_CheckExact(value)) return malformed();
    for (Py_ssize_t i = 0; i < n; i++) {
        if (PySequence_Fast_GET_SIZE(value) != n) return 0;
        PyObject *item = Py_NewRef(PySequence_Fast_GET_ITEM(value, i));
        int matches = match(walk, PyTuple_GET_ITEM(spec, HEAD + i), item);
        Py_DECREF(item);
        if (matches <= 0) return matches;
    }
    return PySequence_Fast_GET_SIZE(value) == n;
}

static int match_dict(Walk *walk, PyObject *spec, PyObject *value, Py_ssize_t n) {
    PyObject *keys = PyTuple_GET_ITEM(spec, 2), *key, *item;
    if (!PyTuple_CheckExact(keys) || PyTuple_GET_SIZE(keys) != n || !PyDict_CheckExact(value)) {
        return malformed();
    }
    if (PyDict_GET_SIZE(value) != n) return 0;
    /* A key of a class derived from `str` equals a text, too. */
    Py_ssize_t position = 0;
    while (PyDict_Next(value, &position, &key, &item)) if (!PyUnicode_CheckExact(key)) return 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        item = PyDict_GetItemWithError(value, PyTuple_GET_ITEM(keys, i));
        if (item == NULL) return PyErr_Occurred() ? -1 : 0;
        Py_INCREF(item);
        int matches = match(walk, PyTuple_GET_ITEM(spec, HEAD + i), item);
        Py_DECREF(item);
        if (matches <= 0) return matches;
    }
    return PyDict_GET_SIZE(value) == n;
}

static int match_module(Walk *walk, PyObject *spec, PyObject *value, Py_ssize_t n) {
    PyObject *names = PyTuple_GET_ITEM(spec, 2);
    if (!PyTuple_CheckExact(names) || PyTuple_GET_SIZE(names) != n) return malformed();
    /* Past `Module.__getattribute__`, which is Python. */
    PyObject *fields = PyObject_GenericGetDict(value, NULL);
    if (fields == NULL) return -1;
    int matches = PyDict_CheckExact(fields) && PyDict_GET_SIZE(fields) == n;
    Py_ssize_t position = 0;
    for (Py_ssize_t i = 0; matches > 0 && i < n; i++) {
        PyObject *name = PyTuple_GET_ITEM(names, i), *key, *item;
        /* Mostly they come in the order of the names; a lookup where they don't. */
        if (!PyDict_Next(fields, &position, &key, &item)) {
            matches = 0;
            break;
        }
        if (key != name) {
            item = PyDict_GetItemWithError(fields, name);
            if (item == NULL) {
                matches = PyErr_Occurred() ? -1 : 0;
                break;
            }
        }
        Py_INCREF(item);
        matches = match(walk, PyTuple_GET_ITEM(spec, HEAD + i), item);
        Py_DECREF(item);
    }
    if (matches > 0 && PyDict_GET_SIZE(fields) != n) matches = 0;
    Py_DECREF(fields);
    return matches;
}

/* A node of JAX's registry: its flatten runs on every call. */
static int match_node(Walk *walk, PyObject *spec, PyObject *value, Py_ssize_t n) {
    State *state = walk->state;
    PyObject *metadata = PyTuple_GET_ITEM(spec, 2);
    if (Py_TYPE(metadata) != state->static_type) return malformed();
    n_in_python++;
    PyObject *flat = PyObject_CallOneArg(state->flatten, value);
    if (flat == NULL) return -1;
    int matches = 0;
    if (flat != Py_None) {
        if (!PyTuple_CheckExact(flat) || PyTuple_GET_SIZE(flat) != 2) {
            Py_DECREF(flat);
            return malformed();
        }
        matches = keep(walk, PyTuple_GET_ITEM(flat, 1));
        if (matches > 0) matches = same(state, PyTuple_GET_ITEM(flat, 1), ((Static *)metadata)->frozen);
        PyObject *children = NULL;
        if (matches > 0) {
            children = PySequence_Tuple(PyTuple_GET_ITEM(flat, 0));
            matches = children == NULL ? -1 : PyTuple_GET_SIZE(children) == n;
        }
        for (Py_ssize_t i = 0; matches > 0 && i < n; i++) {
            matches = match(walk, PyTuple_GET_ITEM(spec, HEAD + i), PyTuple_GET_ITEM(children, i));
        }
        Py_XDECREF(children);
    }
    Py_DECREF(flat);
    return matches;
}

/* Kinds are small numbers, which CPython makes once; -1 with an exception for anything else. */
static long kind_of(PyObject *spec) {
    if (!PyTuple_CheckExact(spec) || PyTuple_GET_SIZE(spec) < HEAD ||
        !PyLong_CheckExact(PyTuple_GET_ITEM(spec, 0))) {
        return malformed();
    }
    return PyLong_AsLong(PyTuple_GET_ITEM(spec, 0));
}

/* 1 if a value has a spec, 0 if not, -1 with an exception. */
static int match(Walk *walk, PyObject *spec, PyObject *value) {
    static int (*const by_kind[])(Walk *, PyObject *, PyObject *, Py_ssize_t) = {
        match_sequence, match_dict, match_module, match_node};
    if (spec == walk->state->array_mark) return match_array(walk, value);
    if (spec == Py_None) return value == Py_None;
    if (Py_TYPE(spec) == walk->state->static_type) return match_static(walk, value, (Static *)spec);
    long kind = kind_of(spec);
    if (kind < SEQUENCE || kind > NODE) return malformed();
    if ((PyObject *)Py_TYPE(value) != PyTuple_GET_ITEM(spec, 1)) return 0;
    if (Py_EnterRecursiveCall(" while matching arguments")) return -1;
    int matches = by_kind[kind](walk, spec, value, PyTuple_GET_SIZE(spec) - HEAD);
    Py_LeaveRecursiveCall();
    return matches;
}

/* --- Outputs ------------------------------------------------------------------------------------- */

/* What an output is made of. */
typedef struct {
    State *state;
    PyObject *const *arrays;
    Py_ssize_t n_arrays, n_taken;
    PyObject *statics, *slots; /* of the trace: objects, and the numbers of those that came in */
    Py_ssize_t n_made;         /* how many static objects were used */
    PyObject *fun_statics;     /* those that came in: the function's, then those of the arguments */
    PyObject *const *call_statics;
    Py_ssize_t n_call_statics;
} Make;

static PyObject *make(Make *parts, PyObject *spec);

static PyObject *next_static(Make *parts) {
    Py_ssize_t i = parts->n_made++;
    if (i >= PyTuple_GET_SIZE(parts->slots) || i >= PyTuple_GET_SIZE(parts->statics)) return malformed_object();
    Py_ssize_t slot = PyLong_AsSsize_t(PyTuple_GET_ITEM(parts->slots, i));
    if (slot < 0) return PyErr_Occurred() ? NULL : Py_NewRef(PyTuple_GET_ITEM(parts->statics, i));
    Py_ssize_t n_fun = PyTuple_GET_SIZE(parts->fun_statics);
    if (slot < n_fun) return Py_NewRef(PyTuple_GET_ITEM(parts->fun_statics, slot));
    if (slot - n_fun >= parts->n_call_statics) return malformed_object();
    return Py_NewRef(parts->call_statics[slot - n_fun]);
}

static PyObject *make_items(Make *parts, PyObject *spec, Py_ssize_t n, int is_list) {
    PyObject *made = is_list ? PyList_New(n) : PyTuple_New(n);
    if (made == NULL || n == 0) return made;
    PyObject_GC_UnTrack(made);
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *part = make(parts, PyTuple_GET_ITEM(spec, HEAD + i));
        if (part == NULL) {
            Py_DECREF(made);
            return NULL;
        }
        if (is_list) PyList_SET_ITEM(made, i, part);
        else PyTuple_SET_ITEM(made, i, part);
    }
    PyObject_GC_Track(made);
    return made;
}

static PyObject *make_sequence(Make *parts, PyObject *spec, Py_ssize_t n) {
    PyObject *cls = PyTuple_GET_ITEM(spec, 1), *aux = PyTuple_GET_ITEM(spec, 2);
    if (cls == (PyObject *)&PyList_Type) return make_items(parts, spec, n, 1);
    PyObject *items = make_items(parts, spec, n, 0);
    if (items == NULL || aux == Py_None) return items;
    PyObject *made;
    if (aux == Py_True && PyType_Check(cls) && PyType_IsSubtype((PyTypeObject *)cls, &PyTuple_Type)) {
        /* A named tuple whose class, called, does no more than this. */
        PyObject *args = PyTuple_Pack(1, items);
        made = args == NULL ? NULL : PyTuple_Type.tp_new((PyTypeObject *)cls, args, NULL);
        Py_XDECREF(args);
    }
    else {
        made = PyObject_Call(cls, items, NULL);
    }
    Py_DECREF(items);
    return made;
}

static PyObject *make_dict(Make *parts, PyObject *spec, Py_ssize_t n) {
    PyObject *keys = PyTuple_GET_ITEM(spec, 2);
    if (!PyTuple_CheckExact(keys) || PyTuple_GET_SIZE(keys) != n) return malformed_object();
    PyObject *made = PyDict_New();
    for (Py_ssize_t i = 0; made != NULL && i < n; i++) {
        PyObject *part = make(parts, PyTuple_GET_ITEM(spec, HEAD + i));
        if (part == NULL || PyDict_SetItem(made, PyTuple_GET_ITEM(keys, i), part) < 0) Py_CLEAR(made);
        Py_XDECREF(part);
    }
    return made;
}

static PyObject *make_module(Make *parts, PyObject *spec, Py_ssize_t n) {
    PyObject *cls = PyTuple_GET_ITEM(spec, 1), *names = PyTuple_GET_ITEM(spec, 2);
    if (!PyTuple_CheckExact(names) || PyTuple_GET_SIZE(names) != n || !PyType_Check(cls)) return malformed_object();
    /* `object.__new__` itself refuses a class whose objects begin otherwise, its slot doesn't. */
    PyTypeObject *base = (PyTypeObject *)cls;
    while (base->tp_flags & Py_TPFLAGS_HEAPTYPE) base = base->tp_base;
    if (base != &PyBaseObject_Type) return malformed_object();
    PyObject *small[32], **values = room(small, 32, n), *made = NULL;
    if (values == NULL) return NULL;
    Py_ssize_t i = 0;
    while (i < n && (values[i] = make(parts, PyTuple_GET_ITEM(spec, HEAD + i))) != NULL) i++;
    if (i == n) {
        /* Field by field, past Equinox's `__setattr__`: CPython then makes no dict before somebody asks. */
        made = PyBaseObject_Type.tp_new((PyTypeObject *)cls, parts->state->empty, NULL);
        for (i = 0; made != NULL && i < n; i++) {
            if (PyObject_GenericSetAttr(made, PyTuple_GET_ITEM(names, i), values[i]) < 0) Py_CLEAR(made);
        }
    }
    release(values, small, n);
    return made;
}

static PyObject *make_node(Make *parts, PyObject *spec, Py_ssize_t n) {
    PyObject *metadata = next_static(parts);
    PyObject *children = metadata == NULL ? NULL : make_items(parts, spec, n, 1);
    PyObject *made = NULL;
    if (children != NULL) {
        PyObject *args[4] = {NULL, PyTuple_GET_ITEM(spec, 1), metadata, children};
        made = PyObject_Vectorcall(parts->state->unflatten, args + 1, 3 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
        Py_DECREF(children);
    }
    Py_XDECREF(metadata);
    return made;
}

static PyObject *make(Make *parts, PyObject *spec) {
    static PyObject *(*const by_kind[])(Make *, PyObject *, Py_ssize_t) = {
        make_sequence, make_dict, make_module, make_node};
    if (spec == parts->state->array_mark) {
        if (parts->n_taken >= parts->n_arrays) return malformed_object();
        return Py_NewRef(parts->arrays[parts->n_taken++]);
    }
    if (spec == Py_None) Py_RETURN_NONE;
    if (Py_TYPE(spec) == parts->state->static_type) return next_static(parts);
    long kind = kind_of(spec);
    if (kind < SEQUENCE || kind > NODE) return malformed_object();
    if (Py_EnterRecursiveCall(" while making an output")) return NULL;
    PyObject *made = by_kind[kind](parts, spec, PyTuple_GET_SIZE(spec) - HEAD);
    Py_LeaveRecursiveCall();
    return made;
}

/* --- Fast: the fast path of an entry ------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    PyObject *entry;
    PyObject *jitted;
    PyObject *args, *kwargs; /* the specs of the positional arguments and of the others */
    PyObject *outs;          /* a list of what the entry's traces returned */
    PyObject *uses;          /* bytes: whether a program reads each array */
    Py_ssize_t n_arrays, n_first, n_fun, n_statics;
    long long hits, hits_before;
    char is_stale; /* whether a later program reads arrays that aren't copied */
} Fast;

/* How many static objects a walk keeps; -1 with an exception. */
static Py_ssize_t count_statics(State *state, PyObject *spec) {
    if (spec == state->array_mark || spec == Py_None) return 0;
    if (Py_TYPE(spec) == state->static_type) return 1;
    long kind = kind_of(spec);
    if (kind < SEQUENCE || kind > NODE) return malformed();
    if (Py_EnterRecursiveCall(" while reading a spec")) return -1;
    Py_ssize_t n = kind == NODE;
    for (Py_ssize_t i = HEAD; n >= 0 && i < PyTuple_GET_SIZE(spec); i++) {
        Py_ssize_t below = count_statics(state, PyTuple_GET_ITEM(spec, i));
        n = below < 0 ? -1 : n + below;
    }
    Py_LeaveRecursiveCall();
    return n;
}

static PyObject *fast_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    State *state = state_of(type);
    PyObject *entry, *jitted, *args_spec, *kwargs_spec, *outs, *uses;
    Py_ssize_t n_arrays, n_first, n_fun;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "O!OO!O!O!Snnn:Fast", state->flags_type, &entry, &jitted,
                          &PyTuple_Type, &args_spec, &PyTuple_Type, &kwargs_spec, &PyList_Type,
                          &outs, &uses, &n_arrays, &n_first, &n_fun)) {
        return NULL;
    }
    Py_ssize_t a = count_statics(state, args_spec), b = a < 0 ? -1 : count_statics(state, kwargs_spec);
    if (a < 0 || b < 0) return NULL;
    if (n_fun < 0 || n_first < 0 || n_first > n_arrays || n_fun > n_arrays - n_first || PyBytes_GET_SIZE(uses) != n_arrays ||
        !PyTuple_CheckExact(PyTuple_GET_ITEM(kwargs_spec, 2)) ||
        PyTuple_GET_SIZE(PyTuple_GET_ITEM(kwargs_spec, 2)) != PyTuple_GET_SIZE(kwargs_spec) - HEAD) return malformed_object();
    Fast *self = (Fast *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    self->entry = Py_NewRef(entry);
    self->jitted = Py_NewRef(jitted);
    self->args = Py_NewRef(args_spec);
    self->kwargs = Py_NewRef(kwargs_spec);
    self->outs = Py_NewRef(outs);
    self->uses = Py_NewRef(uses);
    self->n_arrays = n_arrays;
    self->n_first = n_first;
    self->n_fun = n_fun;
    self->n_statics = a + b;
    return (PyObject *)self;
}

#define FAST_FIELDS(DO) DO(self->entry); DO(self->jitted); DO(self->args); DO(self->kwargs); \
    DO(self->outs); DO(self->uses);
COLLECTED(Fast, fast, FAST_FIELDS)

#define MANY 128

/* A call on its way through a fast path. */
typedef struct {
    Walk walk;
    PyObject *bound_room[16], **bound; /* borrowed: the arguments in the order of the spec */
    PyObject *arrays_room[MANY + 1], **arrays;
    PyObject *statics_room[MANY], **statics;
    Py_ssize_t n_bound;
} Attempt;

static void end_attempt(Attempt *attempt) {
    release(attempt->arrays, attempt->arrays_room, attempt->walk.n_arrays + 1);
    release(attempt->statics, attempt->statics_room, attempt->walk.n_static);
}

/* The place of a name among others, -1 if it isn't there. */
static Py_ssize_t find_name(PyObject *names, PyObject *name) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); i++) {
        PyObject *other = PyTuple_GET_ITEM(names, i);
        if (other == name || (PyUnicode_CheckExact(other) && PyUnicode_Compare(other, name) == 0)) return i;
    }
    return -1;
}

/* Binds arguments as `inspect.BoundArguments` has them: 1 if they are as many, and of the names, of the
   call that the spec is of. Whether the signature takes them is clear then. */
static int bind(Fast *fast, PyObject *names, PyObject *const *args, Py_ssize_t n, PyObject *kwnames,
     PyObject **bound) {
    Py_ssize_t n_args = PyTuple_GET_SIZE(fast->args) - HEAD;
    Py_ssize_t n_named = kwnames == NULL ? 0 : PyTuple_GET_SIZE(kwnames);
    for (Py_ssize_t i = 0; i < n; i++) bound[i] = args[i];
    for (Py_ssize_t i = 0; i < n_named; i++) {
        PyObject *name = PyTuple_GET_ITEM(kwnames, i);
        if (!PyUnicode_CheckExact(name)) return 0;
        Py_ssize_t place = find_name(names, name);
        if (place < 0 || place >= n_args) {
            place = find_name(PyTuple_GET_ITEM(fast->kwargs, 2), name);
            if (place < 0) return 0;
            place += n_args;
        }
        if (bound[place] != NULL) return 0;
        bound[place] = args[n + i];
    }
    return 1;
}

/* The spec of the i-th of the bound arguments: the keywords follow the others. */
static PyObject *spec_of(Fast *fast, Py_ssize_t n_args, Py_ssize_t i) {
    return i < n_args ? PyTuple_GET_ITEM(fast->args, HEAD + i) : PyTuple_GET_ITEM(fast->kwargs, HEAD + i - n_args);
}

/* 1 if the arguments match, with their arrays and static objects in `attempt`, 0 if not, -1 with an
   exception. Only in the first case is `attempt` to be ended. */
static int match_call(State *state, Fast *fast, PyObject *fun_arrays, PyObject *names, PyObject *const *args,
           Py_ssize_t n, PyObject *kwnames, int is_one_of_many, Attempt *attempt) {
    Py_ssize_t n_args = PyTuple_GET_SIZE(fast->args) - HEAD;
    Py_ssize_t n_bound = n_args + PyTuple_GET_SIZE(fast->kwargs) - HEAD;
    Py_ssize_t n_named = kwnames == NULL ? 0 : PyTuple_GET_SIZE(kwnames);
    if (n > n_args || n + n_named != n_bound || PyTuple_GET_SIZE(fun_arrays) != fast->n_fun) return 0;
    PyObject *const *bound = args;
    int matches = 0;
    attempt->bound = attempt->bound_room;
    if (n_named > 0) {
        attempt->bound = room(attempt->bound_room, 16, n_bound);
        if (attempt->bound == NULL) return -1;
        bound = attempt->bound;
        if (!bind(fast, names, args, n, kwnames, attempt->bound)) goto done;
    }
    for (Py_ssize_t i = 0; is_one_of_many && i < n_bound; i++) {
        /* Numbers and texts among the arguments tell structures apart fastest. */
        PyObject *spec = spec_of(fast, n_args, i);
        if (Py_TYPE(spec) != state->static_type) continue;
        PyObject *frozen = ((Static *)spec)->frozen;
        int is_cheap = PyLong_CheckExact(frozen) || PyUnicode_CheckExact(frozen);
        if (is_cheap && same(state, bound[i], frozen) == 0) goto done;
    }
    Walk *walk = &attempt->walk;
    *walk = (Walk){
        .state = state, .n_arrays = fast->n_arrays, .n_first = fast->n_first, .n_fun = fast->n_fun,
        .n_statics = fast->n_statics, .uses = PyBytes_AS_STRING(fast->uses)};
    matches = -1;
    attempt->arrays = room(attempt->arrays_room, MANY + 1, fast->n_arrays + 1);
    if (attempt->arrays == NULL) goto done;
    attempt->statics = room(attempt->statics_room, MANY, fast->n_statics);
    if (attempt->statics == NULL) {
        release(attempt->arrays, attempt->arrays_room, fast->n_arrays + 1);
        goto done;
    }
    walk->arrays = attempt->arrays + 1;
    walk->statics = attempt->statics;
    matches = 1;
    for (Py_ssize_t i = 0; matches > 0 && i < n_bound; i++) {
        matches = match(walk, spec_of(fast, n_args, i), bound[i]);
    }
    for (Py_ssize_t i = 0; matches > 0 && i < fast->n_fun; i++) {
        Py_ssize_t place = fast->n_first + i;
        PyObject *leaf = PyTuple_GET_ITEM(fun_arrays, i);
        PyObject *array = passed_for(state, leaf, walk->uses[place], &walk->waits);
        if (array == NULL) matches = PyErr_Occurred() ? -1 : 0;
        walk->arrays[place] = array;
    }
    if (matches > 0 && walk->n_taken + fast->n_fun != fast->n_arrays) matches = malformed();
    if (matches <= 0) end_attempt(attempt);
done:
    if (attempt->bound != attempt->bound_room) PyMem_Free((void *)attempt->bound);
    return matches;
}

/* Returns the user's output, from what JAX returned. */
static PyObject *make_output(State *state, Fast *fast, PyObject *output, PyObject *fun_statics,
            PyObject *const *call_statics, Py_ssize_t n_call_statics) {
    Py_ssize_t index = 0;
    PyObject *arrays = output;
    if (PyDict_CheckExact(output)) {
        PyObject *key;
        Py_ssize_t position = 0;
        if (!PyDict_Next(output, &position, &key, &arrays)) return malformed_object();
        index = PyLong_AsSsize_t(key);
        if (index == -1 && PyErr_Occurred()) return NULL;
    }
    if (index < 0 || index >= PyList_GET_SIZE(fast->outs)) return malformed_object();
    PyObject *out = Py_NewRef(PyList_GET_ITEM(fast->outs, index)), *made = NULL;
    if (!PyTuple_Check(out) || PyTuple_GET_SIZE(out) != 3 || !PyTuple_CheckExact(PyTuple_GET_ITEM(out, 1)) ||
        !PyTuple_CheckExact(PyTuple_GET_ITEM(out, 2))) {
        malformed();
    }
    else {
        int is_list = PyList_CheckExact(arrays);
        Make parts = {
            .state = state, .arrays = is_list ? &PyList_GET_ITEM(arrays, 0) : &arrays,
            .n_arrays = is_list ? PyList_GET_SIZE(arrays) : 1, .statics = PyTuple_GET_ITEM(out, 1),
            .slots = PyTuple_GET_ITEM(out, 2), .fun_statics = fun_statics, .call_statics = call_statics,
            .n_call_statics = n_call_statics};
        made = make(&parts, PyTuple_GET_ITEM(out, 0));
    }
    Py_DECREF(out);
    return made;
}

static PyObject *fast_match(Fast *self, PyObject *const *args, Py_ssize_t n, PyObject *kwnames) {
    if (n < 1 || !PyTuple_CheckExact(args[0])) return misused("match(fun_arrays, *args, **kwargs)");
    State *state = state_of(Py_TYPE(self));
    Attempt attempt;
    int matches = match_call(state, self, args[0], state->empty, args + 1, n - 1, kwnames, 0, &attempt);
    if (matches == 0) Py_RETURN_NONE;
    if (matches < 0) return NULL;
    PyObject *arrays = tuple_of(attempt.walk.arrays, attempt.walk.n_arrays);
    PyObject *statics = tuple_of(attempt.statics, attempt.walk.n_static), *found = NULL;
    if (arrays != NULL && statics != NULL) found = PyTuple_Pack(2, arrays, statics);
    Py_XDECREF(arrays);
    Py_XDECREF(statics);
    end_attempt(&attempt);
    return found;
}

static PyObject *fast_make(Fast *self, PyObject *args) {
    PyObject *output, *statics;
    if (!PyArg_ParseTuple(args, "OO!:make", &output, &PyTuple_Type, &statics)) return NULL;
    return make_output(state_of(Py_TYPE(self)), self, output, statics, NULL, 0);
}

static PyMethodDef fast_methods[] = {
    {"match", (PyCFunction)(void (*)(void))fast_match, METH_FASTCALL | METH_KEYWORDS,
     "match(fun_arrays, *args, **kwargs): the arrays and static objects of a bound call, or None."},
    {"make", (PyCFunction)fast_make, METH_VARARGS,
     "make(output, statics): the user's output, from JAX's and the static objects that came in."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef fast_members[] = {
    {"entry", T_OBJECT, offsetof(Fast, entry), READONLY, NULL},
    {"hits", T_LONGLONG, offsetof(Fast, hits), READONLY, NULL},
    {"is_stale", T_BOOL, offsetof(Fast, is_stale), 0, NULL},
    {"hits_before", T_LONGLONG, offsetof(Fast, hits_before), 0, NULL}, {NULL, 0, 0, 0, NULL}};

static PyType_Slot fast_slots[] = {
    {Py_tp_doc, "Fast(entry, jitted, args, kwargs, outs, uses, n_arrays, n_first, n_fun): the fast " "path of an entry."},
    {Py_tp_new, fast_new}, COLLECTED_SLOTS(fast), {Py_tp_members, fast_members},
    {Py_tp_methods, fast_methods}, {0, NULL}};

static PyType_Spec fast_spec = {
    .name = "eqxjit._native.Fast", .basicsize = sizeof(Fast), .slots = fast_slots,
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE};

/* --- Dispatcher: the call of one wrapper --------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    State *state;
    PyObject *caller;      /* the slow path */
    PyObject *fasts;       /* the function's list */
    PyObject *fun_arrays;  /* the function's arrays */
    PyObject *fun_statics; /* and static objects */
    PyObject *names;       /* of the parameters that take positional arguments; None: by position only */
} Dispatcher;

/* Takes the exception that is set, with its traceback. */
static PyObject *take_exception(void) {
#if PY_VERSION_HEX >= 0x030C0000
    return PyErr_GetRaisedException();
#else
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (traceback != NULL) PyException_SetTraceback(value, traceback);
    Py_XDECREF(type);
    Py_XDECREF(traceback);
    return value;
#endif
}

static void set_exception(PyObject *error) {
    PyErr_SetObject((PyObject *)Py_TYPE(error), error);
}

/* Calls a method of the caller with (first[, entry], args, kwargs). */
static PyObject *ask_caller(Dispatcher *self, PyObject *method, PyObject *first, PyObject *entry,
           PyObject *const *args, Py_ssize_t n, PyObject *kwnames) {
    PyObject *positional = tuple_of(args, n), *keywords = keywords_of(args + n, kwnames);
    PyObject *result = NULL;
    if (positional != NULL && keywords != NULL) {
        PyObject *all[6] = {NULL, self->caller, first, NULL, NULL, NULL};
        size_t n_all = 2;
        if (entry != NULL) all[++n_all] = entry;
        all[++n_all] = positional;
        all[++n_all] = keywords;
        result = PyObject_VectorcallMethod(method, all + 1, n_all | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
    }
    Py_XDECREF(positional);
    Py_XDECREF(keywords);
    return result;
}

/* Makes a call whose arguments match. */
static PyObject *call_fast(Dispatcher *self, Fast *fast, Attempt *attempt, PyObject *const *args, Py_ssize_t n,
          PyObject *kwnames) {
    State *state = self->state;
    Flags *flags = (Flags *)fast->entry;
    InFlight call = {
        .entry = fast->entry, .caller = self->caller, .args = args, .n_args = n, .kwnames = kwnames};
    PyObject *output = call_in_flight(fast->jitted, attempt->walk.arrays, attempt->walk.n_arrays, &call);
    /* What is pending is waited for when it is settled. */
    if (output != NULL && !flags->pending && (flags->blocks || attempt->walk.waits || fast->is_stale)) {
        PyObject *done = PyObject_CallOneArg(state->wait_for, output);
        if (done == NULL) Py_CLEAR(output);
        Py_XDECREF(done);
    }
    if (output == NULL) {
        PyObject *error = take_exception();
        PyObject *result = ask_caller(self, state->failed_fast, error, fast->entry, args, n, kwnames);
        if (result != NULL) {
            /* It raises, whatever it finds. */
            Py_DECREF(result);
            set_exception(error);
        }
        Py_DECREF(error);
        return NULL;
    }
    PyObject *result;
    if (flags->pending) {
        result = ask_caller(self, state->settle_fast, output, fast->entry, args, n, kwnames);
    }
    else {
        fast->hits++;
        result = make_output(state, fast, output, self->fun_statics, attempt->statics, attempt->walk.n_static);
    }
    Py_DECREF(output);
    return result;
}

#define MANY_IN_PYTHON 100

static void move_to_front(PyObject *fasts, Py_ssize_t i, PyObject *fast) {
    /* What ran meanwhile may have changed the list. */
    if (i >= PyList_GET_SIZE(fasts) || PyList_GET_ITEM(fasts, i) != fast) return;
    for (; i > 0; i--) PyList_SET_ITEM(fasts, i, PyList_GET_ITEM(fasts, i - 1));
    PyList_SET_ITEM(fasts, 0, fast);
}

static PyObject *dispatch(PyObject *callable, PyObject *const *args, size_t n_args_flag, PyObject *kwnames) {
    Dispatcher *self = (Dispatcher *)callable;
    State *state = self->state;
    Py_ssize_t n = PyVectorcall_NARGS(n_args_flag);
    PyObject *fasts = self->fasts;
    n_in_python = 0;
    /* The slow path finds a structure by one look-up: where many guards fail in Python it is faster. */
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(fasts) && (i == 0 || n_in_python < MANY_IN_PYTHON); i++) {
        PyObject *fast = PyList_GET_ITEM(fasts, i);
        if (Py_TYPE(fast) != state->fast_type) continue;
        Py_INCREF(fast);
        Attempt attempt;
        int matches = match_call(state, (Fast *)fast, self->fun_arrays, self->names, args, n, kwnames,
                                 PyList_GET_SIZE(fasts) > 1, &attempt);
        PyObject *result = NULL;
        if (matches > 0) {
            if (i > 0) move_to_front(fasts, i, fast);
            result = call_fast(self, (Fast *)fast, &attempt, args, n, kwnames);
            end_attempt(&attempt);
        }
        else if (matches < 0) {
            PyObject *error = take_exception();
            result = ask_caller(self, state->interrupted, error, NULL, args, n, kwnames);
            Py_DECREF(error);
        }
        Py_DECREF(fast);
        if (matches != 0) return result;
    }
    PyObject *method = PyObject_GetAttr(self->caller, state->slow_call);
    if (method == NULL) return NULL;
    PyObject *result = PyObject_Vectorcall(method, args, n_args_flag, kwnames);
    Py_DECREF(method);
    return result;
}

static PyObject *dispatcher_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *caller, *fasts, *fun_arrays, *fun_statics, *names;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "OO!O!O!O!:Dispatcher", &caller, &PyList_Type, &fasts, &PyTuple_Type,
                          &fun_arrays, &PyTuple_Type, &fun_statics, &PyTuple_Type, &names)) {
        return NULL;
    }
    Dispatcher *self = (Dispatcher *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    self->vectorcall = dispatch;
    self->state = state_of(type);
    self->caller = Py_NewRef(caller);
    self->fasts = Py_NewRef(fasts);
    self->fun_arrays = Py_NewRef(fun_arrays);
    self->fun_statics = Py_NewRef(fun_statics);
    self->names = Py_NewRef(names);
    return (PyObject *)self;
}

#define DISPATCHER_FIELDS(DO) DO(self->caller); DO(self->fasts); DO(self->fun_arrays); \
    DO(self->fun_statics); DO(self->names);
COLLECTED(Dispatcher, dispatcher, DISPATCHER_FIELDS)

static PyMemberDef dispatcher_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Dispatcher, vectorcall), READONLY, NULL},
    {"caller", T_OBJECT, offsetof(Dispatcher, caller), READONLY, NULL}, {NULL, 0, 0, 0, NULL}};

static PyType_Slot dispatcher_slots[] = {
    {Py_tp_doc, "Dispatcher(caller, fasts, fun_arrays, fun_statics, names): the call of a wrapper."},
    {Py_tp_new, dispatcher_new}, {Py_tp_call, PyVectorcall_Call}, COLLECTED_SLOTS(dispatcher),
    {Py_tp_members, dispatcher_members}, {0, NULL}};

static PyType_Spec dispatcher_spec = {
    .name = "eqxjit._native.Dispatcher", .basicsize = sizeof(Dispatcher), .slots = dispatcher_slots,
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_IMMUTABLETYPE};

/* --- Delegate: the base of wrappers ---------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *target;
} Delegate;

static PyObject *delegate_call(PyObject *callable, PyObject *const *args, size_t n_args_flag, PyObject *kwnames) {
    PyObject *target = ((Delegate *)callable)->target;
    if (target == NULL) {
        PyErr_SetString(PyExc_AttributeError, "__call__");
        return NULL;
    }
    /* No frame of Python counts the calls of a target that leads back here. */
    if (Py_EnterRecursiveCall(" while calling a wrapper")) return NULL;
    /* The call may put another one in its place. */
    Py_INCREF(target);
    PyObject *result = PyObject_Vectorcall(target, args, n_args_flag, kwnames);
    Py_DECREF(target);
    Py_LeaveRecursiveCall();
    return result;
}

static PyObject *delegate_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs)) {
    Delegate *self = (Delegate *)type->tp_alloc(type, 0);
    if (self != NULL) self->vectorcall = delegate_call;
    return (PyObject *)self;
}

#define DELEGATE_FIELDS(DO) DO(self->target);
COLLECTED(Delegate, delegate, DELEGATE_FIELDS)

static PyObject *call_directly(PyObject *module, PyObject *cls) {
    State *state = PyModule_GetState(module);
    if (!PyType_Check(cls) || !PyType_IsSubtype((PyTypeObject *)cls, state->delegate_type)) return misused("a subclass of Delegate, please");
    ((PyTypeObject *)cls)->tp_flags |= Py_TPFLAGS_HAVE_VECTORCALL;
    return Py_NewRef(cls);
}

static PyMemberDef delegate_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Delegate, vectorcall), READONLY, NULL},
    {"target", T_OBJECT_EX, offsetof(Delegate, target), 0, NULL}, {NULL, 0, 0, 0, NULL}};

static PyType_Slot delegate_slots[] = {
    {Py_tp_doc, "A base of classes whose instances, called, call their `target`."},
    {Py_tp_new, delegate_new}, {Py_tp_call, PyVectorcall_Call}, {Py_tp_members, delegate_members},
    COLLECTED_SLOTS(delegate), {0, NULL}};

static PyType_Spec delegate_spec = {
    .name = "eqxjit._native.Delegate", .basicsize = sizeof(Delegate), .slots = delegate_slots,
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_BASETYPE};

/* --- The module ---------------------------------------------------------------------------------- */

static PyObject *setup(PyObject *module, PyObject *args) {
    State *state = PyModule_GetState(module);
    State new = *state;
    if (!PyArg_ParseTuple(args, "OOO!OOOOOO:setup", &new.array_mark, &new.array_type, &PyType_Type,
                          &new.ndarray_type, &new.take, &new.flatten, &new.same, &new.unflatten,
                          &new.wait_for, &new.opaque_type)) return NULL;
    /* For good: nothing here is replaced. */
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); i++) Py_INCREF(PyTuple_GET_ITEM(args, i));
    *state = new;
    Py_RETURN_NONE;
}

static PyObject *same_value(PyObject *module, PyObject *const *args, Py_ssize_t n_args) {
    if (n_args != 2) return misused("same(value, frozen)");
    int is_same = same(PyModule_GetState(module), args[0], args[1]);
    return is_same < 0 ? NULL : PyBool_FromLong(is_same);
}

static int module_exec(PyObject *module) {
    State *state = PyModule_GetState(module);
    PyType_Spec *specs[] = {&static_spec, &flags_spec, &fast_spec, &delegate_spec, &dispatcher_spec};
    PyTypeObject **types[] = {&state->static_type, &state->flags_type, &state->fast_type,
                              &state->delegate_type, &state->dispatcher_type};
    for (int i = 0; i < 5; i++) {
        *types[i] = (PyTypeObject *)PyType_FromModuleAndSpec(module, specs[i], NULL);
        if (*types[i] == NULL || PyModule_AddType(module, *types[i]) < 0) return -1;
    }
    state->static_type->tp_vectorcall = static_vectorcall;
    const char *texts[] = {"slow_call", "interrupted", "failed_fast", "settle_fast", "entry", "hash", "value"};
    PyObject **names[] = {&state->slow_call, &state->interrupted, &state->failed_fast, &state->settle_fast,
                          &state->entry, &state->hash, &state->value};
    for (int i = 0; i < 7; i++) if ((*names[i] = PyUnicode_InternFromString(texts[i])) == NULL) return -1;
    state->empty = PyTuple_New(0);
    return state->empty == NULL ? -1 : PyModule_AddIntMacro(module, INTERFACE);
}

/* The state holds nothing but references. */
#define N_REFERENCES (sizeof(State) / sizeof(PyObject *))

static int module_traverse(PyObject *module, visitproc visit, void *arg) {
    PyObject **references = PyModule_GetState(module);
    for (size_t i = 0; i < N_REFERENCES; i++) Py_VISIT(references[i]);
    return 0;
}

static int module_clear(PyObject *module) {
    PyObject **references = PyModule_GetState(module);
    for (size_t i = 0; i < N_REFERENCES; i++) Py_CLEAR(references[i]);
    return 0;
}

static void module_free(void *module) {
    module_clear((PyObject *)module);
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec}, {0, NULL}};

static PyMethodDef module_methods[] = {
    {"setup", setup, METH_VARARGS,
     "setup(ARRAY, array_type, ndarray, take, flatten, same, unflatten, wait_for, Opaque): what is Python's."},
    {"run", (PyCFunction)(void (*)(void))run, METH_FASTCALL,
     "run(jitted, arrays, call): a call of the slow path in flight."},
    {"in_flight", in_flight, METH_O,
     "in_flight(entry): this thread's innermost call of an entry, or of any for None: the slow path's\n"
     "Call, (caller, entry, args, kwargs), or None."},
    {"same", (PyCFunction)(void (*)(void))same_value, METH_FASTCALL,
     "same(value, frozen): whether a stand-in is that of a value."},
    {"call_directly", call_directly, METH_O,
     "call_directly(cls): lets CPython call the instances of a subclass of Delegate without a look at\n"
     "their `__call__`; returns the class."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT, .m_name = "eqxjit._native",
    .m_doc = "The native back end: fast paths in C.", .m_size = sizeof(State),
    .m_methods = module_methods, .m_slots = module_slots,
    .m_traverse = module_traverse, .m_clear = module_clear,
    .m_free = module_free,
};

PyMODINIT_FUNC
PyInit__native(void)
{
    return PyModuleDef_Init(&module_def);
}
