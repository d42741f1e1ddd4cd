/* The native back end: fast paths, which walk the specs of arguments and outputs as they are.

A Dispatcher is the base of wrappers. Called, it tries the Fasts of its function in turn: binds the arguments,
matches them with the spec, calls the jitted function with the arrays in them, and makes the output from
its spec. What else happens (no match, a trace, an error) is the slow path's, in _core/slow.py. Specs are
those of _spec/tree.py, keys of static objects those of _spec/static_key.py.

Invariants:
- Public CPython API only. The GIL is never released; a free-threaded Python doesn't build this.
- Guards have no effect: they take references and compare. Of the user's code they run registered flattens,
  `hash` and `==` alone. NumPy arrays are copied after all of a call has matched.
- Whatever is walked into has a strong reference here, because the user's code may change or free any
  container of the user's.
- Sizes and items are read anew after each child, for the same reason.
- Specs and keys are ours, and are trusted; how many arrays and static objects they hold is checked.
- A tuple or list of ours is made when its items are there: the garbage collector shows it to anybody.
- If a guard raises an error on which the slow path has the last word (see `is_for_slow_path` in writer.py),
  the slow path makes the call. Any other error is the user's or a signal handler's, and is raised at once.
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
#define NOINLINE __declspec(noinline)
#else
#define THREAD_LOCAL _Thread_local
#define NOINLINE __attribute__((noinline))
#endif

/* Raised with what Python relies on, here and in _compat.py: an older build may still be there. */
#define INTERFACE 62

/* As in _spec/tree.py. */
enum { SEQUENCE, DICT, MODULE, NODE };
/* As in _spec/static_key.py. */
enum { NUMBER, ITEMS, PAIRS, FIELDS, OTHER };

/* A node of a spec is (kind, class, aux, child, ...), a key (reader, class, names, part, ...). */
#define HEAD 3
#define KIND(spec) PyLong_AsLong(PyTuple_GET_ITEM(spec, 0))

/* Names of methods and attributes. */
#define NAMES(DO)                                                                                      \
    DO(failed_fast) DO(finish_fast) DO(call_of) DO(block_until_ready) DO(entry) \
    DO(hash) DO(value) DO(identity_suffices) DO(content) DO(dtype) DO(isnative) DO(copy)
#define DECLARE(name) PyObject *name;

typedef struct {
    PyTypeObject *static_type, *flags_type, *fast_type, *dispatcher_type;
    /* Set by `setup`, from Python. */
    PyObject *array_mark;   /* ARRAY, which stands for an array in a spec */
    PyObject *array_type;   /* the class of most arrays */
    PyTypeObject *tracer_type;
    PyObject *numpy_type;    /* of arrays whose owners may overwrite them */
    PyObject *array_classes; /* the classes of most arrays: these two, and NumPy's scalars */
    PyObject *is_array, *passed, *flatten, *registered, *same, *unflatten, *wait_for;
    PyObject *opaque_type; /* of keys that ask an object's `==` */
    PyObject *is_for_slow_path;
    NAMES(DECLARE)
    PyObject *empty; /* tuple */
} State;

/* What `setup` takes, in the order of the structure; and all references of the state. */
#define FROM_PYTHON(DO)                                                                                \
    DO(array_mark) DO(array_type) DO(tracer_type) DO(numpy_type) DO(array_classes) DO(is_array)        \
    DO(passed) DO(flatten) DO(registered) DO(same) DO(unflatten) DO(wait_for) DO(opaque_type) \
    DO(is_for_slow_path)
#define STATE_FIELDS(DO)                                                                               \
    DO(static_type) DO(flags_type) DO(fast_type) DO(dispatcher_type) FROM_PYTHON(DO) NAMES(DO) DO(empty)

static struct PyModuleDef module_def;

static State *state_of(PyTypeObject *type) {
    return PyModule_GetState(PyType_GetModuleByDef(type, &module_def));
}

/* Raises, and returns what says so: parts of a call, which are ours, don't fit together. */
#define MALFORMED(failed) (PyErr_SetString(PyExc_SystemError, "eqxjit: malformed parts of a call"), (failed))

/* Room for n pointers: on the stack where that is `small`, which holds `n_small`. */
static PyObject **allocate(PyObject **small, Py_ssize_t n_small, Py_ssize_t n) {
    if (n <= n_small) return memset((void *)small, 0, (size_t)n * sizeof(PyObject *));
    PyObject **found = PyMem_Calloc((size_t)n, sizeof(PyObject *));
    if (found == NULL) PyErr_NoMemory();
    return found;
}

static void release(PyObject **found, PyObject **small, Py_ssize_t n) {
    for (Py_ssize_t i = 0; i < n; i++) Py_XDECREF(found[i]);
    if (found != small) PyMem_Free((void *)found);
}

/* Each level of a tree counts, as a call in Python does. */
#define ENTER Py_EnterRecursiveCall(" in a deep tree")

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

/* Defines a type of the module, which has these slots. */
#define TYPE(Type, prefix, more_flags)                                                                 \
    static PyType_Spec prefix##_spec = {                                                               \
        .name = "eqxjit._native." #Type, .basicsize = sizeof(Type), .slots = prefix##_slots,           \
        .flags = Py_TPFLAGS_DEFAULT | (more_flags)};

/* --- Static: a static object in a spec ----------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    PyObject *key; /* hashable */
    Py_hash_t hash;
    char ask; /* whether the class may have become a node of JAX's registry */
} Static;

static PyObject *static_vectorcall(PyObject *type, PyObject *const *args, size_t n_args_flag, PyObject *kwnames) {
    Py_ssize_t n = PyVectorcall_NARGS(n_args_flag);
    if (n < 1 || n > 2 || kwnames != NULL) return MALFORMED(NULL);
    int ask = n == 2 ? PyObject_IsTrue(args[1]) : 0;
    Py_hash_t hash = ask < 0 ? -1 : PyObject_Hash(args[0]);
    if (hash == -1) return NULL;
    Static *self = PyObject_GC_New(Static, (PyTypeObject *)type);
    if (self == NULL) return NULL;
    self->key = Py_NewRef(args[0]);
    self->hash = hash;
    self->ask = (char)ask;
    /* A text or a number leads nowhere. */
    if (PyObject_IS_GC(args[0])) PyObject_GC_Track(self);
    return (PyObject *)self;
}

#define STATIC_FIELDS(DO) DO(self->key);
COLLECTED(Static, static, STATIC_FIELDS)

static Py_hash_t static_hash(Static *self) {
    return self->hash;
}

static PyObject *static_compare(PyObject *self, PyObject *other, int op) {
    if (Py_TYPE(other) != Py_TYPE(self) || (op != Py_EQ && op != Py_NE)) Py_RETURN_NOTIMPLEMENTED;
    Static *a = (Static *)self, *b = (Static *)other;
    int equal = a->hash == b->hash ? PyObject_RichCompareBool(a->key, b->key, Py_EQ) : 0;
    if (equal < 0) return NULL;
    return PyBool_FromLong(op == Py_EQ ? equal : !equal);
}

static PyMemberDef static_members[] = {
    {"key", T_OBJECT, offsetof(Static, key), READONLY, NULL},
    {"ask", T_BOOL, offsetof(Static, ask), READONLY, NULL}, {NULL, 0, 0, 0, NULL}};

