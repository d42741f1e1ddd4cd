/* The native back end: fast paths that walk the specs of arguments and outputs.

A Dispatcher, which Python calls JitFunction, is the base class of wrappers. When a wrapper is called, it tries the
fast paths of its function in turn. A fast path (a Fast)
1. binds the arguments and matches them with its spec,
2. calls the jitted function with the arrays in them,
3. combines the output from the arrays that JAX returns and from the spec of the output.
If no fast path matches, if JAX traces, or if an error is raised, the slow path in _core/slow.py takes over.
_spec/tree.py says what a spec is, and _spec/static_key.py says what the key of a static object is.

Invariants:
- Only CPython's public API is used. The code relies on the GIL and never releases it itself, so a free-threaded
  Python doesn't build this file.
- Guards have no effects: they take references and compare. The user's code that they run is registered flatten
  functions, `hash` and `==`, and no more. NumPy arrays are copied only after the whole call has matched.
- While a container or one of its children is walked, this code holds a strong reference to it, because the
  user's code may change or free any container of the user's.
- For the same reason, the size of a container and its next item are read again after each child.
- Specs and keys are created by eqxjit, so they are trusted. How many arrays and static objects a walk takes is
  checked all the same, because the walk writes them into memory of a fixed size.
- A new tuple or list gets all of its items at once, because any code can find it through the garbage collector as
  soon as it exists.
- If a guard raises an error for which `is_for_slow_path` in writer.py returns True, the slow path makes the call.
  Any other error is raised at once, because it comes from the user's code or from a signal handler.
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

/* The version of the interface between this file and the Python code. Raise it here and in _compat.py with each change
   of the interface, because a stale build may be installed. */
#define INTERFACE 67

/* The kinds of nodes in a spec. _spec/tree.py has the same numbers. */
enum { SEQUENCE, DICT, MODULE, NODE };
/* The readers in a key. _spec/static_key.py has the same numbers. */
enum { NUMBER, ITEMS, PAIRS, FIELDS, OTHER };

/* The spec of a node is (kind, class, aux, child, ...), and a key that has parts is (reader, class, names, part, ...).
   HEAD is the index of the first child or part. */
#define HEAD 3
#define KIND(spec) PyLong_AsLong(PyTuple_GET_ITEM(spec, 0))

/* The names of methods and attributes that this file looks up, and `ours`, the mode in which it logs calls. */
#define NAMES(DO)                                                                                          \
    DO(failed_fast) DO(finish_fast) DO(make_matched_call) DO(block_until_ready) DO(entry)                  \
    DO(hash) DO(value) DO(identity_suffices) DO(content) DO(dtype) DO(isnative) DO(copy)                   \
    DO(tried) DO(n_due) DO(account) DO(ours) DO(trace) DO(used)
#define DECLARE(name) PyObject *name;

/* The state of the module. */
typedef struct {
    PyTypeObject *static_type, *flags_type, *log_type, *fast_type, *dispatcher_type;

    /* `setup` sets the fields from here to `eval_trace`. */
    PyObject *array_mark;       /* ARRAY, which stands for an array in a spec */
    PyObject *array_type;       /* JAX's concrete class of arrays */
    PyTypeObject *tracer_type;  /* JAX's class of tracers */
    PyObject *numpy_type;       /* numpy.ndarray, whose objects can be overwritten by their owners */
    PyObject *array_classes;    /* a set of array_type, numpy_type, and the classes of NumPy's scalars */
    PyObject *is_array;         /* the function in _spec/tree.py */
    PyObject *passed;           /* the function in _spec/arrays.py */
    PyObject *flatten;          /* flatten_one_level in _compat.py */
    PyObject *registered;       /* the classes that are registered as nodes */
    PyObject *same;             /* the function in _spec/static_key.py */
    PyObject *unflatten;        /* unflatten_node in _compat.py */
    PyObject *wait_for;         /* the function in _spec/arrays.py */
    PyObject *opaque_type;      /* Opaque, the class of keys of objects that aren't read into parts */
    PyObject *is_for_slow_path; /* the function in _fast/writer.py */
    PyObject *may_be_dropped;   /* the function in _signals.py */
    PyObject *trace_ctx;        /* the object of JAX of this name, of which `trace` is the innermost transformation */
    PyObject *eval_trace;       /* the class of `trace` if there is no transformation; None if it isn't known */

    NAMES(DECLARE)
    PyObject *empty; /* the empty tuple */
} State;

/* The fields that `setup` sets, in the order of its arguments. */
#define FROM_PYTHON(DO)                                                                                    \
    DO(array_mark) DO(array_type) DO(tracer_type) DO(numpy_type) DO(array_classes) DO(is_array)            \
    DO(passed) DO(flatten) DO(registered) DO(same) DO(unflatten) DO(wait_for) DO(opaque_type)              \
    DO(is_for_slow_path) DO(may_be_dropped) DO(trace_ctx) DO(eval_trace)
/* All fields of the state. Each of them is a reference. */
#define STATE_FIELDS(DO)                                                                                   \
    DO(static_type) DO(flags_type) DO(log_type) DO(fast_type) DO(dispatcher_type) FROM_PYTHON(DO)           \
    NAMES(DO) DO(empty)

static struct PyModuleDef module_def;

/* Returns the state of the module that defines a type, or a base class of the type. */
static State *state_of(PyTypeObject *type) {
    return PyModule_GetState(PyType_GetModuleByDef(type, &module_def));
}

/* Sets an error and evaluates to `failed`. For data that eqxjit created and that doesn't fit together. */
#define MALFORMED(failed) (PyErr_SetString(PyExc_SystemError, "eqxjit: malformed parts of a call"), (failed))

/* Returns zeroed memory for n pointers: `small`, which has room for n_small, or else a new block. */
static PyObject **allocate(PyObject **small, Py_ssize_t n_small, Py_ssize_t n) {
    if (n <= n_small) return memset((void *)small, 0, (size_t)n * sizeof(PyObject *));
    PyObject **block = PyMem_Calloc((size_t)n, sizeof(PyObject *));
    if (block == NULL) PyErr_NoMemory();
    return block;
}

/* Drops the references in a block that `allocate` returned, and frees the block unless it is `small`. */
static void release(PyObject **block, PyObject **small, Py_ssize_t n) {
    for (Py_ssize_t i = 0; i < n; i++) Py_XDECREF(block[i]);
    if (block != small) PyMem_Free((void *)block);
}

/* Counts a level of a tree like a call of a Python function, so that a tree that is too deep raises a
   RecursionError. Evaluates to true if the error was raised. */
#define ENTER_LEVEL Py_EnterRecursiveCall(" in a deep tree")

/* Defines the functions by which objects of a type are traversed, cleared and deallocated. FIELDS(DO) applies DO to
   each reference that an object holds. */
#define COLLECTED(Type, name, FIELDS)                                                                      \
    static int name##_traverse(Type *self, visitproc visit, void *arg) {                                   \
        Py_VISIT(Py_TYPE(self));                                                                           \
        FIELDS(Py_VISIT)                                                                                   \
        return 0;                                                                                          \
    }                                                                                                      \
    static int name##_clear(Type *self) {                                                                  \
        FIELDS(Py_CLEAR)                                                                                   \
        return 0;                                                                                          \
    }                                                                                                      \
    static void name##_dealloc(Type *self) {                                                               \
        PyTypeObject *type = Py_TYPE(self);                                                                \
        PyObject_GC_UnTrack(self);                                                                         \
        (void)name##_clear(self);                                                                          \
        type->tp_free(self);                                                                               \
        Py_DECREF(type);                                                                                   \
    }

#define COLLECTED_SLOTS(name)                                                                              \
    {Py_tp_traverse, name##_traverse}, {Py_tp_clear, name##_clear}, {Py_tp_dealloc, name##_dealloc}

/* Defines the PyType_Spec of a type of this module, which has the slots in prefix##_slots. `type_name` is its name in
   Python. */
#define TYPE(Type, prefix, type_name, more_flags)                                                          \
    static PyType_Spec prefix##_spec = {                                                                   \
        .name = "eqxjit._native." type_name, .basicsize = sizeof(Type), .slots = prefix##_slots,           \
        .flags = Py_TPFLAGS_DEFAULT | (more_flags)};

/* --- Errors -------------------------------------------------------------------------------------- */

/* Clears the current exception and returns it, with its traceback. */
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

/* Sets an exception that `take_error` returned. Steals the reference to it. */
static void set_error(PyObject *error) {
#if PY_VERSION_HEX >= 0x030C0000
    PyErr_SetRaisedException(error);
#else
    PyErr_Restore(Py_NewRef((PyObject *)Py_TYPE(error)), error, PyException_GetTraceback(error));
#endif
}

/* Clears the current exception if a Python function returns True for it. Returns whether it did, or -1. */
static int clear_error_if(PyObject *function) {
    PyObject *error = take_error();
    PyObject *answer = PyObject_CallOneArg(function, error);
    int is_cleared = answer == NULL ? -1 : PyObject_IsTrue(answer);
    Py_XDECREF(answer);
    if (is_cleared == 0) set_error(error);
    else Py_DECREF(error);
    return is_cleared;
}

/* --- Static: stands for a static object in a spec ------------------------------------------------ */

typedef struct {
    PyObject_HEAD
    PyObject *key;  /* the static key, which has a hash */
    Py_hash_t hash; /* the hash of the key */
    char ask;       /* whether the object's class may be registered as a node later, so that each call must ask */
} Static;

/* Implements the call `Static(key, ask=False)`. */
static PyObject *static_vectorcall(PyObject *type, PyObject *const *args, size_t n_args_flag, PyObject *kwnames) {
    Py_ssize_t n = PyVectorcall_NARGS(n_args_flag);
    if (n < 1 || n > 2 || kwnames != NULL) return MALFORMED(NULL);
    PyObject *key = args[0];
    int ask = n == 2 ? PyObject_IsTrue(args[1]) : 0;
    if (ask < 0) return NULL;
    Py_hash_t hash = PyObject_Hash(key);
    if (hash == -1) return NULL;
    Static *self = PyObject_GC_New(Static, (PyTypeObject *)type);
    if (self == NULL) return NULL;
    self->key = Py_NewRef(key);
    self->hash = hash;
    self->ask = (char)ask;
    /* A key such as a string or a number refers to nothing, so this object can't be part of a cycle. */
    if (PyObject_IS_GC(key)) PyObject_GC_Track(self);
    return (PyObject *)self;
}