static PyType_Slot static_slots[] = {
    {Py_tp_doc, "Static(key, ask=False): a static object in a spec, by its key."},
    {Py_tp_traverse, static_traverse}, {Py_tp_dealloc, static_dealloc}, {Py_tp_hash, static_hash},
    {Py_tp_richcompare, static_compare}, {Py_tp_members, static_members},
    {0, NULL}};

/* Made by `tp_vectorcall` alone. No `tp_clear`, as of a tuple: a dict may still compare it. */
TYPE(Static, static, Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION)

/* --- Flags: the base of programs ----------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    long long number; /* of what the program returns */
    char unread; /* whether it isn't known yet if the program can raise */
    char must_wait; /* whether a call waits for its program, because that can raise */
} Flags;

static PyMemberDef flags_members[] = {
    {"number", T_LONGLONG, offsetof(Flags, number), 0, NULL},
    {"unread", T_BOOL, offsetof(Flags, unread), 0, NULL},
    {"must_wait", T_BOOL, offsetof(Flags, must_wait), 0, NULL}, {NULL, 0, 0, 0, NULL}};

static PyType_Slot flags_slots[] = {
    {Py_tp_doc, "The flags of a program that a warm call looks at."}, {Py_tp_members, flags_members},
    {0, NULL}};

TYPE(Flags, flags, Py_TPFLAGS_BASETYPE)

/* --- Calls in flight ----------------------------------------------------------------------------- */

typedef struct InFlight {
    struct InFlight *outer;
    PyObject *entry;  /* which entry is called */
    PyObject *call;   /* the slow path's Call; of a call from here NULL until it is made, of: */
    PyObject *handler; /* the wrapper's CallHandler */
    PyObject *const *args;
    Py_ssize_t n_args;
    PyObject *kwnames;
} InFlight;

/* Of this thread. */
static THREAD_LOCAL InFlight *innermost = NULL;

/* Records lie on the heap and are taken out by identity, because a greenlet may leave a call, with its part of
   the C stack, that another one's outlasts. They borrow all but `call`, which is moved there and back. */
static PyObject *call_in_flight(PyObject *jitted, PyObject *const *arrays, size_t n_arrays_flag, InFlight *call) {
    Py_ssize_t n_all = call->n_args + (call->kwnames == NULL ? 0 : PyTuple_GET_SIZE(call->kwnames));
    InFlight *record = PyMem_Malloc(sizeof(InFlight) + (size_t)n_all * sizeof(PyObject *)), **link = &innermost;
    if (record == NULL) return PyErr_NoMemory();
    *record = *call;
    record->args = (PyObject **)(record + 1);
    if (n_all > 0) memcpy((void *)record->args, (void *)call->args, (size_t)n_all * sizeof(PyObject *));
    record->outer = *link;
    *link = record;
    PyObject *output = PyObject_Vectorcall(jitted, arrays, n_arrays_flag, NULL);
    while (*link != record) link = &(*link)->outer;
    *link = record->outer;
    call->call = record->call;
    PyMem_Free(record);
    return output;
}

/* Returns the Call of a call, borrowed, which is made once. */
static PyObject *call_of(State *state, InFlight *call) {
    if (call->call != NULL) return call->call;
    Py_ssize_t n = call->n_args + (call->kwnames == NULL ? 0 : PyTuple_GET_SIZE(call->kwnames));
    PyObject *small[16], **all = allocate(small, 16, 2 + n);
    if (all == NULL) return NULL;
    all[0] = call->handler;
    all[1] = call->entry;
    if (n > 0) memcpy((void *)(all + 2), (void *)call->args, (size_t)n * sizeof(PyObject *));
    PyObject *made = PyObject_VectorcallMethod(state->call_of, all, (size_t)(2 + call->n_args), call->kwnames);
    if (all != small) PyMem_Free((void *)all);
    if (made != NULL) Py_XSETREF(call->call, made);
    return made;
}

static PyObject *in_flight(PyObject *module, PyObject *const *args, Py_ssize_t n_args) {
    InFlight *call = innermost;
    while (call != NULL && n_args > 0 && call->entry != args[0]) call = call->outer;
    if (call == NULL) Py_RETURN_NONE;
    return Py_XNewRef(call_of(PyModule_GetState(module), call));
}

static PyObject *run(PyObject *module, PyObject *const *args, Py_ssize_t n_args) {
    State *state = PyModule_GetState(module);
    PyObject *entry = n_args < 2 ? MALFORMED(NULL) : PyObject_GetAttr(args[0], state->entry);
    if (entry == NULL) return NULL;
    InFlight call = {.entry = entry, .call = args[0]};
    /* Without `PY_VECTORCALL_ARGUMENTS_OFFSET`, because the place before the arrays is the caller's. */
    PyObject *output = call_in_flight(args[1], args + 2, (size_t)(n_args - 2), &call);
    Py_DECREF(entry);
    return output;
}

/* --- Fast, and a walk over the arguments of a call ----------------------------------------------- */

typedef struct {
    PyObject_HEAD
    PyObject *entry;
    PyObject *jitted;
    PyObject *args, *kwargs; /* the specs of the positional arguments and of the others */
    PyObject *outs;          /* what programs return, by number */
    Py_ssize_t n_arrays;
    Py_ssize_t n_fun; /* the function's arrays come last */
    Py_ssize_t n_statics;
    long long hits, hits_before;
} Fast;

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    State *state;
    PyObject *otherwise;   /* called where no fast path serves */
    PyObject *handler;      /* the slow path */
    PyObject *fasts;       /* the function's list; NULL until they are connected */
    PyObject *fun_arrays;  /* the function's arrays */
    PyObject *fun_statics; /* and static objects */
    PyObject *names;       /* see `argument` */
    PyObject *interceptor; /* called instead of `dispatch`, while `intercept` says so */
} Dispatcher;

/* Most calls need no more pointers. */
#define N_SLOTS 256

typedef struct {
    State *state;
    Dispatcher *self;
    Fast *fast;
    PyObject **arrays;  /* in JAX's order */
    PyObject **statics; /* static objects, in the order of the spec */
    Py_ssize_t n_taken, n_static;
    int has_others;     /* whether some array is neither JAX's nor a NumPy scalar */
    PyObject **block, *small[N_SLOTS]; /* room for both, and for a `self` before the arrays */
    Py_ssize_t n_block;
} Walk;

/* --- Guards -------------------------------------------------------------------------------------- */

/* A guard: 1 if a value has a spec (or a key), 0 if not, -1 with an exception. */
typedef int (*Guard)(Walk *walk, PyObject *spec, PyObject *value);

static int same(Walk *walk, PyObject *key, PyObject *value);
static int match(Walk *walk, PyObject *spec, PyObject *value);

/* Asks a guard about a part of the user's container, which may lose it meanwhile. */
static inline int guard_referenced(Walk *walk, Guard guard, PyObject *spec, PyObject *value) {
    Py_INCREF(value);
    int matches = guard(walk, spec, value);
    Py_DECREF(value);
    return matches;
}

/* Tuples and lists: their class was compared, so their number and each item are all there is. Items of a
   subclass are its base's, because `split` and `static_key` read them past its `__iter__`, too. */