#define STATIC_FIELDS(DO) DO(self->key);
COLLECTED(Static, static, STATIC_FIELDS)

static Py_hash_t static_hash(Static *self) {
    return self->hash;
}

static PyObject *static_compare(PyObject *self, PyObject *other, int op) {
    if (Py_TYPE(other) != Py_TYPE(self) || (op != Py_EQ && op != Py_NE)) Py_RETURN_NOTIMPLEMENTED;
    Static *a = (Static *)self;
    Static *b = (Static *)other;
    int equal = a->hash == b->hash ? PyObject_RichCompareBool(a->key, b->key, Py_EQ) : 0;
    if (equal < 0) return NULL;
    return PyBool_FromLong(op == Py_EQ ? equal : !equal);
}

static PyMemberDef static_members[] = {
    {"key", T_OBJECT, offsetof(Static, key), READONLY, NULL},
    {"ask", T_BOOL, offsetof(Static, ask), READONLY, NULL},
    {NULL, 0, 0, 0, NULL}};

/* Without Py_tp_clear, as for tuples: a dict may still compare a Static that is being collected. */
static PyType_Slot static_slots[] = {
    {Py_tp_doc, "Static(key, ask=False): stands for a static object in a spec."},
    {Py_tp_traverse, static_traverse},
    {Py_tp_dealloc, static_dealloc},
    {Py_tp_hash, static_hash},
    {Py_tp_richcompare, static_compare},
    {Py_tp_members, static_members},
    {0, NULL}};

/* There is no `tp_new`. `module_exec` sets `tp_vectorcall`, which creates all objects of this type. */
TYPE(Static, static, "Static", Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION)

/* --- Flags: the base class of Program in _core/entry.py ------------------------------------------ */

typedef struct {
    PyObject_HEAD
    long long number; /* a number that no other program in this process has */
    char unread;      /* whether it isn't known yet if the program can raise */
    char must_wait;   /* whether each call waits until the program has run */
} Flags;

static PyMemberDef flags_members[] = {
    {"number", T_LONGLONG, offsetof(Flags, number), 0, NULL},
    {"unread", T_BOOL, offsetof(Flags, unread), 0, NULL},
    {"must_wait", T_BOOL, offsetof(Flags, must_wait), 0, NULL},
    {NULL, 0, 0, 0, NULL}};

static PyType_Slot flags_slots[] = {
    {Py_tp_doc, "The fields of a program that each warm call reads."},
    {Py_tp_members, flags_members},
    {0, NULL}};

TYPE(Flags, flags, "Flags", Py_TPFLAGS_BASETYPE)

/* --- Log: the base class of Log in _reports/log.py ------------------------------------------------ */

typedef struct {
    PyObject_HEAD
    PyObject *clock;      /* a function that returns the time in seconds */
    PyObject *mode;       /* who serves the calls; only while eqxjit does, they are logged here */
    PyObject *called;     /* a list of the functions of the latest calls; Python replaces it to read the log */
    PyObject *times;      /* a bytearray with two doubles for each of them, and room for more */
    PyObject *latest;     /* the function that was called last */
    double begun;         /* when this call began */
    double offset;        /* the logged times are this much less than those of the clock */
    double logs_until;    /* calls that begin later are made by the interceptor */
    unsigned long thread; /* the thread whose calls are logged */
    char is_inside;       /* whether the thread is inside a call */
    char has_compiled;    /* whether JAX has compiled something in this call */
} Log;

#define LOG_FIELDS(DO)                                                                                     \
    DO(self->clock); DO(self->mode); DO(self->called); DO(self->times); DO(self->latest);
COLLECTED(Log, log, LOG_FIELDS)

/* What `times` has of a call: when it began and ended. */
typedef double Times[2];

/* Returns how many calls a log has, or -1 if there is no room for another. */
static Py_ssize_t count_calls(Log *self) {
    if (self->called == NULL || !PyList_CheckExact(self->called)) return -1;
    if (self->times == NULL || !PyByteArray_CheckExact(self->times)) return -1;
    Py_ssize_t n = PyList_GET_SIZE(self->called);
    return (n + 1) * (Py_ssize_t)sizeof(Times) <= PyByteArray_GET_SIZE(self->times) ? n : -1;
}

static PyMemberDef log_members[] = {
    {"clock", T_OBJECT, offsetof(Log, clock), 0, NULL},
    {"mode", T_OBJECT, offsetof(Log, mode), 0, NULL},
    {"called", T_OBJECT, offsetof(Log, called), 0, NULL},
    {"times", T_OBJECT, offsetof(Log, times), 0, NULL},
    {"latest", T_OBJECT, offsetof(Log, latest), 0, NULL},
    {"begun", T_DOUBLE, offsetof(Log, begun), 0, NULL},
    {"offset", T_DOUBLE, offsetof(Log, offset), 0, NULL},
    {"logs_until", T_DOUBLE, offsetof(Log, logs_until), 0, NULL},
    {"thread", T_ULONG, offsetof(Log, thread), 0, NULL},
    {"is_inside", T_BOOL, offsetof(Log, is_inside), 0, NULL},
    {"has_compiled", T_BOOL, offsetof(Log, has_compiled), 0, NULL},
    {NULL, 0, 0, 0, NULL}};

static PyType_Slot log_slots[] = {
    {Py_tp_doc, "The fields that each logged call reads and sets."},
    COLLECTED_SLOTS(log),
    {Py_tp_members, log_members},
    {0, NULL}};

TYPE(Log, log, "Log", Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE)

/* --- Calls in flight ----------------------------------------------------------------------------- */

/* The record of a call while JAX runs it. It borrows its references from the C function that makes the call, except
   for a Call that `call_of` has created. */
typedef struct InFlight {
    struct InFlight *outer; /* the record of the next outer call in flight of this thread */
    Py_ssize_t n_uses;      /* how many C functions use this record; the last one to return frees it */
    PyObject *entry;        /* the entry that is called */
    PyObject *call;         /* the Call; NULL in a fast path until `call_of` creates it */
    PyObject *handler;      /* the CallHandler of the wrapper; this and the fields below belong to fast paths */
    PyObject *const *args;  /* the arguments, as in a vectorcall */
    Py_ssize_t n_args;
    PyObject *kwnames;
} InFlight;

/* The record of this thread's innermost call in flight. */
static THREAD_LOCAL InFlight *innermost = NULL;

/* Returns how many arguments a call has, keyword arguments included. */
static Py_ssize_t count_arguments(const InFlight *call) {
    return call->n_args + (call->kwnames == NULL ? 0 : PyTuple_GET_SIZE(call->kwnames));
}

/* Ends one use of a record. */
static void drop_record(InFlight *record) {
    if (--record->n_uses > 0) return;
    Py_XDECREF(record->call);
    PyMem_Free(record);
}

/* Calls a jitted function with arrays, and keeps a record of the call meanwhile. The reference in `call->call` moves
   into the record and back.

   A greenlet can switch away in the middle of the call. Other greenlets of the thread then use the same C stack, and
   begin and end calls of their own. So the record is a copy on the heap, and it isn't assumed to be the first of the
   list when the call ends. */
static PyObject *run_in_flight(PyObject *jitted, PyObject *const *arrays, size_t n_arrays_flag, InFlight *call) {
    size_t n_bytes = (size_t)count_arguments(call) * sizeof(PyObject *);
    InFlight *record = PyMem_Malloc(sizeof(InFlight) + n_bytes);
    if (record == NULL) return PyErr_NoMemory();
    *record = *call;
    record->n_uses = 1;
    record->args = (PyObject **)(record + 1);
    if (n_bytes > 0) memcpy((void *)record->args, (void *)call->args, n_bytes);
    record->outer = innermost;
    innermost = record;

    PyObject *output = PyObject_Vectorcall(jitted, arrays, n_arrays_flag, NULL);

    InFlight **link = &innermost;
    while (*link != record) link = &(*link)->outer;
    *link = record->outer;
    call->call = record->call;
    record->call = NULL;
    drop_record(record);
    return output;
}

/* Calls a method of the first of n_first objects with the other ones, followed by the arguments of a call. */
static PyObject *call_method(PyObject *name, PyObject *const *first, Py_ssize_t n_first, const InFlight *call) {
    Py_ssize_t n = count_arguments(call);
    PyObject *small[16];
    PyObject **all = allocate(small, 16, n_first + n);
    if (all == NULL) return NULL;
    memcpy((void *)all, (void *)first, (size_t)n_first * sizeof(PyObject *));
    if (n > 0) memcpy((void *)(all + n_first), (void *)call->args, (size_t)n * sizeof(PyObject *));
    PyObject *result = PyObject_VectorcallMethod(name, all, (size_t)(n_first + call->n_args), call->kwnames);
    /* Not `release`, because these references are borrowed. */
    if (all != small) PyMem_Free((void *)all);
    return result;
}

/* Returns the Call of a call in flight, borrowed from `call`. Creates the Call if there is none yet. */
static PyObject *call_of(State *state, InFlight *call) {
    if (call->call != NULL) return call->call;
    PyObject *first[] = {call->handler, call->entry};
    PyObject *made = call_method(state->make_matched_call, first, 2, call);
    if (made != NULL) Py_XSETREF(call->call, made);
    return made;
}

static PyObject *in_flight(PyObject *module, PyObject *const *args, Py_ssize_t n_args) {
    InFlight *record = innermost;
    while (record != NULL && n_args > 0 && record->entry != args[0]) record = record->outer;
    if (record == NULL) Py_RETURN_NONE;
    /* The user's flatten, which `call_of` may run, can switch to the greenlet of the record, which may end the call. */
    record->n_uses++;
    PyObject *call = Py_XNewRef(call_of(PyModule_GetState(module), record));
    drop_record(record);
    return call;
}

static PyObject *call_in_flight(PyObject *module, PyObject *const *args, Py_ssize_t n_args) {
    State *state = PyModule_GetState(module);
    if (n_args < 2) return MALFORMED(NULL);
    PyObject *entry = PyObject_GetAttr(args[0], state->entry);
    if (entry == NULL) return NULL;
    InFlight call = {.entry = entry, .call = args[0]};
    /* Without PY_VECTORCALL_ARGUMENTS_OFFSET: it would let the jitted function write to the place before the arrays,
       which is in the caller's memory. */
    PyObject *output = run_in_flight(args[1], args + 2, (size_t)(n_args - 2), &call);
    Py_DECREF(entry);
    return output;
}