static inline int each_item(Walk *walk, Guard guard, PyObject *spec, PyObject *value, Py_ssize_t n) {
    for (Py_ssize_t i = 0; i < n; i++) {
        if (PySequence_Fast_GET_SIZE(value) != n) return 0;
        int matches = guard_referenced(walk, guard, PyTuple_GET_ITEM(spec, HEAD + i), PySequence_Fast_GET_ITEM(value, i));
        if (matches <= 0) return matches;
    }
    return PySequence_Fast_GET_SIZE(value) == n;
}

/* The rule itself, for what is rare. */
static int same_in_python(Walk *walk, PyObject *key, PyObject *value) {
    PyObject *answer = PyObject_CallFunctionObjArgs(walk->state->same, value, key, NULL);
    if (answer == NULL) return -1;
    int is_same = PyObject_IsTrue(answer);
    Py_DECREF(answer);
    return is_same;
}

/* By identity: the object lives as long as its reference says so, so an address can't be another's. */
static int is_referent(PyObject *ref, PyObject *value) {
    PyObject *found = PyObject_CallNoArgs(ref);
    if (found == NULL) return -1;
    Py_DECREF(found);
    return found == value && found != Py_None;
}

/* Floats by their bits, because zeros have two signs, and NaN equals NaN. */
static int same_number(Walk *walk, PyObject *key, PyObject *value, PyObject *bits) {
    if (!PyFloat_CheckExact(value)) return same_in_python(walk, key, value);
    double a = PyFloat_AS_DOUBLE(value), b;
    memcpy(&b, PyBytes_AS_STRING(bits), sizeof b);
    return memcmp((char *)&a, (char *)&b, sizeof a) == 0 || (a != a && b != b);
}

/* Dicts by their items in order, because a function may go through them. The key has their keys first,
   then the values. */
static int same_pairs(Walk *walk, PyObject *pairs, PyObject *value, Py_ssize_t n) {
    PyObject *key, *item;
    Py_ssize_t position = 0, half = n / 2;
    for (Py_ssize_t i = 0; i < half; i++) {
        /* An `==` of a user's may change the dict in between; `PyDict_Next` never leaves it. */
        if (PyDict_GET_SIZE(value) != half || !PyDict_Next(value, &position, &key, &item)) return 0;
        Py_INCREF(item);
        int is_same = guard_referenced(walk, same, PyTuple_GET_ITEM(pairs, HEAD + i), key);
        if (is_same > 0) is_same = same(walk, PyTuple_GET_ITEM(pairs, HEAD + half + i), item);
        Py_DECREF(item);
        if (is_same <= 0) return is_same;
    }
    return PyDict_GET_SIZE(value) == half;
}

/* Dataclasses and slices by the fields that their `==` compares, which was generated and does no more. */
static int same_fields(Walk *walk, PyObject *key, PyObject *value, Py_ssize_t n) {
    PyObject *names = PyTuple_GET_ITEM(key, 2);
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *field = PyObject_GetAttr(value, PyTuple_GET_ITEM(names, i));
        if (field == NULL) return -1;
        int is_same = same(walk, PyTuple_GET_ITEM(key, HEAD + i), field);
        Py_DECREF(field);
        if (is_same <= 0) return is_same;
    }
    return 1;
}

/* Values that are read into parts: by their very class, then as its reader has them. */
static int same_parts(Walk *walk, PyObject *key, PyObject *value) {
    Py_ssize_t n = PyTuple_GET_SIZE(key) - HEAD;
    if ((PyObject *)Py_TYPE(value) != PyTuple_GET_ITEM(key, 1)) return 0;
    /* A bool is one of two objects. */
    if (PyBool_Check(value) && n > 0) return value == PyTuple_GET_ITEM(key, HEAD);
    long reader = KIND(key);
    if (reader == NUMBER && n > 0) return same_number(walk, key, value, PyTuple_GET_ITEM(key, HEAD));
    int is_items = reader == ITEMS && (PyTuple_Check(value) || PyList_Check(value));
    /* The order of other dicts isn't that of their memory. */
    int is_pairs = reader == PAIRS && PyDict_CheckExact(value);
    if (!is_items && !is_pairs && reader != FIELDS) return same_in_python(walk, key, value);
    if (ENTER) return -1;
    int is_same = is_items   ? each_item(walk, same, key, value, n)
                  : is_pairs ? same_pairs(walk, key, value, n)
                             : same_fields(walk, key, value, n);
    Py_LeaveRecursiveCall();
    return is_same;
}

/* By the object's class, its `hash` and `==`, in this order, as a dict finds a key; an array by its content. */
static int same_opaque(Walk *walk, PyObject *key, PyObject *value) {
    State *state = walk->state;
    PyObject *names[] = {state->value, state->identity_suffices, state->content, state->hash}, *parts[4] = {NULL};
    int is_same = 1;
    for (int i = 0; is_same > 0 && i < 4; i++) {
        parts[i] = PyObject_GetAttr(key, names[i]);
        if (parts[i] == NULL) is_same = -1;
    }
    if (is_same > 0) is_same = Py_TYPE(value) == Py_TYPE(parts[0]);
    if (is_same > 0 && !(value == parts[0] && parts[1] == Py_True)) {
        if (parts[2] != Py_None || !PyLong_CheckExact(parts[3])) {
            /* An array, or an object without a hash. */
            is_same = same_in_python(walk, key, value);
        }
        else {
            Py_hash_t now = PyObject_Hash(value), then = PyLong_AsSsize_t(parts[3]);
            is_same = (now == -1 || then == -1) && PyErr_Occurred() ? -1 : now == then;
            if (is_same > 0) is_same = PyObject_RichCompareBool(value, parts[0], Py_EQ);
        }
    }
    release(parts, parts, 4);
    return is_same;
}

static int same(Walk *walk, PyObject *key, PyObject *value) {
    PyTypeObject *type = Py_TYPE(key);
    /* Those that stand for themselves: exact types, whose `==` is Python's. */
    if (type == &PyUnicode_Type || type == &PyLong_Type || type == &PyBytes_Type) {
        return value == key || (Py_TYPE(value) == type ? PyObject_RichCompareBool(value, key, Py_EQ) : 0);
    }
    if (key == Py_None) return value == Py_None;
    if (PyWeakref_CheckRef(key)) return is_referent(key, value);
    if (type == &PyTuple_Type) return same_parts(walk, key, value);
    if ((PyObject *)type == walk->state->opaque_type) return same_opaque(walk, key, value);
    return same_in_python(walk, key, value);
}

/* Takes a leaf that is an array. That it is one suffices: JAX compares shapes and dtypes. */
static int match_array(Walk *walk, PyObject *leaf) {
    State *state = walk->state;
    PyTypeObject *type = Py_TYPE(leaf);
    if (walk->n_taken >= walk->fast->n_arrays) return MALFORMED(-1);
    if ((PyObject *)type != state->array_type) {
        int is_array = PySet_Contains(state->array_classes, (PyObject *)type);
        if (is_array < 0) return -1;
        /* NumPy's scalars can't change. */
        walk->has_others = walk->has_others || !is_array || (PyObject *)type == state->numpy_type;
        if (!is_array) {
            PyObject *answer = PyObject_CallOneArg(state->is_array, leaf);
            is_array = answer == NULL ? -1 : PyObject_IsTrue(answer);
            Py_XDECREF(answer);
            if (is_array <= 0) return is_array;
        }
    }
    walk->arrays[walk->n_taken++] = Py_NewRef(leaf);
    return 1;
}

/* Takes a static object: the program may return this very one. */
static inline int take_static(Walk *walk, PyObject *value) {
    if (walk->n_static >= walk->fast->n_statics) return MALFORMED(-1);
    walk->statics[walk->n_static++] = Py_NewRef(value);
    return 1;
}

/* Compares a static leaf. That its class isn't a node is asked on each call where it may have been registered
   meanwhile. */
static int same_leaf(Walk *walk, Static *expected, PyObject *value) {
    if (expected->ask) {
        PyObject *flat = PyObject_CallOneArg(walk->state->flatten, value);
        if (flat == NULL) return -1;
        Py_DECREF(flat);
        if (flat != Py_None) return 0;
    }
    return same(walk, expected->key, value);
}

static int match_sequence(Walk *walk, PyObject *spec, PyObject *value, Py_ssize_t n) {
    /* The class of a named tuple may have been registered as another node meanwhile. */
    int is_node = PyTuple_GET_ITEM(spec, 2) == Py_None
                      ? 0
                      : PySequence_Contains(walk->state->registered, (PyObject *)Py_TYPE(value));
    if (is_node) return is_node < 0 ? -1 : 0;
    return each_item(walk, match, spec, value, n);
}

/* As many keys as the spec has names, and each of these: hence no others. */
static int match_values(Walk *walk, PyObject *spec, PyObject *dict, Py_ssize_t n) {
    PyObject *names = PyTuple_GET_ITEM(spec, 2), *key, *item;
    Py_ssize_t position = 0;
    int in_order = 1;
    if (PyDict_GET_SIZE(dict) != n) return 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *name = PyTuple_GET_ITEM(names, i);
        /* Mostly they come in the order of the names, and no hash has to be looked up. */
        in_order = in_order && PyDict_Next(dict, &position, &key, &item) && key == name;
        if (!in_order) item = PyDict_GetItemWithError(dict, name);
        if (item == NULL) return PyErr_Occurred() ? -1 : 0;
        int matches = guard_referenced(walk, match, PyTuple_GET_ITEM(spec, HEAD + i), item);
        if (matches <= 0) return matches;
    }
    return PyDict_GET_SIZE(dict) == n;
}

/* Dicts by key, whatever their order: JAX sorts them, and so does the spec. */
static int match_dict(Walk *walk, PyObject *spec, PyObject *value, Py_ssize_t n) {
    /* A key of a class derived from `str` equals a text, too, by an `==` of its own. */
    PyObject *key;
    Py_ssize_t position = 0;
    while (PyDict_Next(value, &position, &key, NULL)) if (!PyUnicode_CheckExact(key)) return 0;
    return match_values(walk, spec, value, n);
}

/* Modules by all that their `__dict__` holds: the spec has the static fields, too. */
static int match_module(Walk *walk, PyObject *spec, PyObject *value, Py_ssize_t n) {
    /* Past `Module.__getattribute__`, which is Python. */
    PyObject *fields = PyObject_GenericGetDict(value, NULL);
    if (fields == NULL) return -1;
    int matches = PyDict_CheckExact(fields) ? match_values(walk, spec, fields, n) : 0;
    Py_DECREF(fields);
    return matches;
}

/* A node of JAX's registry by what its flatten returns, which is all that JAX has of it: metadata, and
   children. It is the user's, and runs on every call. */
static int match_node(Walk *walk, PyObject *spec, PyObject *value, Py_ssize_t n) {
    PyObject *flat = PyObject_CallOneArg(walk->state->flatten, value), *children = NULL;
    int matches = flat == NULL ? -1 : flat != Py_None;
    if (matches > 0 && (!PyTuple_Check(flat) || PyTuple_GET_SIZE(flat) != 2)) matches = MALFORMED(-1);
    if (matches > 0) {
        Static *metadata = (Static *)PyTuple_GET_ITEM(spec, 2);
        matches = take_static(walk, PyTuple_GET_ITEM(flat, 1));
        if (matches > 0) matches = same(walk, metadata->key, PyTuple_GET_ITEM(flat, 1));
    }
    if (matches > 0) {
        children = PySequence_Tuple(PyTuple_GET_ITEM(flat, 0));
        matches = children == NULL ? -1 : each_item(walk, match, spec, children, n);
    }
    Py_XDECREF(flat);
    Py_XDECREF(children);
    return matches;
}

static int match(Walk *walk, PyObject *spec, PyObject *value) {
    static int (*const by_kind[])(Walk *, PyObject *, PyObject *, Py_ssize_t) = {
        match_sequence, match_dict, match_module, match_node};
    if (spec == walk->state->array_mark) return match_array(walk, value);
    if (spec == Py_None) return value == Py_None;
    if (Py_TYPE(spec) == walk->state->static_type) {
        return take_static(walk, value) < 0 ? -1 : same_leaf(walk, (Static *)spec, value);
    }
    /* The very class, because `split` has a subclass in another way, if at all. */
    if ((PyObject *)Py_TYPE(value) != PyTuple_GET_ITEM(spec, 1)) return 0;
    if (ENTER) return -1;
    int matches = by_kind[KIND(spec)](walk, spec, value, PyTuple_GET_SIZE(spec) - HEAD);
    Py_LeaveRecursiveCall();
    return matches;
}

/* --- Outputs ------------------------------------------------------------------------------------- */

/* What an output is made of: arrays in what JAX returned, which lie in a list unless there is one. */
typedef struct {
    Walk *walk;            /* of the call */
    PyObject *const *arrays;
    Py_ssize_t n_arrays, n_taken;
    Flags *program;        /* which JAX keeps */
    PyObject *list;        /* of the arrays */
    PyObject *out;         /* of the program: a spec, static objects, the numbers of those that came in */
    Py_ssize_t n_made;     /* how many static objects were used */
} Make;

static int find_arrays(Make *parts, PyObject *output) {
    Py_ssize_t position = 0;
    PyObject *program, *arrays;
    if (!PyDict_CheckExact(output) || !PyDict_Next(output, &position, &program, &arrays)) return MALFORMED(-1);
    if (!PyObject_TypeCheck(program, parts->walk->state->flags_type) || !PyList_CheckExact(arrays)) return MALFORMED(-1);
    parts->program = (Flags *)program;
    parts->list = arrays;
    parts->n_arrays = PyList_GET_SIZE(arrays);
    parts->arrays = &PyList_GET_ITEM(arrays, 0);
    return 0;
}

static PyObject *next_static(Make *parts) {
    PyObject *statics = PyTuple_GET_ITEM(parts->out, 1), *slots = PyTuple_GET_ITEM(parts->out, 2);
    Py_ssize_t i = parts->n_made++;
    if (i >= PyTuple_GET_SIZE(slots)) return MALFORMED(NULL);
    Py_ssize_t slot = PyLong_AsSsize_t(PyTuple_GET_ITEM(slots, i));
    if (slot < 0) return Py_NewRef(PyTuple_GET_ITEM(statics, i));
    /* The function's come first, then the arguments'. */
    PyObject *of_function = parts->walk->self->fun_statics;
    Py_ssize_t n_fun = PyTuple_GET_SIZE(of_function);
    if (slot - n_fun >= parts->walk->n_static) return MALFORMED(NULL);
    return Py_NewRef(slot < n_fun ? PyTuple_GET_ITEM(of_function, slot) : parts->walk->statics[slot - n_fun]);
}