/* --- Fast paths, wrappers, and walks over arguments ---------------------------------------------- */

/* How deep in the arguments `match_last_difference` looks. */
#define N_STEPS 16

/* The way to a part of a call: the index of each child that it passes through, innermost first, and at last the index
   of the argument. It is empty if `n` is 0, and unknown if `n` is larger than N_STEPS. */
typedef struct {
    Py_ssize_t n;
    Py_ssize_t steps[N_STEPS];
} Way;

/* The fast path of an entry. */
typedef struct {
    PyObject_HEAD
    PyObject *entry;
    PyObject *jitted; /* the jitted function of the entry */
    PyObject *args;   /* the spec of the tuple of positional arguments */
    PyObject *kwargs; /* the spec of the dict of keyword arguments */
    PyObject *outs;   /* the `outs` of the entry: a dict of what each program returns, by the program's number */
    Py_ssize_t n_arrays;  /* how many arrays the jitted function takes */
    Py_ssize_t n_fun;     /* how many of these arrays belong to the wrapped function; they come last */
    Py_ssize_t n_statics; /* how many static objects the arguments have */
    long long hits;        /* how many calls this fast path has served */
    long long hits_before; /* the value of `hits` when the table last looked */
    Way last_difference;   /* the way to the first part that didn't match in the last call that didn't match */
} Fast;

/* A wrapper. Its fields are NULL until `connect` sets them, except those that `dispatcher_new` and `intercept` set. */
typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall; /* `dispatch` or `call_interceptor` */
    State *state;
    PyObject *otherwise;   /* the callable that makes a call that no fast path matches */
    PyObject *handler;     /* the CallHandler, which has the slow path */
    PyObject *fasts;       /* the list of fast paths; NULL until `connect` sets it */
    PyObject *fun_arrays;  /* a tuple of the wrapped function's arrays */
    PyObject *fun_statics; /* a tuple of the wrapped function's static objects */
    PyObject *names;       /* the names of parameters that take positional arguments; see `argument` */
    PyObject *interceptor; /* the callable that `intercept` puts in the place of this wrapper's calls */
    PyObject *log;         /* the Log of calls that need no interceptor */
} Dispatcher;

/* The number of pointers that a walk has room for without allocating memory. Most calls need no more. */
#define N_SLOTS 256

/* A walk over the arguments of one call, and the arrays and static objects that it has taken so far. */
typedef struct {
    State *state;
    Dispatcher *self;
    Fast *fast;
    PyObject **arrays;  /* the arrays, in the order in which the jitted function takes them */
    PyObject **statics; /* the static objects, in the order of the spec */
    Py_ssize_t n_arrays;
    Py_ssize_t n_statics;
    int has_others;         /* whether any of the arrays is neither JAX's own nor a NumPy scalar */
    Way difference;         /* the way to the first part that doesn't match, as far as it is known */
    PyObject **block;       /* memory for a spare pointer (see `match_call`), then the arrays, then the statics */
    PyObject *small[N_SLOTS]; /* the block of a walk that needs no more than this */
    Py_ssize_t n_block;
} Walk;

/* --- Guards -------------------------------------------------------------------------------------- */

/* A guard returns 1 if a value has the given spec (or key), 0 if it doesn't, and -1 if an error is set. */
typedef int (*Guard)(Walk *walk, PyObject *spec, PyObject *value);

static int same(Walk *walk, PyObject *key, PyObject *value);
static int match(Walk *walk, PyObject *spec, PyObject *value);

/* Runs a guard on a child of a container. The guard may run the user's code, which may drop the child. */
static inline int guard_child(Walk *walk, Guard guard, PyObject *spec, PyObject *child) {
    Py_INCREF(child);
    int matches = guard(walk, spec, child);
    Py_DECREF(child);
    return matches;
}

/* Adds a step to the way to the part that doesn't match: the index of a child, or of the argument. */
static inline void note_difference(Walk *walk, Py_ssize_t i) {
    Way *way = &walk->difference;
    if (way->n < N_STEPS) way->steps[way->n] = i;
    way->n++;
}

/* Runs a guard on each item of a tuple or list whose class has been compared. Items of a subclass are read past its
   `__iter__`, as `split` and `static_key` read them. */
static inline int each_item(Walk *walk, Guard guard, PyObject *spec, PyObject *value, Py_ssize_t n) {
    for (Py_ssize_t i = 0; i < n; i++) {
        if (PySequence_Fast_GET_SIZE(value) != n) return 0;
        PyObject *item_spec = PyTuple_GET_ITEM(spec, HEAD + i);
        int matches = guard_child(walk, guard, item_spec, PySequence_Fast_GET_ITEM(value, i));
        if (matches == 0 && guard == match) note_difference(walk, i);
        if (matches <= 0) return matches;
    }
    return PySequence_Fast_GET_SIZE(value) == n;
}

/* --- Guards of static objects -------------------------------------------------------------------- */

/* Calls `same` in _spec/static_key.py, which is slower, for rare kinds of keys. */
static int same_in_python(Walk *walk, PyObject *key, PyObject *value) {
    PyObject *answer = PyObject_CallFunctionObjArgs(walk->state->same, value, key, NULL);
    if (answer == NULL) return -1;
    int is_same = PyObject_IsTrue(answer);
    Py_DECREF(answer);
    return is_same;
}

/* Returns whether the value is the object that a weak reference refers to. A dead reference refers to None, so None
   is never the object. */
static int is_referent(PyObject *ref, PyObject *value) {
    PyObject *referent = PyObject_CallNoArgs(ref);
    if (referent == NULL) return -1;
    Py_DECREF(referent);
    return referent == value && referent != Py_None;
}

/* Compares floats by their bits, because 0.0 and -0.0 differ. All NaNs count as the same, because otherwise each new
   NaN would cause a trace. */
static int same_number(Walk *walk, PyObject *key, PyObject *value, PyObject *bits) {
    if (!PyFloat_CheckExact(value)) return same_in_python(walk, key, value);
    double a = PyFloat_AS_DOUBLE(value);
    double b;
    memcpy(&b, PyBytes_AS_STRING(bits), sizeof b);
    int are_nan = a != a && b != b;
    return memcmp((char *)&a, (char *)&b, sizeof a) == 0 || are_nan;
}

/* Compares the items of a dict in their order, because the user's function may iterate over the dict. The parts of the
   key are first the keys of the n / 2 items, then their values. */
static int same_pairs(Walk *walk, PyObject *pairs, PyObject *value, Py_ssize_t n) {
    PyObject *key, *item;
    Py_ssize_t position = 0;
    Py_ssize_t half = n / 2;
    for (Py_ssize_t i = 0; i < half; i++) {
        /* The user's `==` may have changed the dict. `PyDict_Next` stays within its memory even then. */
        if (PyDict_GET_SIZE(value) != half || !PyDict_Next(value, &position, &key, &item)) return 0;
        Py_INCREF(item);
        int is_same = guard_child(walk, same, PyTuple_GET_ITEM(pairs, HEAD + i), key);
        if (is_same > 0) is_same = same(walk, PyTuple_GET_ITEM(pairs, HEAD + half + i), item);
        Py_DECREF(item);
        if (is_same <= 0) return is_same;
    }
    return PyDict_GET_SIZE(value) == half;
}

/* Compares a slice, or a dataclass with a generated `==`, by the fields that its `==` compares. */
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

/* Compares a value with a key that has parts. */
static int same_parts(Walk *walk, PyObject *key, PyObject *value) {
    Py_ssize_t n = PyTuple_GET_SIZE(key) - HEAD;
    if ((PyObject *)Py_TYPE(value) != PyTuple_GET_ITEM(key, 1)) return 0;
    /* The only part of a bool's key is the bool itself, and there are only two bools. */
    if (PyBool_Check(value) && n > 0) return value == PyTuple_GET_ITEM(key, HEAD);
    long reader = KIND(key);
    if (reader == NUMBER && n > 0) return same_number(walk, key, value, PyTuple_GET_ITEM(key, HEAD));
    int is_items = reader == ITEMS && (PyTuple_Check(value) || PyList_Check(value));
    /* Not for subclasses: `PyDict_Next` doesn't follow the order of an `OrderedDict`. */
    int is_pairs = reader == PAIRS && PyDict_CheckExact(value);
    if (!is_items && !is_pairs && reader != FIELDS) return same_in_python(walk, key, value);
    if (ENTER_LEVEL) return -1;
    int is_same;
    if (is_items) is_same = each_item(walk, same, key, value, n);
    else if (is_pairs) is_same = same_pairs(walk, key, value, n);
    else is_same = same_fields(walk, key, value, n);
    Py_LeaveRecursiveCall();
    return is_same;
}

/* Compares a value with the object of an Opaque by hash and then by `==`, as a dict looks up a key. */
static int same_by_hash(PyObject *object, PyObject *hash, PyObject *value) {
    Py_hash_t now = PyObject_Hash(value);
    if (now == -1) return -1;
    Py_hash_t then = PyLong_AsSsize_t(hash);
    if (then == -1 && PyErr_Occurred()) return -1;
    return now == then ? PyObject_RichCompareBool(value, object, Py_EQ) : 0;
}

/* Compares a value with an Opaque, which is the key of an object that isn't read into parts. */
static int same_opaque(Walk *walk, PyObject *key, PyObject *value) {
    State *state = walk->state;
    PyObject *names[] = {state->value, state->identity_suffices, state->content, state->hash};
    PyObject *parts[4] = {NULL};
    int is_same = 1;
    for (int i = 0; is_same > 0 && i < 4; i++) {
        parts[i] = PyObject_GetAttr(key, names[i]);
        if (parts[i] == NULL) is_same = -1;
    }
    if (is_same > 0) {
        PyObject *object = parts[0], *identity_suffices = parts[1], *content = parts[2], *hash = parts[3];
        if (Py_TYPE(value) != Py_TYPE(object)) is_same = 0;
        else if (value == object && identity_suffices == Py_True) is_same = 1;
        else if (content == Py_None && PyLong_CheckExact(hash)) is_same = same_by_hash(object, hash, value);
        /* The object is an array, is compared by identity, or has no hash. */
        else is_same = same_in_python(walk, key, value);
    }
    release(parts, parts, 4);
    return is_same;
}

/* Returns whether a value has a key, like `same` in _spec/static_key.py. */
static int same(Walk *walk, PyObject *key, PyObject *value) {
    PyTypeObject *type = Py_TYPE(key);
    /* Objects of these types are their own keys, and their `==` runs no code of the user's. */
    if (type == &PyUnicode_Type || type == &PyLong_Type || type == &PyBytes_Type) {
        return value == key || (Py_TYPE(value) == type ? PyObject_RichCompareBool(value, key, Py_EQ) : 0);
    }
    if (key == Py_None) return value == Py_None;
    if (PyWeakref_CheckRef(key)) return is_referent(key, value);
    if (type == &PyTuple_Type) return same_parts(walk, key, value);
    if ((PyObject *)type == walk->state->opaque_type) return same_opaque(walk, key, value);
    return same_in_python(walk, key, value);
}

/* Takes a static object of the call, because the user's function may return this very object. Returns 1, or -1 if an
   error is set. */
static inline int take_static(Walk *walk, PyObject *value) {
    if (walk->n_statics >= walk->fast->n_statics) return MALFORMED(-1);
    walk->statics[walk->n_statics++] = Py_NewRef(value);
    return 1;
}

/* Compares a static leaf. If its class may have been registered as a node since the trace, JAX's registry is asked
   whether the object is still a leaf. */
static int same_leaf(Walk *walk, Static *expected, PyObject *value) {
    if (expected->ask) {
        PyObject *flat = PyObject_CallOneArg(walk->state->flatten, value);
        if (flat == NULL) return -1;
        Py_DECREF(flat);
        if (flat != Py_None) return 0;
    }
    return same(walk, expected->key, value);
}

/* --- Guards of arrays and nodes ------------------------------------------------------------------ */

/* Returns whether a leaf, whose class isn't JAX's own class of arrays, is an array. */
static int is_other_array(Walk *walk, PyObject *leaf) {
    State *state = walk->state;
    PyObject *type = (PyObject *)Py_TYPE(leaf);
    int is_known = PySet_Contains(state->array_classes, type);
    if (is_known < 0) return -1;
    /* A NumPy scalar can't change, so it is passed as it is. */
    if (is_known && type != state->numpy_type) return 1;
    walk->has_others = 1;
    if (is_known) return 1;
    PyObject *answer = PyObject_CallOneArg(state->is_array, leaf);
    int is_array = answer == NULL ? -1 : PyObject_IsTrue(answer);
    Py_XDECREF(answer);
    return is_array;
}

static inline int is_array_leaf(Walk *walk, PyObject *leaf) {
    return (PyObject *)Py_TYPE(leaf) == walk->state->array_type ? 1 : is_other_array(walk, leaf);
}

/* Matches a leaf that must be an array, and takes it. Its shape and dtype don't matter, because JAX compares them. */
static int match_array(Walk *walk, PyObject *leaf) {
    if (walk->n_arrays >= walk->fast->n_arrays) return MALFORMED(-1);
    int is_array = is_array_leaf(walk, leaf);
    if (is_array <= 0) return is_array;
    walk->arrays[walk->n_arrays++] = Py_NewRef(leaf);
    return 1;
}

static int match_sequence(Walk *walk, PyObject *spec, PyObject *value, Py_ssize_t n) {
    /* The aux of a named tuple isn't None. Its class may have been registered as a node since the trace. */
    if (PyTuple_GET_ITEM(spec, 2) != Py_None) {
        int is_node = PySequence_Contains(walk->state->registered, (PyObject *)Py_TYPE(value));
        if (is_node) return is_node < 0 ? -1 : 0;
    }
    return each_item(walk, match, spec, value, n);
}

/* Matches the values of a dict that must have exactly the keys that the spec names. A dict of n items that has each
   of n names has no other key. */
static int match_values(Walk *walk, PyObject *spec, PyObject *dict, Py_ssize_t n) {
    PyObject *names = PyTuple_GET_ITEM(spec, 2);
    PyObject *key, *item;
    Py_ssize_t position = 0;
    int in_order = 1;
    if (PyDict_GET_SIZE(dict) != n) return 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *name = PyTuple_GET_ITEM(names, i);
        /* Most dicts have their items in the order of the names, and then nothing is looked up by hash. */
        in_order = in_order && PyDict_Next(dict, &position, &key, &item) && key == name;
        if (!in_order) item = PyDict_GetItemWithError(dict, name);
        if (item == NULL) return PyErr_Occurred() ? -1 : 0;
        int matches = guard_child(walk, match, PyTuple_GET_ITEM(spec, HEAD + i), item);
        if (matches == 0) note_difference(walk, i);
        if (matches <= 0) return matches;
    }
    return PyDict_GET_SIZE(dict) == n;
}

/* Matches a dict by key, in whatever order it has its items, because JAX and the spec sort them. */
static int match_dict(Walk *walk, PyObject *spec, PyObject *value, Py_ssize_t n) {
    /* A key of a subclass of `str` may equal a string, too, by its own `==`. */
    PyObject *key;
    Py_ssize_t position = 0;
    while (PyDict_Next(value, &position, &key, NULL)) {
        if (!PyUnicode_CheckExact(key)) return 0;
    }
    return match_values(walk, spec, value, n);
}

/* Matches a Module by everything in its `__dict__`, because the spec names the static fields, too. */
static int match_module(Walk *walk, PyObject *spec, PyObject *value, Py_ssize_t n) {
    /* Not by attribute, which would call `Module.__getattribute__`, a Python function. */
    PyObject *fields = PyObject_GenericGetDict(value, NULL);
    if (fields == NULL) return -1;
    int matches = PyDict_CheckExact(fields) ? match_values(walk, spec, fields, n) : 0;
    Py_DECREF(fields);
    return matches;
}

/* Matches any other node by the metadata and children that its flatten function returns. The flatten function runs on
   every call, because nothing else tells what is in the node. */
static int match_node(Walk *walk, PyObject *spec, PyObject *value, Py_ssize_t n) {
    PyObject *flat = PyObject_CallOneArg(walk->state->flatten, value);
    if (flat == NULL) return -1;
    if (flat == Py_None) {
        Py_DECREF(flat);
        return 0;
    }
    PyObject *children = NULL;
    int matches = PyTuple_Check(flat) && PyTuple_GET_SIZE(flat) == 2 ? 1 : MALFORMED(-1);
    if (matches > 0) {
        Static *expected = (Static *)PyTuple_GET_ITEM(spec, 2);
        PyObject *metadata = PyTuple_GET_ITEM(flat, 1);
        matches = take_static(walk, metadata);
        if (matches > 0) matches = same(walk, expected->key, metadata);
    }
    if (matches > 0) {
        children = PySequence_Tuple(PyTuple_GET_ITEM(flat, 0));
        matches = children == NULL ? -1 : each_item(walk, match, spec, children, n);
    }
    Py_DECREF(flat);
    Py_XDECREF(children);
    return matches;
}

/* Matches a value with a spec, and takes the arrays and static objects in the value. */
static int match(Walk *walk, PyObject *spec, PyObject *value) {
    static int (*const by_kind[])(Walk *, PyObject *, PyObject *, Py_ssize_t) = {
        match_sequence, match_dict, match_module, match_node};
    if (spec == walk->state->array_mark) return match_array(walk, value);
    if (spec == Py_None) return value == Py_None;
    if (Py_TYPE(spec) == walk->state->static_type) {
        return take_static(walk, value) < 0 ? -1 : same_leaf(walk, (Static *)spec, value);
    }
    /* A subclass doesn't match, because `split` may read its objects differently, or not at all. */
    if ((PyObject *)Py_TYPE(value) != PyTuple_GET_ITEM(spec, 1)) return 0;
    if (ENTER_LEVEL) return -1;
    int matches = by_kind[KIND(spec)](walk, spec, value, PyTuple_GET_SIZE(spec) - HEAD);
    Py_LeaveRecursiveCall();
    return matches;
}

/* --- Outputs ------------------------------------------------------------------------------------- */

/* The arrays that JAX returned for a call, and how many of them are in the user's output so far. */
typedef struct {
    Walk *walk;              /* the walk over the arguments of the call */
    Flags *program;          /* the program that ran; JAX keeps it alive */
    PyObject *list;          /* the list of the arrays that the program returned */
    PyObject *const *arrays; /* the items of that list */
    Py_ssize_t n_arrays;
    PyObject *out;             /* the Out of the program: (spec, static objects, slots) */
    Py_ssize_t n_arrays_used;  /* how many arrays the output contains so far */
    Py_ssize_t n_statics_used; /* how many static objects the output contains so far */
} Output;

/* Reads what the jitted function returned: a dict of one program and the list of its arrays. */
static int read_returned(Output *output, PyObject *returned) {
    Py_ssize_t position = 0;
    PyObject *program, *arrays;
    if (!PyDict_CheckExact(returned) || !PyDict_Next(returned, &position, &program, &arrays)) return MALFORMED(-1);
    if (!PyObject_TypeCheck(program, output->walk->state->flags_type)) return MALFORMED(-1);
    if (!PyList_CheckExact(arrays)) return MALFORMED(-1);
    output->program = (Flags *)program;
    output->list = arrays;
    /* The list was created for this call, so nobody else changes it. */
    output->n_arrays = PyList_GET_SIZE(arrays);
    output->arrays = PySequence_Fast_ITEMS(arrays);
    return 0;
}

/* Returns the next static object of the output. Its slot is -1 if it is the object that the trace returned. Otherwise
   the slot is its index among the static objects of this call: those of the wrapped function, then those of the
   arguments. */
static PyObject *next_static(Output *output) {
    PyObject *statics = PyTuple_GET_ITEM(output->out, 1);
    PyObject *slots = PyTuple_GET_ITEM(output->out, 2);
    Py_ssize_t i = output->n_statics_used++;
    if (i >= PyTuple_GET_SIZE(slots)) return MALFORMED(NULL);
    Py_ssize_t slot = PyLong_AsSsize_t(PyTuple_GET_ITEM(slots, i));
    if (slot < 0) return Py_NewRef(PyTuple_GET_ITEM(statics, i));
    PyObject *fun_statics = output->walk->self->fun_statics;
    Py_ssize_t n_fun = PyTuple_GET_SIZE(fun_statics);
    if (slot < n_fun) return Py_NewRef(PyTuple_GET_ITEM(fun_statics, slot));
    if (slot - n_fun >= output->walk->n_statics) return MALFORMED(NULL);
    return Py_NewRef(output->walk->statics[slot - n_fun]);
}