/* Moves items, with their references, into a new tuple or list, which is full when anybody finds it. */
static PyObject *move_into(PyObject *made, PyObject **items, Py_ssize_t n) {
    if (made == NULL || n == 0) return made;
    memcpy((void *)PySequence_Fast_ITEMS(made), (void *)items, (size_t)n * sizeof(PyObject *));
    memset((void *)items, 0, (size_t)n * sizeof(PyObject *));
    return made;
}

static PyObject *make_sequence(State *Py_UNUSED(state), PyObject *cls, PyObject *aux, PyObject **items, Py_ssize_t n) {
    if (cls == (PyObject *)&PyList_Type) return move_into(PyList_New(n), items, n);
    if (aux == Py_None) return move_into(PyTuple_New(n), items, n);
    if (aux != Py_True) return PyObject_Vectorcall(cls, items, (size_t)n, NULL);
    /* A named tuple whose class, called, does no more than this: as `tuple.__new__` does it. */
    return move_into(((PyTypeObject *)cls)->tp_alloc((PyTypeObject *)cls, n), items, n);
}

static PyObject *make_dict(State *Py_UNUSED(state), PyObject *Py_UNUSED(cls), PyObject *keys,
                           PyObject **values, Py_ssize_t n) {
    PyObject *made = PyDict_New();
    for (Py_ssize_t i = 0; made != NULL && i < n; i++) {
        if (PyDict_SetItem(made, PyTuple_GET_ITEM(keys, i), values[i]) < 0) Py_CLEAR(made);
    }
    return made;
}

static PyObject *make_module(State *state, PyObject *cls, PyObject *names, PyObject **values, Py_ssize_t n) {
    /* Field by field, past Equinox's `__setattr__`: CPython then makes no dict before somebody asks. */
    PyObject *made = PyBaseObject_Type.tp_new((PyTypeObject *)cls, state->empty, NULL);
    for (Py_ssize_t i = 0; made != NULL && i < n; i++) {
        if (PyObject_GenericSetAttr(made, PyTuple_GET_ITEM(names, i), values[i]) < 0) Py_CLEAR(made);
    }
    return made;
}

static PyObject *make_node(State *state, PyObject *cls, PyObject *metadata, PyObject **items, Py_ssize_t n) {
    PyObject *children = move_into(PyList_New(n), items, n);
    if (children == NULL) return NULL;
    PyObject *made = PyObject_CallFunctionObjArgs(state->unflatten, cls, metadata, children, NULL);
    Py_DECREF(children);
    return made;
}

static PyObject *make(Make *parts, PyObject *spec);

/* Not inlined, because leaves, of which there are most, would pay for its frame. */
static NOINLINE PyObject *make_branch(Make *parts, PyObject *spec) {
    static PyObject *(*const by_kind[])(State *, PyObject *, PyObject *, PyObject **, Py_ssize_t) = {
        make_sequence, make_dict, make_module, make_node};
    Py_ssize_t i = 0, n = PyTuple_GET_SIZE(spec) - HEAD;
    long kind = KIND(spec);
    PyObject *small[16], **children = allocate(small, 16, n), *made = NULL;
    if (children == NULL) return NULL;
    /* Metadata comes before what is below, as in `split`. */
    PyObject *aux = kind == NODE ? next_static(parts) : Py_NewRef(PyTuple_GET_ITEM(spec, 2));
    if (aux != NULL) {
        while (i < n && (children[i] = make(parts, PyTuple_GET_ITEM(spec, HEAD + i))) != NULL) i++;
        if (i == n) made = by_kind[kind](parts->walk->state, PyTuple_GET_ITEM(spec, 1), aux, children, n);
        Py_DECREF(aux);
    }
    release(children, small, n);
    return made;
}

static PyObject *make(Make *parts, PyObject *spec) {
    State *state = parts->walk->state;
    if (spec == state->array_mark) {
        if (parts->n_taken >= parts->n_arrays) return MALFORMED(NULL);
        return Py_NewRef(parts->arrays[parts->n_taken++]);
    }
    if (spec == Py_None) Py_RETURN_NONE;
    if (Py_TYPE(spec) == state->static_type) return next_static(parts);
    if (ENTER) return NULL;
    PyObject *made = make_branch(parts, spec);
    Py_LeaveRecursiveCall();
    return made;
}

/* Returns the user's output. */
static PyObject *make_output(Make *parts) {
    Fast *fast = parts->walk->fast;
    PyObject *number = PyLong_FromLongLong(parts->program->number);
    PyObject *found = number == NULL ? NULL : PyDict_GetItemWithError(fast->outs, number);
    Py_XDECREF(number);
    if (found == NULL) return PyErr_Occurred() ? NULL : MALFORMED(NULL);
    parts->out = Py_NewRef(PyTuple_GET_ITEM(found, 0));
    PyObject *made = make(parts, PyTuple_GET_ITEM(parts->out, 0));
    Py_DECREF(parts->out);
    return made;
}

/* Returns whether the output is that of a transformation; waits until the program has run if that can raise, or
   if it reads memory of the user's. It has run once one of its outputs is there; not so under a transformation,
   which may pass inputs on, and whose program isn't known. */
static int wait_for(Make *parts, int must_wait) {
    State *state = parts->walk->state;
    Flags *flags = parts->program;
    int are_plain = parts->n_arrays > 0, is_transformed = 0;
    for (Py_ssize_t i = 0; i < parts->n_arrays; i++) {
        PyTypeObject *type = Py_TYPE(parts->arrays[i]);
        if ((PyObject *)type == state->array_type) continue;
        are_plain = 0;
        is_transformed = is_transformed || PyType_IsSubtype(type, state->tracer_type);
    }
    /* A program that isn't read yet is waited for when it is. */
    must_wait = must_wait || (flags->must_wait && !flags->unread);
    if (!is_transformed && !must_wait) return is_transformed;
    PyObject *done = are_plain ? PyObject_CallMethodNoArgs(parts->arrays[0], state->block_until_ready)
                               : PyObject_CallOneArg(state->wait_for, parts->list);
    Py_XDECREF(done);
    return done == NULL ? -1 : is_transformed;
}

/* --- Fast: the fast path of an entry ------------------------------------------------------------- */

#define FAST_FIELDS(DO) DO(self->entry); DO(self->jitted); DO(self->args); DO(self->kwargs); \
    DO(self->outs);
COLLECTED(Fast, fast, FAST_FIELDS)

static PyObject *fast_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    Fast new = {0};
    if (!PyArg_ParseTuple(args, "OOO!O!O!nnn:Fast", &new.entry, &new.jitted,
                          &PyTuple_Type, &new.args, &PyTuple_Type, &new.kwargs, &PyDict_Type, &new.outs,
                          &new.n_statics, &new.n_arrays, &new.n_fun)) {
        return NULL;
    }
    Fast *self = (Fast *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    new.ob_base = self->ob_base;
    *self = new;
    FAST_FIELDS(Py_INCREF)
    return (PyObject *)self;
}