/* Moves items, with their references, into a tuple or list that was created just now. `made` may be NULL. */
static PyObject *move_into(PyObject *made, PyObject **items, Py_ssize_t n) {
    if (made == NULL || n == 0) return made;
    memcpy((void *)PySequence_Fast_ITEMS(made), (void *)items, (size_t)n * sizeof(PyObject *));
    memset((void *)items, 0, (size_t)n * sizeof(PyObject *));
    return made;
}

static PyObject *make_sequence(State *Py_UNUSED(state), PyObject *cls, PyObject *aux, PyObject **items, Py_ssize_t n) {
    if (cls == (PyObject *)&PyList_Type) return move_into(PyList_New(n), items, n);
    if (aux == Py_None) return move_into(PyTuple_New(n), items, n);
    /* A named tuple whose class has a `__new__` of its own. */
    if (aux != Py_True) return PyObject_Vectorcall(cls, items, (size_t)n, NULL);
    /* A named tuple with the generated `__new__`, which does what `tuple.__new__` does. */
    PyTypeObject *type = (PyTypeObject *)cls;
    return move_into(type->tp_alloc(type, n), items, n);
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
    PyObject *made = PyBaseObject_Type.tp_new((PyTypeObject *)cls, state->empty, NULL);
    /* Not by Equinox's `__setattr__`, because a Module is frozen. Not by the `__dict__` either, because CPython creates
       no dict for fields that are set one by one until somebody reads `__dict__`. */
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

static PyObject *combine(Output *output, PyObject *spec);

/* Combines a node. Not inlined, because leaves are more frequent, and would pay for this function's frame. */
static NOINLINE PyObject *combine_node(Output *output, PyObject *spec) {
    static PyObject *(*const make_by_kind[])(State *, PyObject *, PyObject *, PyObject **, Py_ssize_t) = {
        make_sequence, make_dict, make_module, make_node};
    State *state = output->walk->state;
    Py_ssize_t n = PyTuple_GET_SIZE(spec) - HEAD;
    long kind = KIND(spec);
    PyObject *cls = PyTuple_GET_ITEM(spec, 1);
    PyObject *small[16];
    PyObject **children = allocate(small, 16, n);
    if (children == NULL) return NULL;
    PyObject *made = NULL;
    /* The metadata of a node comes before the static objects of its children, as in `split`. */
    PyObject *aux = kind == NODE ? next_static(output) : Py_NewRef(PyTuple_GET_ITEM(spec, 2));
    if (aux != NULL) {
        Py_ssize_t i = 0;
        while (i < n && (children[i] = combine(output, PyTuple_GET_ITEM(spec, HEAD + i))) != NULL) i++;
        if (i == n) made = make_by_kind[kind](state, cls, aux, children, n);
        Py_DECREF(aux);
    }
    release(children, small, n);
    return made;
}

/* Returns the part of the user's output that has this spec. */
static PyObject *combine(Output *output, PyObject *spec) {
    State *state = output->walk->state;
    if (spec == state->array_mark) {
        if (output->n_arrays_used >= output->n_arrays) return MALFORMED(NULL);
        return Py_NewRef(output->arrays[output->n_arrays_used++]);
    }
    if (spec == Py_None) Py_RETURN_NONE;
    if (Py_TYPE(spec) == state->static_type) return next_static(output);
    if (ENTER_LEVEL) return NULL;
    PyObject *made = combine_node(output, spec);
    Py_LeaveRecursiveCall();
    return made;
}

/* Returns the user's output. */
static PyObject *combine_output(Output *output) {
    PyObject *number = PyLong_FromLongLong(output->program->number);
    if (number == NULL) return NULL;
    /* Each value of `outs` is a pair of the Out and a weak reference to the program. */
    PyObject *found = PyDict_GetItemWithError(output->walk->fast->outs, number);
    Py_DECREF(number);
    if (found == NULL) return PyErr_Occurred() ? NULL : MALFORMED(NULL);
    output->out = Py_NewRef(PyTuple_GET_ITEM(found, 0));
    PyObject *made = combine(output, PyTuple_GET_ITEM(output->out, 0));
    Py_DECREF(output->out);
    return made;
}

/* Waits until the program of a call has run, if the program can raise, if `must_wait` says so, or if a transformation
   such as an eager `vmap` runs the program. Returns whether there is such a transformation, or -1. */
static int wait_if_needed(Output *output, int must_wait) {
    State *state = output->walk->state;
    Flags *program = output->program;
    int are_plain = output->n_arrays > 0;
    int is_transformed = 0;
    for (Py_ssize_t i = 0; i < output->n_arrays; i++) {
        PyTypeObject *type = Py_TYPE(output->arrays[i]);
        if ((PyObject *)type == state->array_type) continue;
        are_plain = 0;
        is_transformed = is_transformed || PyType_IsSubtype(type, state->tracer_type);
    }
    /* `finish_fast` reads an unread program, and then waits if need be. */
    must_wait = must_wait || (program->must_wait && !program->unread);
    if (!is_transformed && !must_wait) return 0;
    /* A program has run as soon as one of its outputs is ready. This doesn't hold for tracers, because a transformation
       may return some inputs unchanged. */
    PyObject *done = are_plain ? PyObject_CallMethodNoArgs(output->arrays[0], state->block_until_ready)
                               : PyObject_CallOneArg(state->wait_for, output->list);
    if (done == NULL) return -1;
    Py_DECREF(done);
    return is_transformed;
}

/* --- Fast: the fast path of an entry ------------------------------------------------------------- */

#define FAST_FIELDS(DO) DO(self->entry); DO(self->jitted); DO(self->args); DO(self->kwargs); DO(self->outs);
COLLECTED(Fast, fast, FAST_FIELDS)

/* Implements the call `Fast(entry, jitted, args, kwargs, outs, n_statics, n_arrays, n_fun)`. */
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

static PyMemberDef fast_members[] = {
    {"entry", T_OBJECT, offsetof(Fast, entry), READONLY, NULL},
    {"hits", T_LONGLONG, offsetof(Fast, hits), READONLY, NULL},
    {"hits_before", T_LONGLONG, offsetof(Fast, hits_before), 0, NULL},
    {NULL, 0, 0, 0, NULL}};

static PyType_Slot fast_slots[] = {
    {Py_tp_doc, "Fast(entry, jitted, args, kwargs, outs, n_statics, n_arrays, n_fun): the fast path of an entry."},
    {Py_tp_new, fast_new},
    COLLECTED_SLOTS(fast),
    {Py_tp_members, fast_members},
    {0, NULL}};

TYPE(Fast, fast, "Fast", Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE)

/* --- Matching a whole call ----------------------------------------------------------------------- */

/* Returns how many positional arguments the spec of a fast path has. */
static Py_ssize_t count_positional(Fast *fast) {
    return PyTuple_GET_SIZE(fast->args) - HEAD;
}

/* Returns how many arguments the spec of a fast path has, keyword arguments included. */
static Py_ssize_t count_all(Fast *fast) {
    return count_positional(fast) + PyTuple_GET_SIZE(fast->kwargs) - HEAD;
}

/* Returns the spec of the i-th argument, where keyword arguments follow positional ones. */
static PyObject *spec_of(Fast *fast, Py_ssize_t i) {
    Py_ssize_t n_positional = count_positional(fast);
    return i < n_positional ? PyTuple_GET_ITEM(fast->args, HEAD + i)
                            : PyTuple_GET_ITEM(fast->kwargs, HEAD + i - n_positional);
}

/* Returns the i-th argument in the order of the spec, borrowed from the call, or NULL if the call doesn't have it.
   `names` are the names of the parameters that take positional arguments, with None for each parameter that can't be
   passed by keyword. They are needed because a call may pass by keyword what is positional in the spec. */
static inline PyObject *argument(Fast *fast, PyObject *names, InFlight *call, Py_ssize_t i) {
    if (i < call->n_args) return call->args[i];
    Py_ssize_t n_positional = count_positional(fast);
    int is_positional = i < n_positional;
    PyObject *candidates = is_positional ? names : PyTuple_GET_ITEM(fast->kwargs, 2);
    Py_ssize_t place = is_positional ? i : i - n_positional;
    PyObject *name = place < PyTuple_GET_SIZE(candidates) ? PyTuple_GET_ITEM(candidates, place) : Py_None;
    if (!PyUnicode_CheckExact(name)) return NULL;
    PyObject *const *keywords = call->args + call->n_args;
    Py_ssize_t n_named = PyTuple_GET_SIZE(call->kwnames);
    for (Py_ssize_t k = 0; k < n_named; k++) {
        /* The search begins where the keyword is if the call passes keywords in the order of the spec. */
        Py_ssize_t at = i - call->n_args + k;
        if (at >= n_named) at -= n_named;
        if (PyTuple_GET_ITEM(call->kwnames, at) == name) return keywords[at];
    }
    /* Most names are the very objects in the spec, so the characters are compared only if none is. */
    Py_hash_t hash = PyObject_Hash(name);
    for (Py_ssize_t at = 0; at < n_named; at++) {
        PyObject *other = PyTuple_GET_ITEM(call->kwnames, at);
        if (!PyUnicode_CheckExact(other) || PyObject_Hash(other) != hash) continue;
        if (PyUnicode_Compare(other, name) == 0) return keywords[at];
    }
    return NULL;
}

/* Checks that the call has each argument of the spec, and matches the static arguments. These tell calls apart fastest,
   so they are compared before any tree is walked. */
static inline int match_static_arguments(Walk *walk, InFlight *call) {
    Py_ssize_t n = count_all(walk->fast);
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *value = argument(walk->fast, walk->self->names, call, i);
        PyObject *spec = spec_of(walk->fast, i);
        if (value == NULL) return 0;
        if (Py_TYPE(spec) != walk->state->static_type) continue;
        int is_same = same_leaf(walk, (Static *)spec, value);
        if (is_same <= 0) return is_same;
    }
    return 1;
}

/* Returns the i-th child of a value that has the class of a spec, as a new reference. Returns NULL if there is no such
   child, maybe with an error set. The children of a registered node aren't known either, because its flatten function
   takes about as long as the walk. */
static PyObject *child_of(PyObject *spec, PyObject *value, Py_ssize_t i) {
    if (KIND(spec) == SEQUENCE) {
        return i < PySequence_Fast_GET_SIZE(value) ? Py_NewRef(PySequence_Fast_GET_ITEM(value, i)) : NULL;
    }
    if (KIND(spec) == NODE) return NULL;
    PyObject *fields = KIND(spec) == MODULE ? PyObject_GenericGetDict(value, NULL) : Py_NewRef(value);
    if (fields == NULL) return NULL;
    PyObject *child = NULL;
    if (PyDict_Check(fields)) child = PyDict_GetItemWithError(fields, PyTuple_GET_ITEM(PyTuple_GET_ITEM(spec, 2), i));
    Py_XINCREF(child);
    Py_DECREF(fields);
    return child;
}

/* Compares one part of a call: the part in which the last call differed that this fast path rejected. Returns 0 if this
   call differs there, too. If it returns 1, the part may match or not, because its children aren't compared. If calls of
   several structures come in turn, they often differ in one part only. Most fast paths then reject a call here, without
   a walk through all that comes before that part. */
static int match_last_difference(Walk *walk, InFlight *call) {
    /* A copy, because the user's code may call the function, and so change it. */
    Way way = walk->fast->last_difference;
    if (way.n == 0 || way.n > N_STEPS) return 1;
    PyObject *spec = spec_of(walk->fast, way.steps[way.n - 1]);
    PyObject *value = Py_NewRef(argument(walk->fast, walk->self->names, call, way.steps[way.n - 1]));
    for (Py_ssize_t i = way.n - 2; i >= 0; i--) {
        int has_class = (PyObject *)Py_TYPE(value) == PyTuple_GET_ITEM(spec, 1);
        PyObject *child = has_class ? child_of(spec, value, way.steps[i]) : NULL;
        Py_DECREF(value);
        if (!has_class) return 0;
        if (child == NULL) return PyErr_Occurred() ? -1 : 1;
        value = child;
        spec = PyTuple_GET_ITEM(spec, HEAD + way.steps[i]);
    }
    int matches;
    if (spec == walk->state->array_mark) matches = is_array_leaf(walk, value);
    else if (spec == Py_None) matches = value == Py_None;
    else if (Py_TYPE(spec) == walk->state->static_type) matches = same_leaf(walk, (Static *)spec, value);
    else matches = (PyObject *)Py_TYPE(value) == PyTuple_GET_ITEM(spec, 1);
    Py_DECREF(value);
    return matches;
}

/* Takes the static arguments, and matches all other arguments. The wrapped function's own arrays follow those of the
   arguments. They go through `match_array`, too, because it notes whether any array has to be copied, like a NumPy
   array. */
static inline int match_trees(Walk *walk, InFlight *call) {
    Fast *fast = walk->fast;
    Py_ssize_t n = count_all(fast);
    int matches = 1;
    for (Py_ssize_t i = 0; matches > 0 && i < n; i++) {
        PyObject *value = argument(fast, walk->self->names, call, i);
        PyObject *spec = spec_of(fast, i);
        int is_static = Py_TYPE(spec) == walk->state->static_type;
        matches = is_static ? take_static(walk, value) : match(walk, spec, value);
        if (matches == 0) note_difference(walk, i);
    }
    for (Py_ssize_t i = 0; matches > 0 && i < fast->n_fun; i++) {
        matches = match_array(walk, PyTuple_GET_ITEM(walk->self->fun_arrays, i));
    }
    if (matches > 0 && walk->n_arrays != fast->n_arrays) return MALFORMED(-1);
    return matches;
}

/* Matches a whole call with the spec of a fast path. A call with as many arguments as the spec, and with the same
   names, fits the signature of the user's function, because the call that the spec comes from did. If the call matches,
   `walk` has its arrays and static objects, and the caller must release `walk->block`. */
static inline int match_call(Walk *walk, Dispatcher *self, Fast *fast, InFlight *call) {
    if (call->n_args > count_positional(fast) || count_arguments(call) != count_all(fast)) return 0;
    if (PyTuple_GET_SIZE(self->fun_arrays) != fast->n_fun) return 0;
    walk->state = self->state;
    walk->self = self;
    walk->fast = fast;
    int matches = match_static_arguments(walk, call);
    if (matches > 0) {
        matches = match_last_difference(walk, call);
        /* If a part before it differs, too, Equinox wouldn't run the user's `==`, so its error must not be raised. */
        if (matches < 0 && clear_error_if(walk->state->may_be_dropped) > 0) matches = 1;
    }
    if (matches <= 0) return matches;
    /* The place before the arrays is free, so that the jitted function may use it. */
    walk->n_block = 1 + fast->n_arrays + fast->n_statics;
    walk->block = allocate(walk->small, N_SLOTS, walk->n_block);
    if (walk->block == NULL) return -1;
    walk->arrays = walk->block + 1;
    walk->statics = walk->arrays + fast->n_arrays;
    walk->n_arrays = 0;
    walk->n_statics = 0;
    walk->has_others = 0;
    walk->difference.n = 0;
    matches = match_trees(walk, call);
    if (matches == 0) fast->last_difference = walk->difference;
    if (matches <= 0) release(walk->block, walk->small, walk->n_block);
    return matches;
}

/* --- A call that a fast path matches ------------------------------------------------------------- */

/* Replaces the arrays of a call by those that `passed` in _spec/arrays.py returns for them, such as copies of NumPy
   arrays. Returns whether the call must wait for its program, or -1. If the call may have to wait even so, sets `*n_used`
   to the number of arrays that are known to be used. */
static int pass_arrays(Walk *walk, Py_ssize_t *n_used) {
    Py_ssize_t n = walk->n_arrays;
    PyObject *used = PyObject_GetAttr(walk->fast->entry, walk->state->used);
    if (used == NULL) return -1;
    Py_ssize_t n_used_now = PySet_Size(used);
    PyObject *leaves = n_used_now < 0 ? NULL : PyList_New(n);
    if (leaves == NULL) {
        Py_DECREF(used);
        return -1;
    }
    for (Py_ssize_t i = 0; i < n; i++) PyList_SET_ITEM(leaves, i, Py_NewRef(walk->arrays[i]));
    PyObject *answer = PyObject_CallFunctionObjArgs(walk->state->passed, leaves, used, NULL);
    Py_DECREF(leaves);
    Py_DECREF(used);
    if (answer == NULL) return -1;
    PyObject *arrays = NULL;
    int must_wait;
    if (PyTuple_Check(answer) && PyTuple_GET_SIZE(answer) == 3) arrays = PyTuple_GET_ITEM(answer, 0);
    if (arrays == NULL || !PyList_CheckExact(arrays) || PyList_GET_SIZE(arrays) != n) {
        must_wait = MALFORMED(-1);
    }
    else {
        for (Py_ssize_t i = 0; i < n; i++) Py_XSETREF(walk->arrays[i], Py_NewRef(PyList_GET_ITEM(arrays, i)));
        must_wait = PyTuple_GET_ITEM(answer, 1) == Py_True;
        if (PyTuple_GET_ITEM(answer, 2) == Py_True) *n_used = n_used_now;
    }
    Py_DECREF(answer);
    return must_wait;
}

/* Returns whether the program of a call may use other arrays than those that were known to be used, or -1. */
static int may_use_more(Output *output, Py_ssize_t n_used) {
    PyObject *entry = output->walk->fast->entry;
    PyObject *answer = PyObject_CallMethod(entry, "may_use_more", "On", output->program, n_used);
    int may = answer == NULL ? -1 : answer == Py_True;
    Py_XDECREF(answer);
    return may;
}

/* Has the handler finish a call in which JAX traced, or whose program is unread. */
static PyObject *finish_in_python(State *state, InFlight *call, PyObject *returned) {
    PyObject *made = call_of(state, call);
    if (made == NULL) return NULL;
    return PyObject_CallMethodObjArgs(call->handler, state->finish_fast, returned, made, NULL);
}

/* Decides between two exceptions of a call, and sets the one to raise. The call itself raised `error`. The current
   exception was raised later, while the Call was created to hand `error` over. Steals the reference to `error`. */
static void choose_error(State *state, PyObject *error) {
    if (clear_error_if(state->may_be_dropped) > 0) {
        set_error(error);
        return;
    }
    /* A timeout, an interrupt or an exit must not be lost. Its context is the error of the call, as if it were raised
       in an `except` block. */
    PyObject *interrupt = take_error();
    PyObject *context = PyException_GetContext(interrupt);
    if (context == NULL) PyException_SetContext(interrupt, error);
    else Py_DECREF(error);
    Py_XDECREF(context);
    set_error(interrupt);
}

/* Has the handler raise the current exception, or a clearer one. */
static PyObject *hand_over_error(State *state, InFlight *call) {
    PyObject *error = take_error();
    PyObject *made = call_of(state, call);
    if (made == NULL) {
        choose_error(state, error);
        return NULL;
    }
    PyObject *result = PyObject_CallMethodObjArgs(call->handler, state->failed_fast, error, made, NULL);
    Py_DECREF(error);
    return result;
}

/* Makes a call that a fast path has matched. */
static PyObject *call_fast(Walk *walk, InFlight *call) {
    State *state = walk->state;
    Output output = {.walk = walk};
    PyObject *returned = NULL;
    int is_transformed = -1;
    Py_ssize_t n_used = -1;
    int must_wait = walk->has_others ? pass_arrays(walk, &n_used) : 0;
    if (must_wait >= 0) {
        /* The jitted function may use the place before the arrays. */
        size_t n_arrays_flag = (size_t)walk->n_arrays | PY_VECTORCALL_ARGUMENTS_OFFSET;
        returned = run_in_flight(walk->fast->jitted, walk->arrays, n_arrays_flag, call);
    }
    if (returned != NULL && read_returned(&output, returned) == 0) {
        if (n_used >= 0 && !must_wait) must_wait = may_use_more(&output, n_used);
        if (must_wait >= 0) is_transformed = wait_if_needed(&output, must_wait);
    }
    PyObject *result;
    if (is_transformed < 0) {
        result = hand_over_error(state, call);
    }
    else if (call->call != NULL || (output.program->unread && !is_transformed)) {
        /* JAX traced, which asked for the Call, or the program is unread. */
        result = finish_in_python(state, call, returned);
    }
    else {
        walk->fast->hits++;
        result = combine_output(&output);
    }
    Py_XDECREF(returned);
    Py_XDECREF(call->call);
    return result;
}

/* --- Dispatcher: the base class of wrappers ------------------------------------------------------ */