/* The spec of the i-th argument: those of keywords follow the others. */
static PyObject *spec_of(Fast *fast, Py_ssize_t i) {
    Py_ssize_t n_args = PyTuple_GET_SIZE(fast->args) - HEAD;
    return i < n_args ? PyTuple_GET_ITEM(fast->args, HEAD + i)
                      : PyTuple_GET_ITEM(fast->kwargs, HEAD + i - n_args);
}

/* Returns the i-th argument in the order of the spec, borrowed; NULL if the call hasn't got it. `names` are
   those of the parameters that take positional arguments, None where a keyword can't be passed. */
static inline PyObject *argument(Fast *fast, PyObject *names, InFlight *call, Py_ssize_t i) {
    Py_ssize_t n = call->n_args, n_args = PyTuple_GET_SIZE(fast->args) - HEAD;
    if (i < n) return call->args[i];
    PyObject *keys = i < n_args ? names : PyTuple_GET_ITEM(fast->kwargs, 2);
    Py_ssize_t place = i < n_args ? i : i - n_args, n_named = PyTuple_GET_SIZE(call->kwnames);
    PyObject *name = place < PyTuple_GET_SIZE(keys) ? PyTuple_GET_ITEM(keys, place) : Py_None;
    if (!PyUnicode_CheckExact(name)) return NULL;
    for (Py_ssize_t k = 0; k < n_named; k++) {
        /* Mostly they are passed in the order of the spec. */
        Py_ssize_t at = i - n + k < n_named ? i - n + k : i - n + k - n_named;
        PyObject *other = PyTuple_GET_ITEM(call->kwnames, at);
        if (other == name || (PyUnicode_CheckExact(other) && PyUnicode_Compare(other, name) == 0)) {
            return call->args[n + at];
        }
    }
    return NULL;
}

/* A guard of a whole call: it has as many arguments, with the same names, as the call that the spec came from,
   named as `inspect.BoundArguments` has them. So the signature takes them. If it matches, `walk` has the arrays
   and static objects, which its caller releases. */
static int match_call(Walk *walk, Dispatcher *self, Fast *fast, InFlight *call) {
    Py_ssize_t n = call->n_args, n_named = call->kwnames == NULL ? 0 : PyTuple_GET_SIZE(call->kwnames);
    Py_ssize_t n_args = PyTuple_GET_SIZE(fast->args) - HEAD;
    Py_ssize_t n_all = n_args + PyTuple_GET_SIZE(fast->kwargs) - HEAD;
    if (n > n_args || n + n_named != n_all || PyTuple_GET_SIZE(self->fun_arrays) != fast->n_fun) return 0;
    walk->state = self->state;
    walk->self = self;
    walk->fast = fast;
    /* Static arguments tell structures apart fastest, so they are compared before trees are walked. */
    for (Py_ssize_t i = 0; i < n_all; i++) {
        PyObject *value = argument(fast, self->names, call, i), *spec = spec_of(fast, i);
        if (value == NULL) return 0;
        if (Py_TYPE(spec) != self->state->static_type) continue;
        int is_same = same_leaf(walk, (Static *)spec, value);
        if (is_same <= 0) return is_same;
    }
    walk->n_block = 1 + fast->n_arrays + fast->n_statics;
    walk->block = allocate(walk->small, N_SLOTS, walk->n_block);
    if (walk->block == NULL) return -1;
    walk->arrays = walk->block + 1;
    walk->statics = walk->arrays + fast->n_arrays;
    walk->n_taken = walk->n_static = 0;
    walk->has_others = 0;
    int matches = 1;
    for (Py_ssize_t i = 0; matches > 0 && i < n_all; i++) {
        PyObject *value = argument(fast, self->names, call, i), *spec = spec_of(fast, i);
        matches = Py_TYPE(spec) == self->state->static_type ? take_static(walk, value) : match(walk, spec, value);
    }
    for (Py_ssize_t i = 0; matches > 0 && i < fast->n_fun; i++) {
        matches = match_array(walk, PyTuple_GET_ITEM(self->fun_arrays, i));
    }
    if (matches > 0 && walk->n_taken != fast->n_arrays) matches = MALFORMED(-1);
    if (matches <= 0) release(walk->block, walk->small, walk->n_block);
    return matches;
}

/* Puts what a call passes in the place of each array, and returns whether it must wait for its program. */
static int pass_arrays(Walk *walk) {
    Py_ssize_t n = walk->n_taken;
    PyObject *leaves = PyList_New(n), *answer = NULL, *arrays = NULL;
    if (leaves == NULL) return -1;
    for (Py_ssize_t i = 0; i < n; i++) PyList_SET_ITEM(leaves, i, Py_NewRef(walk->arrays[i]));
    answer = PyObject_CallOneArg(walk->state->passed, leaves);
    int waits = answer == NULL ? -1 : 0;
    if (waits == 0 && PyTuple_Check(answer) && PyTuple_GET_SIZE(answer) == 2) arrays = PyTuple_GET_ITEM(answer, 0);
    if (waits == 0 && (arrays == NULL || !PyList_CheckExact(arrays) || PyList_GET_SIZE(arrays) != n)) waits = MALFORMED(-1);
    if (waits == 0) {
        for (Py_ssize_t i = 0; i < n; i++) Py_XSETREF(walk->arrays[i], Py_NewRef(PyList_GET_ITEM(arrays, i)));
        waits = PyObject_IsTrue(PyTuple_GET_ITEM(answer, 1));
    }
    Py_XDECREF(answer);
    Py_DECREF(leaves);
    return waits;
}

static PyMemberDef fast_members[] = {
    {"entry", T_OBJECT, offsetof(Fast, entry), READONLY, NULL},
    {"hits", T_LONGLONG, offsetof(Fast, hits), READONLY, NULL},
    {"hits_before", T_LONGLONG, offsetof(Fast, hits_before), 0, NULL}, {NULL, 0, 0, 0, NULL}};

static PyType_Slot fast_slots[] = {
    {Py_tp_doc, "The fast path of an entry; for the parts see `fast_new`."},
    {Py_tp_new, fast_new}, COLLECTED_SLOTS(fast), {Py_tp_members, fast_members}, {0, NULL}};

TYPE(Fast, fast, Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE)

/* --- Dispatcher: the base of wrappers ------------------------------------------------------------ */

/* Takes the exception that is set, with its traceback. */
static PyObject *take_error(void) {
#if PY_VERSION_HEX >= 0x030C0000
    return PyErr_GetRaisedException();
#else
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    if (traceback != NULL) PyException_SetTraceback(error, traceback);
    Py_XDECREF(type);
    Py_XDECREF(traceback);
    return error;
#endif
}

/* Sets it again, with the context that it has. Steals the reference. */
static void set_error(PyObject *error) {
#if PY_VERSION_HEX >= 0x030C0000
    PyErr_SetRaisedException(error);
#else
    PyErr_Restore(Py_NewRef((PyObject *)Py_TYPE(error)), error, PyException_GetTraceback(error));
#endif
}

/* Has the handler finish a call of a jitted function. */
static PyObject *finish(State *state, InFlight *call, PyObject *output) {
    PyObject *made = call_of(state, call);
    return made == NULL ? NULL : PyObject_CallMethodObjArgs(call->handler, state->finish_fast, output, made, NULL);
}

/* Has the handler raise the exception that is set, or a clearer one. */
static PyObject *hand_over_error(State *state, InFlight *call) {
    PyObject *error = take_error(), *made = call_of(state, call);
    if (made != NULL) {
        PyObject *result = PyObject_CallMethodObjArgs(call->handler, state->failed_fast, error, made, NULL);
        Py_DECREF(error);
        return result;
    }
    /* The arguments can't be taken apart again: what was raised first is the call's error. But an interrupt or
       an exit must not be lost. */
    if (PyErr_ExceptionMatches(PyExc_Exception)) {
        PyErr_Clear();
        set_error(error);
        return NULL;
    }
    PyObject *interrupt = take_error(), *context = PyException_GetContext(interrupt);
    /* As Python does it for what is raised while another exception is handled. */
    if (context == NULL) PyException_SetContext(interrupt, error);
    else Py_DECREF(error);
    Py_XDECREF(context);
    set_error(interrupt);
    return NULL;
}

/* Returns whether the slow path has the last word on what a guard raised; sets it again if not. */
static int is_for_slow_path(State *state) {
    PyObject *error = take_error(), *answer = PyObject_CallOneArg(state->is_for_slow_path, error);
    int is_for_it = answer == NULL ? -1 : PyObject_IsTrue(answer);
    Py_XDECREF(answer);
    if (is_for_it == 0) set_error(error);
    else Py_DECREF(error);
    return is_for_it;
}

/* Makes a call whose arguments match. */
static PyObject *call_fast(Walk *walk, InFlight *call) {
    State *state = walk->state;
    Make parts = {.walk = walk};
    PyObject *output = NULL, *result;
    int must_wait = walk->has_others ? pass_arrays(walk) : 0, is_transformed = -1;
    if (must_wait >= 0) {
        /* What is called may use the place before the arrays. */
        size_t n_arrays_flag = (size_t)walk->fast->n_arrays | PY_VECTORCALL_ARGUMENTS_OFFSET;
        output = call_in_flight(walk->fast->jitted, walk->arrays, n_arrays_flag, call);
    }
    if (output != NULL && find_arrays(&parts, output) == 0) is_transformed = wait_for(&parts, must_wait);
    if (is_transformed < 0) result = hand_over_error(state, call);
    /* A Call was made for a trace, or the program is to be read. */
    else if (call->call != NULL || (parts.program->unread && !is_transformed)) result = finish(state, call, output);
    else {
        walk->fast->hits++;
        result = make_output(&parts);
    }
    Py_XDECREF(output);
    Py_XDECREF(call->call);
    return result;
}

static void move_to_front(PyObject *fasts, Py_ssize_t i, PyObject *fast) {
    /* What ran meanwhile may have changed the list. */
    if (i >= PyList_GET_SIZE(fasts) || PyList_GET_ITEM(fasts, i) != fast) return;
    for (; i > 0; i--) PyList_SET_ITEM(fasts, i, PyList_GET_ITEM(fasts, i - 1));
    PyList_SET_ITEM(fasts, 0, fast);
}

static PyObject *dispatch(PyObject *callable, PyObject *const *args, size_t n_args_flag, PyObject *kwnames) {
    Dispatcher *self = (Dispatcher *)callable;
    PyObject *fasts = self->fasts;
    InFlight call = {
        .handler = self->handler, .args = args, .n_args = PyVectorcall_NARGS(n_args_flag), .kwnames = kwnames};
    for (Py_ssize_t i = 0; fasts != NULL && i < PyList_GET_SIZE(fasts); i++) {
        PyObject *fast = Py_NewRef(PyList_GET_ITEM(fasts, i)), *result = NULL;
        call.entry = ((Fast *)fast)->entry;
        Walk walk;
        int matches = match_call(&walk, self, (Fast *)fast, &call);
        if (matches > 0) {
            if (i > 0) move_to_front(fasts, i, fast);
            result = call_fast(&walk, &call);
            release(walk.block, walk.small, walk.n_block);
        }
        Py_DECREF(fast);
        if (matches > 0) return result;
        if (matches == 0) continue;
        if (is_for_slow_path(self->state) <= 0) return NULL;
        break;
    }
    PyObject *otherwise = self->otherwise;
    if (otherwise == NULL) {
        PyErr_SetString(PyExc_AttributeError, "__call__");
        return NULL;
    }
    /* The call may put another one in its place. */
    Py_INCREF(otherwise);
    PyObject *result = PyObject_Vectorcall(otherwise, args, n_args_flag, kwnames);
    Py_DECREF(otherwise);
    return result;
}

#define DISPATCHER_FIELDS(DO) DO(self->otherwise); DO(self->handler); DO(self->fasts); DO(self->fun_arrays); \
    DO(self->fun_statics); DO(self->names); DO(self->interceptor);
COLLECTED(Dispatcher, dispatcher, DISPATCHER_FIELDS)

static PyObject *dispatcher_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs)) {
    Dispatcher *self = (Dispatcher *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    self->vectorcall = dispatch;
    self->state = state_of(type);
    /* CPython then calls instances of a subclass, too, without a look at their `__call__`. */
    if (type->tp_call == PyVectorcall_Call) type->tp_flags |= Py_TPFLAGS_HAVE_VECTORCALL;
    return (PyObject *)self;
}

static PyObject *connect(PyObject *module, PyObject *args) {
    State *state = PyModule_GetState(module);
    PyObject *wrapper, *otherwise, *parts[5] = {NULL};
    if (!PyArg_ParseTuple(args, "O!O|OO!O!O!O!:connect", state->dispatcher_type, &wrapper, &otherwise, parts,
                          &PyTuple_Type, parts + 1, &PyTuple_Type, parts + 2, &PyTuple_Type, parts + 3,
                          &PyList_Type, parts + 4)) {
        return NULL;
    }
    Dispatcher *self = (Dispatcher *)wrapper;
    PyObject **places[] = {&self->handler, &self->fun_arrays, &self->fun_statics, &self->names, &self->fasts};
    Py_XSETREF(self->otherwise, Py_NewRef(otherwise));
    /* Once and for all, the fast paths last: a call in another thread may be using them. */
    for (int i = 0; i < 5; i++) if (*places[i] == NULL) *places[i] = Py_XNewRef(parts[i]);
    Py_RETURN_NONE;
}

static PyObject *call_interceptor(PyObject *callable, PyObject *const *args, size_t n_args_flag, PyObject *kwnames) {
    /* The call may end the interception, which drops the reference. */
    PyObject *interceptor = Py_NewRef(((Dispatcher *)callable)->interceptor);
    PyObject *result = PyObject_Vectorcall(interceptor, args, n_args_flag, kwnames);
    Py_DECREF(interceptor);
    return result;
}

static PyObject *intercept(PyObject *module, PyObject *args) {
    State *state = PyModule_GetState(module);
    PyObject *wrapper, *interceptor;
    if (!PyArg_ParseTuple(args, "O!O:intercept", state->dispatcher_type, &wrapper, &interceptor)) return NULL;
    Dispatcher *self = (Dispatcher *)wrapper;
    /* A pointer of the wrapper's own, so that calls that nobody intercepts needn't ask. */
    self->vectorcall = interceptor == Py_None ? dispatch : call_interceptor;
    Py_XSETREF(self->interceptor, Py_NewRef(interceptor));
    Py_RETURN_NONE;
}

static PyMemberDef dispatcher_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Dispatcher, vectorcall), READONLY, NULL}, {NULL, 0, 0, 0, NULL}};