/* Moves a fast path from index i to the front of the list. */
static void move_to_front(PyObject *fasts, Py_ssize_t i, PyObject *fast) {
    /* The user's code, which a guard ran, may have changed the list. */
    if (i >= PyList_GET_SIZE(fasts) || PyList_GET_ITEM(fasts, i) != fast) return;
    for (; i > 0; i--) PyList_SET_ITEM(fasts, i, PyList_GET_ITEM(fasts, i - 1));
    PyList_SET_ITEM(fasts, 0, fast);
}

/* Looks for a fast path that matches a call. Returns 1 if there is one, 0 if there is none, and -1 if an error is set.
   If there is one, `walk` has the call's arrays and static objects, and the caller must call `release_walk`. */
static inline int find_fast(Walk *walk, Dispatcher *self, InFlight *call) {
    PyObject *fasts = self->fasts;
    int matches = 0;
    for (Py_ssize_t i = 0; matches == 0 && fasts != NULL && i < PyList_GET_SIZE(fasts); i++) {
        PyObject *fast = Py_NewRef(PyList_GET_ITEM(fasts, i));
        matches = match_call(walk, self, (Fast *)fast, call);
        if (matches > 0 && i > 0) move_to_front(fasts, i, fast);
        if (matches <= 0) Py_DECREF(fast);
    }
    return matches;
}

/* Drops the references of a walk for which `find_fast` has returned 1. */
static inline void release_walk(Walk *walk) {
    release(walk->block, walk->small, walk->n_block);
    Py_DECREF(walk->fast);
}

/* Makes a call by the first fast path that matches. Returns 0 if there is none. If it returns 1, `*result` is the
   result, or NULL if an error is set. */
static inline int call_first(Dispatcher *self, InFlight *call, PyObject **result) {
    Walk walk;
    int matches = find_fast(&walk, self, call);
    if (matches > 0) {
        call->entry = walk.fast->entry;
        *result = call_fast(&walk, call);
        release_walk(&walk);
        return 1;
    }
    *result = NULL;
    return matches < 0 && clear_error_if(self->state->is_for_slow_path) <= 0;
}

/* Implements the call of a wrapper. */
static PyObject *dispatch(PyObject *callable, PyObject *const *args, size_t n_args_flag, PyObject *kwnames) {
    Dispatcher *self = (Dispatcher *)callable;
    InFlight call = {
        .handler = self->handler, .args = args, .n_args = PyVectorcall_NARGS(n_args_flag), .kwnames = kwnames};
    PyObject *result;
    if (call_first(self, &call, &result)) return result;
    PyObject *otherwise = self->otherwise;
    if (otherwise == NULL) {
        /* `connect` hasn't been called yet, or the garbage collector has cleared the wrapper. */
        PyErr_SetString(PyExc_AttributeError, "__call__");
        return NULL;
    }
    /* The call may have `connect` replace `otherwise`, which drops the wrapper's reference. */
    Py_INCREF(otherwise);
    result = PyObject_Vectorcall(otherwise, args, n_args_flag, kwnames);
    Py_DECREF(otherwise);
    return result;
}

static PyObject *match_only(PyObject *module, PyObject *const *args, Py_ssize_t n_args, PyObject *kwnames) {
    State *state = PyModule_GetState(module);
    if (n_args < 1 || !PyObject_TypeCheck(args[0], state->dispatcher_type)) return MALFORMED(NULL);
    Dispatcher *self = (Dispatcher *)args[0];
    InFlight call = {.args = args + 1, .n_args = n_args - 1, .kwnames = kwnames};
    Walk walk;
    int matches = find_fast(&walk, self, &call);
    if (matches == 0) Py_RETURN_NONE;
    if (matches < 0) return NULL;
    PyObject *arrays = move_into(PyTuple_New(walk.n_arrays), walk.arrays, walk.n_arrays);
    PyObject *statics = move_into(PyTuple_New(walk.n_statics), walk.statics, walk.n_statics);
    PyObject *found = NULL;
    if (arrays != NULL && statics != NULL) found = PyTuple_Pack(3, walk.fast->entry, arrays, statics);
    Py_XDECREF(arrays);
    Py_XDECREF(statics);
    release_walk(&walk);
    return found;
}

#define DISPATCHER_FIELDS(DO)                                                                              \
    DO(self->otherwise); DO(self->handler); DO(self->fasts); DO(self->fun_arrays); DO(self->fun_statics);  \
    DO(self->names); DO(self->interceptor); DO(self->log);
COLLECTED(Dispatcher, dispatcher, DISPATCHER_FIELDS)

static PyObject *dispatcher_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs)) {
    Dispatcher *self = (Dispatcher *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    self->vectorcall = dispatch;
    self->state = state_of(type);
    /* With this flag, instances are called without a lookup of `__call__`. A subclass doesn't inherit it before Python
       3.12. */
    if (type->tp_call == PyVectorcall_Call) type->tp_flags |= Py_TPFLAGS_HAVE_VECTORCALL;
    return (PyObject *)self;
}

static PyObject *connect(PyObject *module, PyObject *args) {
    State *state = PyModule_GetState(module);
    PyObject *wrapper, *otherwise;
    PyObject *handler = NULL, *fun_arrays = NULL, *fun_statics = NULL, *names = NULL, *fasts = NULL;
    if (!PyArg_ParseTuple(args, "O!O|OO!O!O!O!:connect", state->dispatcher_type, &wrapper, &otherwise,
                          &handler, &PyTuple_Type, &fun_arrays, &PyTuple_Type, &fun_statics,
                          &PyTuple_Type, &names, &PyList_Type, &fasts)) {
        return NULL;
    }
    Dispatcher *self = (Dispatcher *)wrapper;
    Py_XSETREF(self->otherwise, Py_NewRef(otherwise));
    /* These are set once and stay, because a call in another thread may be using them. The list of fast paths comes
       last: a call uses the rest only if there is a list. */
    if (self->handler == NULL) self->handler = Py_XNewRef(handler);
    if (self->fun_arrays == NULL) self->fun_arrays = Py_XNewRef(fun_arrays);
    if (self->fun_statics == NULL) self->fun_statics = Py_XNewRef(fun_statics);
    if (self->names == NULL) self->names = Py_XNewRef(names);
    if (self->fasts == NULL) self->fasts = Py_XNewRef(fasts);
    Py_RETURN_NONE;
}

/* Returns whether a call runs now, rather than under a transformation such as `grad`, or -1 if an error is set. */
static int runs_alone(State *state) {
    if (!PyType_Check(state->eval_trace)) return 0;
    PyObject *trace = PyObject_GetAttr(state->trace_ctx, state->trace);
    if (trace == NULL) return -1;
    int is_eval = PyObject_TypeCheck(trace, (PyTypeObject *)state->eval_trace);
    Py_DECREF(trace);
    return is_eval;
}

/* Returns the function that an interceptor stands for if its next call needs only to be logged, or else NULL, maybe
   with an error set. `tried` is explained in _reports/swap.py, and `n_due` in _reports/tried.py. */
static PyObject *function_to_log(State *state, PyObject *interceptor) {
    PyObject *tried = PyObject_GetAttr(interceptor, state->tried);
    if (tried == NULL || tried == Py_None) {
        Py_XDECREF(tried);
        return NULL;
    }
    PyObject *n_due = PyObject_GetAttr(tried, state->n_due);
    int is_due = n_due == NULL || PyLong_AsLong(n_due) > 0;
    Py_XDECREF(n_due);
    if (is_due) Py_CLEAR(tried);
    return tried;
}

/* Sets `*time` to the time of a log. Returns 0, or -1 if an error is set. */
static int read_clock(Log *log, double *time) {
    PyObject *now = PyObject_CallNoArgs(log->clock);
    *time = now == NULL ? -1.0 : PyFloat_AsDouble(now);
    Py_XDECREF(now);
    if (*time == -1.0 && PyErr_Occurred()) return -1;
    *time -= log->offset;
    return 0;
}

/* Adds the latest call to a log, now that it has ended. Returns 0, or -1 if an error is set. */
static int log_call(Log *log) {
    double ended;
    if (read_clock(log, &ended) < 0) return -1;
    Py_ssize_t n = count_calls(log);
    if (n < 0) return 0;
    Times times = {log->begun, ended};
    memcpy(PyByteArray_AS_STRING(log->times) + n * (Py_ssize_t)sizeof(Times), times, sizeof(Times));
    return PyList_Append(log->called, log->latest);
}

/* Has an interceptor account for a call that has failed, or in which JAX has compiled. Returns the result of the call,
   or NULL if an error is set. Steals the reference to `result`, which is NULL if the call has set an error. */
static PyObject *account(PyObject *interceptor, State *state, InFlight *call, PyObject *result) {
    PyObject *error = result == NULL ? take_error() : NULL;
    PyObject *first[] = {interceptor, result == NULL ? Py_None : result, error == NULL ? Py_None : error};
    PyObject *answer = call_method(state->account, first, 3, call);
    if (answer == NULL) {
        Py_CLEAR(result);
        if (error != NULL) choose_error(state, error);
    }
    else if (error != NULL) set_error(error);
    Py_XDECREF(answer);
    return result;
}

/* Makes and logs a call in place of the interceptor. Returns 0 if it needs the interceptor, or has no fast path. If it
   returns 1, `*result` is the result, or NULL if an error is set. */
static int call_logged(Dispatcher *self, Log *log, PyObject *interceptor, InFlight *call, PyObject **result) {
    if (log->is_inside || log->thread != PyThread_get_thread_ident()) return 0;
    if (log->mode != self->state->ours) return 0;
    if (count_calls(log) < 0) return 0;
    *result = NULL;
    double begun;
    if (read_clock(log, &begun) < 0) return 1;
    if (begun + log->offset >= log->logs_until) return 0;
    PyObject *function = function_to_log(self->state, interceptor);
    if (function == NULL) return PyErr_Occurred() != NULL;
    /* From here on, ticks of the trial's timer count for the call. A tick may come in `runs_alone`, which runs JAX's
       code. */
    log->is_inside = 1;
    int is_made = runs_alone(self->state);
    if (is_made > 0) {
        Py_XSETREF(log->latest, function);
        log->begun = begun;
        is_made = call_first(self, call, result);
    }
    else {
        Py_DECREF(function);
        is_made = is_made < 0;
    }
    /* If a tick is due, it comes now, while the log tells that there is a call. */
    if (*result != NULL && PyErr_CheckSignals() < 0) Py_CLEAR(*result);
    if (*result != NULL && log_call(log) < 0) Py_CLEAR(*result);
    if (is_made && (*result == NULL || log->has_compiled)) *result = account(interceptor, self->state, call, *result);
    log->is_inside = 0;
    log->has_compiled = 0;
    return is_made;
}

static PyObject *call_interceptor(PyObject *callable, PyObject *const *args, size_t n_args_flag, PyObject *kwnames) {
    Dispatcher *self = (Dispatcher *)callable;
    /* The garbage collector has cleared the wrapper. `dispatch` then raises an error. */
    if (self->interceptor == NULL) return dispatch(callable, args, n_args_flag, kwnames);
    InFlight call = {
        .handler = self->handler, .args = args, .n_args = PyVectorcall_NARGS(n_args_flag), .kwnames = kwnames};
    PyObject *result;
    /* Code that runs in this call may end the interception, which drops the wrapper's references. */
    PyObject *interceptor = Py_NewRef(self->interceptor);
    PyObject *log = Py_XNewRef(self->log);
    if (log == NULL || !call_logged(self, (Log *)log, interceptor, &call, &result)) {
        result = PyObject_Vectorcall(interceptor, args, n_args_flag, kwnames);
    }
    Py_XDECREF(log);
    Py_DECREF(interceptor);
    return result;
}

static PyObject *intercept(PyObject *module, PyObject *args) {
    State *state = PyModule_GetState(module);
    PyObject *wrapper, *interceptor = NULL, *log = NULL;
    if (!PyArg_ParseTuple(args, "O!|OO!:intercept", state->dispatcher_type, &wrapper, &interceptor, state->log_type,
                          &log)) {
        return NULL;
    }
    Dispatcher *self = (Dispatcher *)wrapper;
    /* Wrappers without an interceptor have a different `vectorcall`, so their calls needn't check for one. */
    self->vectorcall = interceptor == NULL ? dispatch : call_interceptor;
    Py_XSETREF(self->interceptor, Py_XNewRef(interceptor));
    Py_XSETREF(self->log, Py_XNewRef(log));
    Py_RETURN_NONE;
}

static PyMemberDef dispatcher_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Dispatcher, vectorcall), READONLY, NULL},
    {NULL, 0, 0, 0, NULL}};