static PyType_Slot dispatcher_slots[] = {
    {Py_tp_doc, "A base of wrappers, whose calls try fast paths: see `connect`."},
    {Py_tp_new, dispatcher_new}, {Py_tp_call, PyVectorcall_Call}, COLLECTED_SLOTS(dispatcher),
    {Py_tp_members, dispatcher_members}, {0, NULL}};

TYPE(Dispatcher, dispatcher,
     Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_BASETYPE)

/* --- The module ---------------------------------------------------------------------------------- */

/* See `passed` in _spec/arrays.py. */
#define ALIGNMENT 64
enum { FAILED = -1, UNSETTLED, AS_IT_IS, TO_BE_COPIED };

/* Says what becomes of a NumPy array that has less than `n_bytes`. `native_dtype`, borrowed, is that of the last
   array, whose bytes aren't swapped. */
static int settle_numpy(State *state, PyObject *array, Py_ssize_t n_bytes, PyObject **native_dtype) {
    PyObject *dtype = PyObject_GetAttr(array, state->dtype);
    if (dtype == NULL) return FAILED;
    if (dtype != *native_dtype) {
        PyObject *answer = PyObject_GetAttr(dtype, state->isnative);
        int is_native = answer == NULL ? -1 : PyObject_IsTrue(answer);
        Py_XDECREF(answer);
        if (is_native <= 0) {
            Py_DECREF(dtype);
            return is_native < 0 ? FAILED : UNSETTLED;
        }
        /* The array, which is the caller's, keeps it. */
        *native_dtype = dtype;
    }
    Py_DECREF(dtype);
    Py_buffer buffer;
    if (PyObject_GetBuffer(array, &buffer, PyBUF_STRIDES) < 0) {
        PyErr_Clear();
        return UNSETTLED;
    }
    int how = buffer.len >= n_bytes ? UNSETTLED : (uintptr_t)buffer.buf % ALIGNMENT != 0 ? AS_IT_IS : TO_BE_COPIED;
    PyBuffer_Release(&buffer);
    return how;
}

static PyObject *settle_small(PyObject *module, PyObject *args) {
    State *state = PyModule_GetState(module);
    PyObject *leaves, *native_dtype = NULL;
    Py_ssize_t n_bytes;
    if (!PyArg_ParseTuple(args, "O!n:settle_small", &PyList_Type, &leaves, &n_bytes)) return NULL;
    PyObject *left = PyList_New(0);
    for (Py_ssize_t i = 0; left != NULL && i < PyList_GET_SIZE(leaves); i++) {
        PyObject *leaf = PyList_GET_ITEM(leaves, i), *type = (PyObject *)Py_TYPE(leaf), *made = NULL;
        if (type == state->array_type) continue;
        int how = type == state->numpy_type ? settle_numpy(state, leaf, n_bytes, &native_dtype)
                                            : PySet_Contains(state->array_classes, type);
        if (how == AS_IT_IS) continue;
        if (how == UNSETTLED) made = PyLong_FromSsize_t(i);
        if (how == TO_BE_COPIED) made = PyObject_CallMethodNoArgs(leaf, state->copy);
        int failed = made == NULL || (how == UNSETTLED ? PyList_Append(left, made)
                                                       : PyList_SetItem(leaves, i, Py_NewRef(made)));
        Py_XDECREF(made);
        if (failed) Py_CLEAR(left);
    }
    return left;
}

static PyObject *setup(PyObject *module, PyObject *args) {
    State *state = PyModule_GetState(module), new = *state, old = *state;
    if (!PyArg_ParseTuple(args, "OOO!OOOOOOOOOOO:setup", &new.array_mark, &new.array_type, &PyType_Type,
                          &new.tracer_type, &new.numpy_type, &new.array_classes, &new.is_array, &new.passed,
                          &new.flatten, &new.registered, &new.same, &new.unflatten, &new.wait_for,
                          &new.opaque_type, &new.is_for_slow_path)) return NULL;
#define TAKE(name) Py_INCREF(new.name);
    FROM_PYTHON(TAKE)
    *state = new;
    /* What another import of the package has set. */
#define DROP(name) Py_XDECREF(old.name);
    FROM_PYTHON(DROP)
    Py_RETURN_NONE;
}

static int module_traverse(PyObject *module, visitproc visit, void *arg) {
    State *state = PyModule_GetState(module);
#define VISIT(name) Py_VISIT(state->name);
    STATE_FIELDS(VISIT)
    return 0;
}

static int module_clear(PyObject *module) {
    State *state = PyModule_GetState(module);
#define CLEAR(name) Py_CLEAR(state->name);
    STATE_FIELDS(CLEAR)
    return 0;
}

static void module_free(void *module) {
    (void)module_clear(module);
}

static int module_exec(PyObject *module) {
    State *state = PyModule_GetState(module);
    /* Tools such as beartype report a wrong call of a wrapper by the name of the type that defines `__call__`. */
    dispatcher_spec.name = "eqxjit._native.JitFunction";
    PyType_Spec *specs[] = {&static_spec, &flags_spec, &fast_spec, &dispatcher_spec};
    PyTypeObject **types[] = {&state->static_type, &state->flags_type, &state->fast_type, &state->dispatcher_type};
    for (int i = 0; i < 4; i++) {
        *types[i] = (PyTypeObject *)PyType_FromModuleAndSpec(module, specs[i], NULL);
        if (*types[i] == NULL || PyModule_AddType(module, *types[i]) < 0) return -1;
    }
    state->static_type->tp_vectorcall = static_vectorcall;
#define INTERN(name) if ((state->name = PyUnicode_InternFromString(#name)) == NULL) return -1;
    NAMES(INTERN)
    state->empty = PyTuple_New(0);
    return state->empty == NULL ? -1 : PyModule_AddIntMacro(module, INTERFACE);
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec}, {0, NULL}};

static PyMethodDef module_methods[] = {
    {"setup", setup, METH_VARARGS, "setup(...): takes what is Python's."},
    {"run", (PyCFunction)(void (*)(void))run, METH_FASTCALL,
     "run(call, jitted, *arrays): calls a jitted function, or its `lower`, for a call of the slow path."},
    {"in_flight", (PyCFunction)(void (*)(void))in_flight, METH_FASTCALL,
     "in_flight(entry=None): this thread's innermost call in flight, of an entry or of any; or None."},
    {"settle_small", settle_small, METH_VARARGS,
     "settle_small(leaves, n_bytes): copies NumPy arrays of fewer bytes in a list if JAX would read them in place; "
     "returns the indices of all others but JAX's arrays and NumPy's scalars."},
    {"connect", connect, METH_VARARGS,
     "connect(wrapper, otherwise, ...): has a wrapper try fast paths, if there are any, then `otherwise`."},
    {"intercept", intercept, METH_VARARGS,
     "intercept(wrapper, interceptor): has calls of a wrapper go to another callable instead; None ends that."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT, .m_name = "eqxjit._native",
    .m_doc = "The native back end: fast paths in C.", .m_size = sizeof(State),
    .m_methods = module_methods, .m_slots = module_slots,
    .m_traverse = module_traverse, .m_clear = module_clear, .m_free = module_free,
};

PyMODINIT_FUNC PyInit__native(void) {
    return PyModuleDef_Init(&module_def);
}