static PyType_Slot dispatcher_slots[] = {
    {Py_tp_doc, "The base class of wrappers. A call tries fast paths, which `connect` sets."},
    {Py_tp_new, dispatcher_new},
    {Py_tp_call, PyVectorcall_Call},
    COLLECTED_SLOTS(dispatcher),
    {Py_tp_members, dispatcher_members},
    {0, NULL}};

/* Tools such as beartype report a wrong call of a wrapper by the name of the type that defines `__call__`. */
TYPE(Dispatcher, dispatcher, "JitFunction",
     Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_BASETYPE)

/* --- Small NumPy arrays -------------------------------------------------------------------------- */

/* JAX reads memory that is aligned by this many bytes in place; see _spec/arrays.py. */
#define ALIGNMENT 64

/* The possible answers of `choose`. */
enum { FAILED = -1, LEFT_TO_PYTHON, PASSED_AS_IT_IS, COPIED };

/* Returns whether arrays of this dtype have the byte order of the machine. `*native_dtype` remembers the last dtype for
   which they have, and is NULL at first. */
static int is_native(State *state, PyObject *dtype, PyObject **native_dtype) {
    if (dtype == *native_dtype) return 1;
    PyObject *flag = PyObject_GetAttr(dtype, state->isnative);
    int answer = flag == NULL ? -1 : PyObject_IsTrue(flag);
    Py_XDECREF(flag);
    if (answer > 0) Py_XSETREF(*native_dtype, Py_NewRef(dtype));
    return answer;
}

/* Decides whether `copy_small` copies a NumPy array, passes it as it is, or leaves it to Python. Arrays of n_bytes or
   more are left to Python, and so are those to copy that have more than `*n_bytes_left` bytes. */
static int choose(State *state, PyObject *array, Py_ssize_t n_bytes, Py_ssize_t *n_bytes_left,
                  PyObject **native_dtype) {
    PyObject *dtype = PyObject_GetAttr(array, state->dtype);
    if (dtype == NULL) return FAILED;
    int answer = is_native(state, dtype, native_dtype);
    Py_DECREF(dtype);
    if (answer <= 0) return answer < 0 ? FAILED : LEFT_TO_PYTHON;
    Py_buffer buffer;
    if (PyObject_GetBuffer(array, &buffer, PyBUF_STRIDES) < 0) {
        /* NumPy offers no buffer for some dtypes, such as dates. */
        PyErr_Clear();
        return LEFT_TO_PYTHON;
    }
    Py_ssize_t n = buffer.len;
    int is_aligned = (uintptr_t)buffer.buf % ALIGNMENT == 0;
    PyBuffer_Release(&buffer);
    if (n >= n_bytes) return LEFT_TO_PYTHON;
    /* JAX itself copies a small array that isn't aligned, before the call of the jitted function returns. */
    if (!is_aligned) return PASSED_AS_IT_IS;
    if (n > *n_bytes_left) return LEFT_TO_PYTHON;
    *n_bytes_left -= n;
    return COPIED;
}

static PyObject *copy_small(PyObject *module, PyObject *args) {
    State *state = PyModule_GetState(module);
    PyObject *leaves, *native_dtype = NULL;
    Py_ssize_t n_bytes, n_bytes_left;
    if (!PyArg_ParseTuple(args, "O!nn:copy_small", &PyList_Type, &leaves, &n_bytes, &n_bytes_left)) return NULL;
    PyObject *left = PyList_New(0);
    for (Py_ssize_t i = 0; left != NULL && i < PyList_GET_SIZE(leaves); i++) {
        PyObject *leaf = PyList_GET_ITEM(leaves, i);
        PyObject *type = (PyObject *)Py_TYPE(leaf);
        if (type == state->array_type) continue;
        int choice;
        if (type == state->numpy_type) {
            choice = choose(state, leaf, n_bytes, &n_bytes_left, &native_dtype);
        }
        else {
            int is_scalar = PySet_Contains(state->array_classes, type);
            if (is_scalar < 0) choice = FAILED;
            else choice = is_scalar ? PASSED_AS_IT_IS : LEFT_TO_PYTHON;
        }
        if (choice == PASSED_AS_IT_IS) continue;
        int failed = 1;
        if (choice == LEFT_TO_PYTHON) {
            PyObject *index = PyLong_FromSsize_t(i);
            failed = index == NULL || PyList_Append(left, index) < 0;
            Py_XDECREF(index);
        }
        if (choice == COPIED) {
            PyObject *copy = PyObject_CallMethodNoArgs(leaf, state->copy);
            failed = copy == NULL || PyList_SetItem(leaves, i, copy) < 0;
        }
        if (failed) Py_CLEAR(left);
    }
    Py_XDECREF(native_dtype);
    return left;
}

/* --- The module ---------------------------------------------------------------------------------- */

static PyObject *setup(PyObject *module, PyObject *args) {
    State *state = PyModule_GetState(module);
    State new = *state;
    State old = *state;
    if (!PyArg_ParseTuple(args, "OOO!OOOOOOOOOOOOOO:setup", &new.array_mark, &new.array_type, &PyType_Type,
                          &new.tracer_type, &new.numpy_type, &new.array_classes, &new.is_array, &new.passed,
                          &new.flatten, &new.registered, &new.same, &new.unflatten, &new.wait_for,
                          &new.opaque_type, &new.is_for_slow_path, &new.may_be_dropped, &new.trace_ctx,
                          &new.eval_trace)) {
        return NULL;
    }
#define TAKE(name) Py_INCREF(new.name);
    FROM_PYTHON(TAKE)
    *state = new;
    /* The old fields aren't NULL if eqxjit was imported before, and this is a second import of it. */
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
    PyType_Spec *specs[] = {&static_spec, &flags_spec, &log_spec, &fast_spec, &dispatcher_spec};
    PyTypeObject **types[] = {&state->static_type, &state->flags_type, &state->log_type, &state->fast_type,
                              &state->dispatcher_type};
    for (int i = 0; i < 5; i++) {
        *types[i] = (PyTypeObject *)PyType_FromModuleAndSpec(module, specs[i], NULL);
        if (*types[i] == NULL || PyModule_AddType(module, *types[i]) < 0) return -1;
    }
    state->static_type->tp_vectorcall = static_vectorcall;
#define INTERN(name)                                                                                       \
    state->name = PyUnicode_InternFromString(#name);                                                       \
    if (state->name == NULL) return -1;
    NAMES(INTERN)
    state->empty = PyTuple_New(0);
    if (state->empty == NULL) return -1;
    return PyModule_AddIntMacro(module, INTERFACE);
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
    {0, NULL}};

static PyMethodDef module_methods[] = {
    {"setup", setup, METH_VARARGS,
     "setup(...): sets the Python objects that this module calls, or compares with."},
    {"call_in_flight", (PyCFunction)(void (*)(void))call_in_flight, METH_FASTCALL,
     "call_in_flight(call, jitted, *arrays): returns `jitted(*arrays)`; meanwhile `call` is this thread's innermost "
     "call in flight. `jitted` is a jitted function, or a method of one, such as `lower`."},
    {"in_flight", (PyCFunction)(void (*)(void))in_flight, METH_FASTCALL,
     "in_flight(entry=None): returns this thread's innermost call in flight, or None. With an entry, calls of other "
     "entries are skipped."},
    {"copy_small", copy_small, METH_VARARGS,
     "copy_small(leaves, n_bytes, n_bytes_left): replaces each NumPy array in a list by a copy, if the array has fewer "
     "than n_bytes bytes and JAX would read its memory in place, up to n_bytes_left bytes in all. Returns the indices "
     "of the leaves that are left to Python, such as large NumPy arrays, and arrays of other libraries."},
    {"connect", connect, METH_VARARGS,
     "connect(wrapper, otherwise, handler, fun_arrays, fun_statics, names, fasts): has calls of a wrapper try the fast "
     "paths, if there are any, and then call `otherwise`."},
    {"match", (PyCFunction)(void (*)(void))match_only, METH_FASTCALL | METH_KEYWORDS,
     "match(wrapper, *args, **kwargs): returns the entry of the fast path that would serve this call, and the tuples of "
     "the call's arrays and static objects; None if there is no such fast path."},
    {"intercept", intercept, METH_VARARGS,
     "intercept(wrapper[, interceptor[, log]]): has calls of a wrapper call the interceptor instead. With a log, calls "
     "that need only be logged are made and logged here. Without an interceptor, calls are as usual again."},
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
