/* The native back end: carries out call plans (see _plan/native.py, which encodes them).

Match walks the arguments of a call by the input half of a plan and returns the flat arrays, or None.
Rebuild makes the output from the arrays that JAX returned, by the other half. Call does both, with the
jitted function's call in between (see _runtime/frameless.py). Held tells whether a static container
holds what it held (see _trees/snapshot.py, which makes it). Delegate is the wrapper's base (see
_api/wrapper.py).

Invariants:
- Public CPython API only. The GIL is held throughout; a free-threaded Python doesn't build this.
- A program is immutable, but for what it counts, and owns the objects to which its nodes point.
- Whatever is walked into is held by a strong reference: predicates, copies of NumPy arrays and
  registered flattens run Python code, which may change or free any container of the user's.
- A tuple or list of ours is hidden from the garbage collector, where anybody finds it, until it is full.
- Sizes and items are read anew after each child. Of a call nothing is remembered but the node at
  which arguments failed, which is then looked at first.
- An address is compared, never followed, but for what the container holds at that moment.
- An Exception in Match means "no match", as in generated guards; anything else propagates.
*/

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <structmember.h>

#ifdef Py_GIL_DISABLED
#error "The native back end relies on the GIL."
#endif

/* Raised with what Python is to rely on, here and in _compat.py: in a checkout that was brought up to
   date, what was built before may still be there. */
#define INTERFACE 11

/* In the order of _plan/native.py. */
typedef enum {
    /* Inputs: of a value. */
    ARRAY,           /* first: the class of arrays, second: whether another object is an array */
    IS,              /* first: the very object */
    SAME,            /* first: a constant */
    IS_OR,           /* first: the very object, second: a predicate of others of its class */
    HELD_OR,         /* first: the class, second: a Held, third: a predicate, asked if it says no */
    TYPE_AND,        /* first: the class, second: a predicate */
    PREDICATE,       /* first: a predicate */
    BOTH,            /* two nodes on the same value */
    SEQUENCE,        /* first: the class; n: the length */
    DICT,            /* first: the class, second: the keys, third: their class */
    DICT_BY,         /* first: the class, second: the keys, third: a predicate of the dict */
    FIELDS,          /* first: the class, second: the names of the fields */
    REGISTERED,      /* first: the class, second: returns a tuple of n children, or None */
    /* Inputs: of n items of a sequence. */
    ARRAY_RUN,       /* first, second: as of ARRAY */
    SAME_RUN,        /* first: a tuple of what each is as of SAME */
    REPEAT,          /* one node on each */
    /* Outputs. */
    TAKE,            /* the next array */
    CONSTANT,        /* first: the object */
    KEPT,            /* n: the index of an object that came in */
    MAKE_LIST,       /* n: the length */
    MAKE_TUPLE,      /* n: the length */
    MAKE_NAMED_TUPLE,/* n: the length; first: the class, whose tuple is made without calling it */
    MAKE_DICT,       /* first: the keys */
    MAKE_MODULE,     /* first: the class, second: the names of the fields */
    UNFLATTEN,       /* first: what to call with a list of n items */
    /* Outputs: n items of a sequence. */
    TAKE_RUN,
    CONSTANT_RUN,    /* first: a tuple of them */
    MAKE_RUN,        /* one node for each */
    N_OPS,
} Op;

typedef struct {
    Op op;
    int keeps;        /* whether Match keeps the value for Rebuild */
    Py_ssize_t n;
    Py_ssize_t end;   /* the index behind the last node below */
    PyObject *first;
    PyObject *second;
    PyObject *third;
} Node;

/* --- Tuples and lists that are being filled -------------------------------------------------- */

static PyObject *
hidden(PyObject *items)
{
    /* The empty tuple is everybody's. */
    if (items != NULL && PyObject_GC_IsTracked(items)) {
        PyObject_GC_UnTrack(items);
    }
    return items;
}

static void
show(PyObject *items)
{
    if (!PyTuple_CheckExact(items) || PyTuple_GET_SIZE(items) != 0) {
        PyObject_GC_Track(items);
    }
}

/* --- What the types share -------------------------------------------------------------------- */

typedef struct {
    PyTypeObject *program_type;
    PyTypeObject *match_type;
    PyTypeObject *rebuild_type;
    PyTypeObject *delegate_type;
} State;

static PyTypeObject *
program_type_of(PyTypeObject *type)
{
    State *state = PyType_GetModuleState(type);
    return state == NULL ? NULL : state->program_type;
}

static int
has_keywords(PyTypeObject *type, PyObject *kwargs)
{
    if (kwargs == NULL || PyDict_GET_SIZE(kwargs) == 0) {
        return 0;
    }
    PyErr_Format(PyExc_TypeError, "%s takes no keyword arguments", type->tp_name);
    return 1;
}

/* The head of what is called. */
typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
} Callable;

static PyMemberDef callable_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Callable, vectorcall), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static void
dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    type->tp_clear(self);
    type->tp_free(self);
    Py_DECREF(type);
}

/* --- Constants ------------------------------------------------------------------------------- */

/* As of _trees/constants.py, whose functions are the plain twins of these. */

/* Of what is planned and compared; as of _trees/structure.py and _trees/constants.py. */
#define MAX_DEPTH 200

static int
are_floats_same(double one, double other)
{
    if (one == other) {
        return one != 0.0 || signbit(one) == signbit(other);
    }
    return one != one && other != other;
}

/* Whether a constant equals none of another type. */
static int
is_told_by_equality(PyObject *value)
{
    return PyUnicode_CheckExact(value) || PyLong_CheckExact(value) || PyBytes_CheckExact(value) ||
           value == Py_None;
}

/* Whether that is so of all elements of a frozenset; -1 with an exception. */
static int
are_elements_told(PyObject *set)
{
    PyObject *iterator = PyObject_GetIter(set), *element;
    if (iterator == NULL) {
        return -1;
    }
    int told = 1;
    while (told && (element = PyIter_Next(iterator)) != NULL) {
        told = is_told_by_equality(element);
        Py_DECREF(element);
    }
    Py_DECREF(iterator);
    return PyErr_Occurred() ? -1 : told;
}

static int
are_sets_same(PyObject *one, PyObject *other)
{
    if (PySet_GET_SIZE(one) != PySet_GET_SIZE(other)) {
        return 0;
    }
    int told = are_elements_told(one);
    if (told > 0) {
        told = are_elements_told(other);
    }
    return told > 0 ? PyObject_RichCompareBool(one, other, Py_EQ) : told;
}

/* Whether a value is the expected one, or a constant and the same; -1 with an exception. A no is no
   answer for what isn't a constant. Runs no Python. */
static int
is_same_constant(PyObject *value, PyObject *expected, int depth)
{
    if (value == expected) {
        return 1;
    }
    if (Py_TYPE(value) != Py_TYPE(expected) || depth > MAX_DEPTH) {
        return 0;
    }
    if (PyUnicode_CheckExact(value)) {
        return PyUnicode_Compare(value, expected) == 0;
    }
    if (is_told_by_equality(value)) {
        return PyObject_RichCompareBool(value, expected, Py_EQ);
    }
    if (PyFloat_CheckExact(value)) {
        return are_floats_same(PyFloat_AS_DOUBLE(value), PyFloat_AS_DOUBLE(expected));
    }
    if (PyTuple_CheckExact(value)) {
        Py_ssize_t n = PyTuple_GET_SIZE(value);
        int same = n == PyTuple_GET_SIZE(expected);
        for (Py_ssize_t i = 0; same > 0 && i < n; i++) {
            same = is_same_constant(PyTuple_GET_ITEM(value, i), PyTuple_GET_ITEM(expected, i),
                                    depth + 1);
        }
        return same;
    }
    if (PyComplex_CheckExact(value)) {
        return are_floats_same(PyComplex_RealAsDouble(value), PyComplex_RealAsDouble(expected)) &&
               are_floats_same(PyComplex_ImagAsDouble(value), PyComplex_ImagAsDouble(expected));
    }
    return PyFrozenSet_CheckExact(value) ? are_sets_same(value, expected) : 0;
}

/* Whether a value is a constant that its hash tells: NaN has many. -1 with an exception. */
static int
is_hashed_constant(PyObject *value, int depth)
{
    if (is_told_by_equality(value) || PyBool_Check(value)) {
        return 1;
    }
    if (PyFloat_CheckExact(value)) {
        double number = PyFloat_AS_DOUBLE(value);
        return number == number;
    }
    if (PyTuple_CheckExact(value)) {
        int all = depth + 1 < MAX_DEPTH;
        for (Py_ssize_t i = 0; all > 0 && i < PyTuple_GET_SIZE(value); i++) {
            all = is_hashed_constant(PyTuple_GET_ITEM(value, i), depth + 1);
        }
        return all;
    }
    if (PyComplex_CheckExact(value)) {
        double real = PyComplex_RealAsDouble(value), imaginary = PyComplex_ImagAsDouble(value);
        return real == real && imaginary == imaginary;
    }
    return PyFrozenSet_CheckExact(value) && depth + 1 < MAX_DEPTH ? are_elements_told(value) : 0;
}

static PyObject *
is_same(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t n_args)
{
    if (n_args != 2) {
        PyErr_SetString(PyExc_TypeError, "is_same takes two objects");
        return NULL;
    }
    int same = is_same_constant(args[0], args[1], 0);
    return same < 0 ? NULL : PyBool_FromLong(same);
}

/* Whether a constant has more parts than are left, itself included, and so many fewer are then. */
static int
is_larger(PyObject *value, Py_ssize_t *left, int depth)
{
    if (--*left < 0 || depth > MAX_DEPTH) {
        return 1;
    }
    int larger = 0;
    if (PyTuple_CheckExact(value)) {
        for (Py_ssize_t i = 0; !larger && i < PyTuple_GET_SIZE(value); i++) {
            larger = is_larger(PyTuple_GET_ITEM(value, i), left, depth + 1);
        }
    }
    else if (PyFrozenSet_CheckExact(value)) {
        *left -= PySet_GET_SIZE(value);
        larger = *left < 0;
    }
    return larger;
}

static PyObject *
has_more_parts(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *value;
    Py_ssize_t n;
    if (!PyArg_ParseTuple(args, "On:has_more_parts", &value, &n)) {
        return NULL;
    }
    return PyBool_FromLong(is_larger(value, &n, 0));
}

static PyObject *
is_constant(PyObject *Py_UNUSED(module), PyObject *value)
{
    int constant = is_hashed_constant(value, 0);
    return constant < 0 ? NULL : PyBool_FromLong(constant);
}

/* --- Programs -------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    Py_ssize_t n_nodes;
    Node *nodes;
    Py_ssize_t failed_at;     /* the node at which arguments failed, if any did lately; or -1, ... */
    int n_matched;            /* ... and how often some have matched since */
    Py_ssize_t n_failed;      /* how often arguments failed, ... */
    Py_ssize_t n_failed_late; /* ... and how often that was told after asking Python */
} Program;

static int
is_program_sound(const Node *nodes, Py_ssize_t n_nodes)
{
    for (Py_ssize_t i = 0; i < n_nodes; i++) {
        const Node *node = &nodes[i];
        if ((int)node->op < 0 || node->op >= N_OPS || node->end <= i || node->end > n_nodes ||
            node->n < 0) {
            return 0;
        }
        if (node->op == SAME_RUN &&
            (!PyTuple_Check(node->first) || PyTuple_GET_SIZE(node->first) != node->n)) {
            return 0;
        }
    }
    return 1;
}

static void
free_nodes(Node *nodes, Py_ssize_t n_nodes)
{
    for (Py_ssize_t i = 0; i < n_nodes; i++) {
        Py_XDECREF(nodes[i].first);
        Py_XDECREF(nodes[i].second);
        Py_XDECREF(nodes[i].third);
    }
    PyMem_Free(nodes);
}

/* Read the instruction of node `i` of n: 0, or -1 with an exception. */
static int
read_instruction(Node *node, PyObject *instruction, Py_ssize_t i, Py_ssize_t n)
{
    if (!PyTuple_CheckExact(instruction) || PyTuple_GET_SIZE(instruction) != 7) {
        PyErr_SetString(PyExc_TypeError, "an instruction must be a tuple of seven");
        return -1;
    }
    Py_ssize_t op = PyLong_AsSsize_t(PyTuple_GET_ITEM(instruction, 0));
    Py_ssize_t size = PyLong_AsSsize_t(PyTuple_GET_ITEM(instruction, 3));
    node->keeps = PyTuple_GET_ITEM(instruction, 1) == Py_True;
    node->n = PyLong_AsSsize_t(PyTuple_GET_ITEM(instruction, 2));
    if (PyErr_Occurred()) {
        return -1;
    }
    node->op = op >= 0 && op < N_OPS ? (Op)op : N_OPS;
    /* The size is that of all that is below it, and itself. */
    node->end = size > 0 && size <= n ? i + size : -1;
    node->first = Py_NewRef(PyTuple_GET_ITEM(instruction, 4));
    node->second = Py_NewRef(PyTuple_GET_ITEM(instruction, 5));
    node->third = Py_NewRef(PyTuple_GET_ITEM(instruction, 6));
    return 0;
}

static PyObject *
program_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *instructions;
    if (has_keywords(type, kwargs) ||
        !PyArg_ParseTuple(args, "O!:Program", &PyTuple_Type, &instructions)) {
        return NULL;
    }
    Py_ssize_t n_nodes = PyTuple_GET_SIZE(instructions);
    Node *nodes = PyMem_Calloc(n_nodes ? (size_t)n_nodes : 1, sizeof(Node));
    if (nodes == NULL) {
        return PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; i < n_nodes; i++) {
        if (read_instruction(&nodes[i], PyTuple_GET_ITEM(instructions, i), i, n_nodes) < 0) {
            goto error;
        }
    }
    if (!is_program_sound(nodes, n_nodes)) {
        PyErr_SetString(PyExc_ValueError, "an instruction is out of bounds");
        goto error;
    }
    Program *self = (Program *)type->tp_alloc(type, 0);
    if (self == NULL) {
        goto error;
    }
    self->n_nodes = n_nodes;
    self->nodes = nodes;
    self->failed_at = -1;
    return (PyObject *)self;

error:
    free_nodes(nodes, n_nodes);
    return NULL;
}

static int
program_traverse(Program *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    for (Py_ssize_t i = 0; i < self->n_nodes; i++) {
        Py_VISIT(self->nodes[i].first);
        Py_VISIT(self->nodes[i].second);
        Py_VISIT(self->nodes[i].third);
    }
    return 0;
}

static int
program_clear(Program *self)
{
    /* A call that is still to come finds no nodes. */
    Node *nodes = self->nodes;
    Py_ssize_t n_nodes = self->n_nodes;
    self->n_nodes = 0;
    self->nodes = NULL;
    free_nodes(nodes, n_nodes);
    return 0;
}

static PyMemberDef program_members[] = {
    {"n_failed", T_PYSSIZET, offsetof(Program, n_failed), READONLY,
     "How often arguments didn't match."},
    {"n_failed_late", T_PYSSIZET, offsetof(Program, n_failed_late), READONLY,
     "How often that was told after asking Python."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot program_slots[] = {
    {Py_tp_doc, "Program(instructions): one half of a call plan."},
    {Py_tp_new, program_new},
    {Py_tp_members, program_members},
    {Py_tp_dealloc, dealloc},
    {Py_tp_traverse, program_traverse},
    {Py_tp_clear, program_clear},
    {0, NULL},
};

static PyType_Spec program_spec = {
    .name = "eqxjit._native.Program",
    .basicsize = sizeof(Program),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = program_slots,
};

/* --- Planning -------------------------------------------------------------------------------- */

/* Writes the instructions of one half of a plan straight from a treedef, as _plan/native.py would by way
   of plans. What is rare it asks Python for (see _plan/native_planner.py). Instructions tell their size,
   not their place, so that some can be shared. */

/* How the nodes of a class are planned; in the order of _plan/native_planner.py. */
typedef enum {
    NONE_SHAPE,
    SEQUENCE_SHAPE,
    DICT_SHAPE,
    MODULE_SHAPE,
    OTHER_SHAPE,
} Shape;

/* From so many equal items on, they are one instruction; as of _trees/structure.py. */
#define SHORTEST_RUN 4

typedef struct {
    PyObject *kinds, *arities, *metadata, *classes; /* columns of a treedef, in post-order */
    PyObject *leaves;       /* a tuple */
    PyObject *leaf_kind;    /* the kind of rows that are leaves */
    PyObject *kind_classes; /* a dict: the classes of the kinds that tell them */
    PyObject *dynamic;      /* what stands for an array among the leaves */
    PyObject *missing;      /* what stands for a field that isn't set */
    PyObject *array;        /* first, second: as of ARRAY; NULL for an output */
    PyObject *is_array;
    PyObject *shape_of;     /* (class) -> (shape, names, n) */
    PyObject *head_of;      /* (class, metadata, arity) -> (op, n, first, second, third) */
    PyObject *static_of;    /* (value, is it a leaf) -> a tuple of instructions */
    PyObject *shapes;       /* a dict: what has been asked for, by class */
    PyObject *asked[4];     /* dicts: of static values by address, first those that aren't leaves; then
                               the same of those that compare by identity, by that of their class */
    PyObject *instructions; /* a list */
    Py_ssize_t *first_child, *next_sibling; /* of rows; or -1 */
    Py_ssize_t n_rows, next_leaf, n_arrays;
} Planner;

/* The children of each row: 0, or -1 with an exception. */
static int
link_rows(Planner *self)
{
    Py_ssize_t n = self->n_rows, n_roots = 0;
    Py_ssize_t *roots = PyMem_New(Py_ssize_t, n ? n : 1);
    self->first_child = PyMem_New(Py_ssize_t, n ? n : 1);
    self->next_sibling = PyMem_New(Py_ssize_t, n ? n : 1);
    if (roots == NULL || self->first_child == NULL || self->next_sibling == NULL) {
        PyMem_Free(roots);
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t row = 0; row < n; row++) {
        Py_ssize_t arity = PyLong_AsSsize_t(PyTuple_GET_ITEM(self->arities, row));
        if (arity < 0 || arity > n_roots) {
            break;
        }
        n_roots -= arity;
        self->first_child[row] = arity ? roots[n_roots] : -1;
        for (Py_ssize_t i = 1; i < arity; i++) {
            self->next_sibling[roots[n_roots + i - 1]] = roots[n_roots + i];
        }
        self->next_sibling[row] = -1;
        roots[n_roots++] = row;
        if (row == n - 1 && n_roots == 1) {
            PyMem_Free(roots);
            return 0;
        }
    }
    PyMem_Free(roots);
    if (!PyErr_Occurred()) {
        PyErr_SetString(PyExc_ValueError, "the rows are of no tree");
    }
    return -1;
}

static PyObject *
instruction(Op op, Py_ssize_t n, Py_ssize_t size, PyObject *first, PyObject *second, PyObject *third)
{
    PyObject *parts[] = {PyLong_FromLong(op), Py_NewRef(Py_False), PyLong_FromSsize_t(n),
                         PyLong_FromSsize_t(size), Py_XNewRef(first), Py_XNewRef(second),
                         Py_XNewRef(third)};
    PyObject *made = PyTuple_New(7);
    for (int i = 0; i < 7; i++) {
        PyObject *part = parts[i] == NULL && i >= 4 ? Py_NewRef(Py_None) : parts[i];
        if (made == NULL || part == NULL) {
            Py_XDECREF(part);
            Py_CLEAR(made);
        }
        else {
            PyTuple_SET_ITEM(made, i, part);
        }
    }
    return made;
}

/* Append an instruction, which is taken: 0, or -1 with an exception. */
static int
append(Planner *self, PyObject *made)
{
    if (made == NULL) {
        return -1;
    }
    int failed = PyList_Append(self->instructions, made);
    Py_DECREF(made);
    return failed;
}

/* Set the instruction at an index, which is that of all from there on. */
static int
enclose(Planner *self, Py_ssize_t at, Op op, Py_ssize_t n, PyObject *first, PyObject *second,
        PyObject *third)
{
    Py_ssize_t size = PyList_GET_SIZE(self->instructions) - at;
    PyObject *made = instruction(op, n, size, first, second, third);
    return made == NULL ? -1 : PyList_SetItem(self->instructions, at, made);
}

/* Make room for an instruction: its index, or -1 with an exception. */
static Py_ssize_t
reserve(Planner *self)
{
    Py_ssize_t at = PyList_GET_SIZE(self->instructions);
    return PyList_Append(self->instructions, Py_None) < 0 ? -1 : at;
}

static int
is_number_or_text(PyObject *value)
{
    return PyLong_CheckExact(value) || PyFloat_CheckExact(value) || PyUnicode_CheckExact(value) ||
           PyBool_Check(value) || PyBytes_CheckExact(value);
}

/* Whether there is but one object of this value: CPython's small integers are some. */
static int
is_singleton(PyObject *value)
{
    if (value == Py_None || PyBool_Check(value)) {
        return 1;
    }
    if (!PyLong_CheckExact(value)) {
        return 0;
    }
    int overflow;
    long number = PyLong_AsLongAndOverflow(value, &overflow);
    return !overflow && number >= -5 && number <= 256;
}

/* Whether nothing but a value itself equals it. */
static int
compares_by_identity(PyObject *value)
{
    return Py_TYPE(value)->tp_richcompare == PyBaseObject_Type.tp_richcompare;
}

/* What is asked of a value, as of another of its class, which both compare by identity; NULL with an
   exception. */
static PyObject *
asked_likewise(PyObject *instructions, PyObject *value)
{
    PyObject *made = PyTuple_New(PyTuple_GET_SIZE(instructions));
    for (Py_ssize_t i = 0; made != NULL && i < PyTuple_GET_SIZE(instructions); i++) {
        PyObject *step = Py_NewRef(PyTuple_GET_ITEM(instructions, i));
        if (PyTuple_CheckExact(step) && PyTuple_GET_SIZE(step) == 7 &&
            PyLong_AsLong(PyTuple_GET_ITEM(step, 0)) == IS) {
            Py_DECREF(step);
            step = instruction(IS, 0, 1, value, NULL, NULL);
        }
        if (step == NULL || PyErr_Occurred()) {
            Py_XDECREF(step);
            Py_CLEAR(made);
        }
        else {
            PyTuple_SET_ITEM(made, i, step);
        }
    }
    return made;
}

/* Append what is asked of a static value, or that it is given back: 0, or -1 with an exception. */
static int
plan_static(Planner *self, PyObject *value, int is_leaf)
{
    if (self->array == NULL) {
        return append(self, instruction(CONSTANT, 0, 1, value, NULL, NULL));
    }
    if (is_singleton(value)) {
        return append(self, instruction(IS, 0, 1, value, NULL, NULL));
    }
    int told = is_hashed_constant(value, 0);
    if (told) {
        return told < 0 ? -1 : append(self, instruction(SAME, 0, 1, value, NULL, NULL));
    }
    /* Of those that compare by identity one of each class is asked about, of others each. */
    int by_class = compares_by_identity(value);
    PyObject *asked = self->asked[2 * by_class + is_leaf];
    PyObject *key = PyLong_FromVoidPtr(by_class ? (void *)Py_TYPE(value) : (void *)value);
    PyObject *made = NULL, *known = NULL;
    int failed = -1;
    if (key == NULL) {
        return -1;
    }
    known = PyDict_GetItemWithError(asked, key);
    if (known != NULL) {
        made = by_class ? asked_likewise(known, value) : Py_NewRef(known);
    }
    else if (!PyErr_Occurred()) {
        made = PyObject_CallFunctionObjArgs(self->static_of, value, is_leaf ? Py_True : Py_False,
                                            NULL);
        if (made != NULL &&
            (!PyTuple_CheckExact(made) || PyDict_SetItem(asked, key, made) < 0)) {
            Py_CLEAR(made);
        }
    }
    if (made != NULL) {
        Py_ssize_t end = PyList_GET_SIZE(self->instructions);
        failed = PyList_SetSlice(self->instructions, end, end, made);
    }
    else if (!PyErr_Occurred()) {
        PyErr_SetString(PyExc_TypeError, "instructions must be a tuple");
    }
    Py_XDECREF(made);
    Py_DECREF(key);
    return failed;
}

static int
is_leaf_row(Planner *self, Py_ssize_t row)
{
    PyObject *kind = PyTuple_GET_ITEM(self->kinds, row);
    if (kind == self->leaf_kind) {
        return 1;
    }
    return PyObject_RichCompareBool(kind, self->leaf_kind, Py_EQ);
}

/* The next leaf, borrowed; NULL with an exception. */
static PyObject *
peek_leaf(Planner *self, Py_ssize_t ahead)
{
    if (self->next_leaf + ahead >= PyTuple_GET_SIZE(self->leaves)) {
        PyErr_SetString(PyExc_ValueError, "fewer leaves than the treedef has");
        return NULL;
    }
    return PyTuple_GET_ITEM(self->leaves, self->next_leaf + ahead);
}

static int
plan_leaf(Planner *self)
{
    PyObject *leaf = peek_leaf(self, 0);
    if (leaf == NULL) {
        return -1;
    }
    self->next_leaf++;
    if (leaf == self->dynamic) {
        self->n_arrays++;
        return self->array == NULL
                   ? append(self, instruction(TAKE, 0, 1, NULL, NULL, NULL))
                   : append(self, instruction(ARRAY, 0, 1, self->array, self->is_array, NULL));
    }
    return plan_static(self, leaf, 1);
}

/* The class of a row's node, borrowed; NULL with an exception. */
static PyObject *
class_of(Planner *self, Py_ssize_t row)
{
    PyObject *cls = PyTuple_GET_ITEM(self->classes, row);
    if (cls != Py_None) {
        return cls;
    }
    cls = PyDict_GetItemWithError(self->kind_classes, PyTuple_GET_ITEM(self->kinds, row));
    if (cls == NULL && !PyErr_Occurred()) {
        /* Of a named tuple. */
        cls = PyTuple_GET_ITEM(self->metadata, row);
        if (!PyType_Check(cls)) {
            PyErr_SetString(PyExc_ValueError, "a node without a class");
            return NULL;
        }
    }
    return cls;
}

/* How the nodes of a class are planned, borrowed: a tuple; NULL with an exception. */
static PyObject *
shape_of(Planner *self, PyObject *cls)
{
    PyObject *shape = PyDict_GetItemWithError(self->shapes, cls);
    if (shape != NULL || PyErr_Occurred()) {
        return shape;
    }
    shape = PyObject_CallOneArg(self->shape_of, cls);
    if (shape == NULL) {
        return NULL;
    }
    if (!PyTuple_CheckExact(shape) || PyTuple_GET_SIZE(shape) != 3 ||
        PyDict_SetItem(self->shapes, cls, shape) < 0) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_TypeError, "a shape must be a tuple of three");
        }
        Py_CLEAR(shape);
    }
    /* The dict has it. */
    Py_XDECREF(shape);
    return shape;
}

static int plan_row(Planner *self, Py_ssize_t row, int depth);

/* How many leaves from a row on are arrays, or numbers and texts, one or more; -1 with an exception.
   Whether they make one run is set. */
static Py_ssize_t
length_of_run(Planner *self, Py_ssize_t row, int *is_run)
{
    Py_ssize_t n = 0;
    int of_arrays = 0;
    for (; row >= 0; row = self->next_sibling[row], n++) {
        int is_leaf = is_leaf_row(self, row);
        PyObject *leaf = is_leaf > 0 ? peek_leaf(self, n) : NULL;
        if (leaf == NULL) {
            if (PyErr_Occurred()) {
                return -1;
            }
            break;
        }
        int is_array = leaf == self->dynamic;
        if (n == 0) {
            of_arrays = is_array;
        }
        if (is_array != of_arrays || (!is_array && !is_number_or_text(leaf))) {
            break;
        }
    }
    *is_run = n >= SHORTEST_RUN;
    return n == 0 ? 1 : n;
}

static int
plan_run(Planner *self, Py_ssize_t n)
{
    PyObject *leaf = peek_leaf(self, n - 1);
    if (leaf == NULL) {
        return -1;
    }
    int is_array = leaf == self->dynamic;
    Op op = self->array == NULL ? (is_array ? TAKE_RUN : CONSTANT_RUN)
                                : (is_array ? ARRAY_RUN : SAME_RUN);
    PyObject *values = NULL;
    int failed;
    if (is_array) {
        self->n_arrays += n;
        failed = append(self, instruction(op, n, 1, self->array, self->is_array, NULL));
    }
    else {
        values = PyTuple_GetSlice(self->leaves, self->next_leaf, self->next_leaf + n);
        failed = values == NULL ? -1 : append(self, instruction(op, n, 1, values, NULL, NULL));
    }
    self->next_leaf += n;
    Py_XDECREF(values);
    return failed;
}

/* Whether an object may stand for another in an instruction, as far as that is told at a glance. */
static int
is_same_object(PyObject *one, PyObject *other)
{
    return one == other || (PyUnicode_CheckExact(one) && PyUnicode_CheckExact(other) &&
                            PyUnicode_Compare(one, other) == 0);
}

static int
are_names_same(PyObject *ones, PyObject *others)
{
    Py_ssize_t n = PyTuple_GET_SIZE(ones);
    if (n != PyTuple_GET_SIZE(others)) {
        return 0;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        if (!is_same_object(PyTuple_GET_ITEM(ones, i), PyTuple_GET_ITEM(others, i))) {
            return 0;
        }
    }
    return 1;
}

static int
is_part_of_instruction_same(long op, int part, PyObject *one, PyObject *other)
{
    if (is_same_object(one, other)) {
        return 1;
    }
    if (part < 4) {
        return PyObject_RichCompareBool(one, other, Py_EQ);
    }
    if (op == SAME || op == SAME_RUN) {
        return is_same_constant(one, other, 0);
    }
    int are_names = (part == 5 && (op == FIELDS || op == DICT || op == MAKE_MODULE)) ||
                    (part == 4 && op == MAKE_DICT);
    return are_names && are_names_same(one, other);
}

/* Whether `size` instructions from one index on do what those from another on do; -1 for an error. */
static int
are_instructions_same(Planner *self, Py_ssize_t one, Py_ssize_t other, Py_ssize_t size)
{
    for (Py_ssize_t i = 0; i < size; i++) {
        PyObject *ones = PyList_GET_ITEM(self->instructions, one + i);
        PyObject *others = PyList_GET_ITEM(self->instructions, other + i);
        for (int part = 0; part < 7 && ones != others; part++) {
            long op = PyLong_AsLong(PyTuple_GET_ITEM(ones, 0));
            int same = is_part_of_instruction_same(op, part, PyTuple_GET_ITEM(ones, part),
                                                   PyTuple_GET_ITEM(others, part));
            if (same <= 0) {
                return same;
            }
        }
    }
    return 1;
}

/* Items of a sequence that are read or made alike, the instructions of the first of which are there. */
typedef struct {
    Py_ssize_t at, size, n;
} Repeated;

/* End a series of them, behind which nothing was appended: 0, or -1 with an exception. */
static int
end_repeated(Planner *self, Repeated *items)
{
    Py_ssize_t n = items->n;
    items->n = 0;
    if (n >= SHORTEST_RUN) {
        PyObject *made = instruction(self->array == NULL ? MAKE_RUN : REPEAT, n, items->size + 1,
                                     NULL, NULL, NULL);
        int failed = made == NULL ? -1 : PyList_Insert(self->instructions, items->at, made);
        Py_XDECREF(made);
        return failed;
    }
    for (; n > 1; n--) {
        for (Py_ssize_t i = 0; i < items->size; i++) {
            if (PyList_Append(self->instructions,
                              PyList_GET_ITEM(self->instructions, items->at + i)) < 0) {
                return -1;
            }
        }
    }
    return 0;
}

/* Plan an item of a sequence, as one more of those before it, if it is. */
static int
plan_item(Planner *self, Py_ssize_t row, int depth, Repeated *items)
{
    Py_ssize_t at = PyList_GET_SIZE(self->instructions);
    if (plan_row(self, row, depth) < 0) {
        return -1;
    }
    Py_ssize_t end = PyList_GET_SIZE(self->instructions), size = end - at;
    int same = items->n > 0 && items->size == size
                   ? are_instructions_same(self, items->at, at, size)
                   : 0;
    if (same < 0) {
        return -1;
    }
    if (same) {
        items->n++;
        return PyList_SetSlice(self->instructions, at, end, NULL);
    }
    if (items->n > 1) {
        PyObject *others = PyList_GetSlice(self->instructions, at, end);
        int failed = others == NULL || PyList_SetSlice(self->instructions, at, end, NULL) < 0 ||
                     end_repeated(self, items) < 0;
        at = PyList_GET_SIZE(self->instructions);
        failed = failed || PyList_SetSlice(self->instructions, at, at, others) < 0;
        Py_XDECREF(others);
        if (failed) {
            return -1;
        }
    }
    *items = (Repeated){.at = at, .size = size, .n = 1};
    return 0;
}

static int
plan_items(Planner *self, Py_ssize_t row, int depth)
{
    Repeated items = {0};
    Py_ssize_t child = self->first_child[row];
    while (child >= 0) {
        int is_run;
        Py_ssize_t n = length_of_run(self, child, &is_run);
        if (n < 0 || (is_run && (end_repeated(self, &items) < 0 || plan_run(self, n) < 0))) {
            return -1;
        }
        for (; n > 0; n--) {
            if (!is_run && plan_item(self, child, depth + 1, &items) < 0) {
                return -1;
            }
            child = self->next_sibling[child];
        }
    }
    return end_repeated(self, &items);
}

static int
plan_children(Planner *self, Py_ssize_t row, int depth)
{
    Py_ssize_t child = self->first_child[row];
    for (; child >= 0; child = self->next_sibling[child]) {
        if (plan_row(self, child, depth + 1) < 0) {
            return -1;
        }
    }
    return 0;
}

/* Fields come in this order: those that may hold arrays, then the static ones. */
static int
plan_module(Planner *self, Py_ssize_t row, PyObject *cls, PyObject *names, Py_ssize_t n_dynamic,
            int depth)
{
    PyObject *data = PyTuple_GET_ITEM(self->metadata, row);
    Py_ssize_t n_static = PyTuple_GET_SIZE(names) - n_dynamic;
    int is_plain = n_static >= 0 && PyTuple_CheckExact(data) && PyTuple_GET_SIZE(data) == 1 + n_static &&
                   PyTuple_GET_ITEM(data, 0) == self->missing;
    for (Py_ssize_t i = 1; is_plain && i <= n_static; i++) {
        is_plain = PyTuple_GET_ITEM(data, i) != self->missing;
    }
    Py_ssize_t arity = 0;
    for (Py_ssize_t child = self->first_child[row]; child >= 0; child = self->next_sibling[child]) {
        arity++;
    }
    if (!is_plain || arity != n_dynamic) {
        PyErr_SetString(PyExc_ValueError, "a Module that isn't whole");
        return -1;
    }
    Py_ssize_t at = reserve(self);
    if (at < 0) {
        return -1;
    }
    if (plan_children(self, row, depth) < 0) {
        return -1;
    }
    for (Py_ssize_t i = 1; i <= n_static; i++) {
        if (plan_static(self, PyTuple_GET_ITEM(data, i), 0) < 0) {
            return -1;
        }
    }
    return enclose(self, at, self->array == NULL ? MAKE_MODULE : FIELDS, 0, cls, names, NULL);
}

/* The class of all keys of a dict, borrowed; NULL if there are none, or not of one plain class. */
static PyObject *
class_of_keys(PyObject *keys)
{
    PyTypeObject *cls = NULL;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(keys); i++) {
        PyObject *key = PyTuple_GET_ITEM(keys, i);
        if (!PyUnicode_CheckExact(key) && !PyLong_CheckExact(key) && !PyBytes_CheckExact(key)) {
            return NULL;
        }
        if (i > 0 && Py_TYPE(key) != cls) {
            return NULL;
        }
        cls = Py_TYPE(key);
    }
    return (PyObject *)cls;
}

/* Plan a node by what Python has as the head of its instructions. */
static int
plan_other(Planner *self, Py_ssize_t row, PyObject *cls, int depth)
{
    PyObject *data = PyTuple_GET_ITEM(self->metadata, row);
    PyObject *head = PyObject_CallFunctionObjArgs(self->head_of, cls, data,
                                                  PyTuple_GET_ITEM(self->arities, row), NULL);
    int op, failed = -1;
    Py_ssize_t n, at;
    PyObject *first, *second, *third;
    if (head == NULL) {
        return -1;
    }
    if (PyArg_ParseTuple(head, "inOOO", &op, &n, &first, &second, &third) &&
        (at = reserve(self)) >= 0 && plan_children(self, row, depth) == 0) {
        failed = enclose(self, at, (Op)op, n, first, second, third);
    }
    Py_DECREF(head);
    return failed;
}

static int
plan_dict(Planner *self, Py_ssize_t row, PyObject *cls, int depth)
{
    PyObject *keys = PySequence_Tuple(PyTuple_GET_ITEM(self->metadata, row));
    int failed = -1;
    Py_ssize_t at;
    if (keys == NULL) {
        return -1;
    }
    PyObject *key_class = class_of_keys(keys);
    if (self->array != NULL && key_class == NULL && PyTuple_GET_SIZE(keys) != 0) {
        failed = plan_other(self, row, cls, depth);
    }
    else if ((at = reserve(self)) >= 0 && plan_children(self, row, depth) == 0) {
        failed = self->array == NULL ? enclose(self, at, MAKE_DICT, 0, keys, NULL, NULL)
                                     : enclose(self, at, DICT, 0, cls, keys, key_class);
    }
    Py_DECREF(keys);
    return failed;
}

static int
plan_sequence(Planner *self, Py_ssize_t row, PyObject *cls, int depth)
{
    Py_ssize_t n = PyLong_AsSsize_t(PyTuple_GET_ITEM(self->arities, row));
    Py_ssize_t at = reserve(self);
    if (n < 0 || at < 0 ||
        (n >= SHORTEST_RUN ? plan_items(self, row, depth) : plan_children(self, row, depth)) < 0) {
        return -1;
    }
    if (self->array != NULL) {
        return enclose(self, at, SEQUENCE, n, cls, NULL, NULL);
    }
    if (cls == (PyObject *)&PyList_Type || cls == (PyObject *)&PyTuple_Type) {
        Op op = cls == (PyObject *)&PyList_Type ? MAKE_LIST : MAKE_TUPLE;
        return enclose(self, at, op, n, NULL, NULL, NULL);
    }
    return enclose(self, at, MAKE_NAMED_TUPLE, n, cls, NULL, NULL);
}

/* Append the instructions of a row: 0, or -1 with an exception. */
static int
plan_row(Planner *self, Py_ssize_t row, int depth)
{
    int is_leaf = is_leaf_row(self, row);
    if (is_leaf) {
        return is_leaf < 0 ? -1 : plan_leaf(self);
    }
    if (depth > MAX_DEPTH) {
        PyErr_SetString(PyExc_RecursionError, "too deep to be planned");
        return -1;
    }
    PyObject *cls = class_of(self, row);
    PyObject *shape = cls == NULL ? NULL : shape_of(self, cls), *names;
    int kind;
    Py_ssize_t n;
    if (shape == NULL || !PyArg_ParseTuple(shape, "iO!n", &kind, &PyTuple_Type, &names, &n)) {
        return -1;
    }
    switch ((Shape)kind) {
    case NONE_SHAPE:
        return append(self, instruction(self->array == NULL ? CONSTANT : IS, 0, 1, NULL, NULL, NULL));
    case SEQUENCE_SHAPE:
        return plan_sequence(self, row, cls, depth);
    case DICT_SHAPE:
        return plan_dict(self, row, cls, depth);
    case MODULE_SHAPE:
        return plan_module(self, row, cls, names, n, depth);
    default:
        return plan_other(self, row, cls, depth);
    }
}

/* Plan the children of an argument list: args, a tuple, and kwargs, a dict. */
static int
plan_arguments(Planner *self, Py_ssize_t root)
{
    for (Py_ssize_t half = self->first_child[root]; half >= 0; half = self->next_sibling[half]) {
        if (plan_children(self, half, 0) < 0) {
            return -1;
        }
    }
    return 0;
}

static PyObject *
plan(PyObject *Py_UNUSED(module), PyObject *args)
{
    Planner self = {0};
    PyObject *array, *result = NULL;
    if (!PyArg_ParseTuple(args, "O!O!O!O!O!OO!OOOOOOO:plan", &PyTuple_Type, &self.kinds,
                          &PyTuple_Type, &self.arities, &PyTuple_Type, &self.metadata, &PyTuple_Type,
                          &self.classes, &PyTuple_Type, &self.leaves, &self.leaf_kind, &PyDict_Type,
                          &self.kind_classes, &self.dynamic, &self.missing, &array, &self.is_array,
                          &self.shape_of, &self.head_of, &self.static_of)) {
        return NULL;
    }
    self.n_rows = PyTuple_GET_SIZE(self.kinds);
    if (PyTuple_GET_SIZE(self.arities) != self.n_rows ||
        PyTuple_GET_SIZE(self.metadata) != self.n_rows ||
        PyTuple_GET_SIZE(self.classes) != self.n_rows) {
        PyErr_SetString(PyExc_ValueError, "the columns must be as long as each other");
        return NULL;
    }
    self.array = array == Py_None ? NULL : array;
    self.shapes = PyDict_New();
    self.instructions = PyList_New(0);
    int made = self.shapes != NULL && self.instructions != NULL;
    for (int i = 0; i < 4; i++) {
        self.asked[i] = PyDict_New();
        made = made && self.asked[i] != NULL;
    }
    if (made && link_rows(&self) == 0) {
        Py_ssize_t root = self.n_rows - 1;
        int failed = self.array != NULL ? plan_arguments(&self, root) : plan_row(&self, root, 0);
        if (!failed && self.next_leaf != PyTuple_GET_SIZE(self.leaves)) {
            PyErr_SetString(PyExc_ValueError, "more leaves than the treedef has");
            failed = -1;
        }
        if (!failed) {
            result = Py_BuildValue("On", self.instructions, self.n_arrays);
        }
    }
    PyMem_Free(self.first_child);
    PyMem_Free(self.next_sibling);
    Py_XDECREF(self.shapes);
    for (int i = 0; i < 4; i++) {
        Py_XDECREF(self.asked[i]);
    }
    Py_XDECREF(self.instructions);
    return result;
}

/* --- Predicates ------------------------------------------------------------------------------ */

/* Like all functions below: 1 for a match, 0 for none, -1 with an exception. */
static int
holds(PyObject *predicate, PyObject *value)
{
    PyObject *result = PyObject_CallOneArg(predicate, value);
    if (result == NULL) {
        return -1;
    }
    int truth = PyObject_IsTrue(result);
    Py_DECREF(result);
    return truth;
}

/* --- Held ------------------------------------------------------------------------------------ */

/* How the elements of a container are read; in the order of _trees/elements.py. */
typedef enum {
    ITEMS,      /* of a list or tuple */
    ITERATED,   /* of a set */
    ENTRIES,    /* the keys of a dict, then its values, then the attributes with certain names */
    COPIED,     /* those of the dict that its copy is */
    FIELD_DICT, /* those of the dict in which the object keeps its fields */
    ATTRIBUTES, /* those with certain names */
    N_READINGS,
} Reading;

/* An address tells of an object that lives. So each element is kept, or is in a part that is looked
   into, or is dead as soon as died isn't empty. Garbage collection notes nobody's death in a died
   that is garbage itself, but clears its weak references, alive among them. */
typedef struct {
    Callable head;
    PyObject *cls;
    int reading;
    PyObject *names;       /* a tuple */
    PyObject *died;        /* a list: of those that aren't kept, those that are dead */
    PyObject *alive;       /* a weak reference to what nobody else holds; or None */
    PyObject *keeps;       /* what keeps the others alive, and notes who died */
    PyObject *parts;       /* a tuple: each what is asked of one element */
    Py_ssize_t *places;    /* of those elements, the first first */
    Py_ssize_t n;
    PyObject **addresses;  /* of the n elements; not references */
    int keeps_all;         /* whether all of them are kept, to be compared as constants */
} Held;

static int held_is(Held *self, PyObject *value);

static int
is_part_same(Held *self, PyObject *part, PyObject *element)
{
    if (Py_TYPE(part) == Py_TYPE(self)) {
        return held_is((Held *)part, element);
    }
    if (PyType_Check(part)) {
        return (PyObject *)Py_TYPE(element) == part;
    }
    if (PyTuple_CheckExact(part) && PyTuple_GET_SIZE(part) == 2) {
        if ((PyObject *)Py_TYPE(element) != PyTuple_GET_ITEM(part, 0)) {
            return 0;
        }
        Py_hash_t hash = PyObject_Hash(element);
        if (hash == -1) {
            return -1;
        }
        Py_ssize_t expected = PyLong_AsSsize_t(PyTuple_GET_ITEM(part, 1));
        return expected == -1 && PyErr_Occurred() ? -1 : hash == expected;
    }
    return holds(part, element);
}

/* Whether element i is the same; `n_seen` parts were before it. */
static int
is_element_same(Held *self, Py_ssize_t i, PyObject *element, Py_ssize_t *n_seen)
{
    if (self->addresses[i] != element) {
        return self->keeps_all ? is_same_constant(element, self->addresses[i], 0) : 0;
    }
    Py_ssize_t seen = *n_seen;
    if (seen >= PyTuple_GET_SIZE(self->parts) || self->places[seen] != i) {
        return 1;
    }
    *n_seen = seen + 1;
    Py_INCREF(element);
    int same = is_part_same(self, PyTuple_GET_ITEM(self->parts, seen), element);
    Py_DECREF(element);
    return same;
}

static int
are_items_same(Held *self, PyObject *value)
{
    if (!PyList_Check(value) && !PyTuple_Check(value)) {
        return 0;
    }
    Py_ssize_t n = self->n;
    if (PySequence_Fast_GET_SIZE(value) != n) {
        return 0;
    }
    if (n && memcmp(PySequence_Fast_ITEMS(value), self->addresses, n * sizeof(PyObject *)) != 0) {
        Py_ssize_t i = 0, none_seen = 0;
        int same = self->keeps_all;
        for (; same > 0 && i < n && i < PySequence_Fast_GET_SIZE(value); i++) {
            same = is_element_same(self, i, PySequence_Fast_GET_ITEM(value, i), &none_seen);
        }
        return same;
    }
    Py_ssize_t n_parts = PyTuple_GET_SIZE(self->parts);
    for (Py_ssize_t seen = 0; seen < n_parts;) {
        Py_ssize_t i = self->places[seen];
        if (i < 0 || i >= PySequence_Fast_GET_SIZE(value)) {
            return 0;
        }
        int same = is_element_same(self, i, PySequence_Fast_GET_ITEM(value, i), &seen);
        if (same <= 0) {
            return same;
        }
    }
    return 1;
}

static int
are_iterated_same(Held *self, PyObject *value)
{
    PyObject *iterator = PyObject_GetIter(value);
    if (iterator == NULL) {
        return -1;
    }
    Py_ssize_t n_seen = 0, i = 0;
    int same = 1;
    PyObject *element;
    while (same > 0 && (element = PyIter_Next(iterator)) != NULL) {
        same = i < self->n ? is_element_same(self, i, element, &n_seen) : 0;
        Py_DECREF(element);
        i++;
    }
    Py_DECREF(iterator);
    if (same <= 0) {
        return same;
    }
    return PyErr_Occurred() ? -1 : i == self->n;
}

static int
are_entries_same(Held *self, PyObject *value, Py_ssize_t *n_seen)
{
    Py_ssize_t half = (self->n - PyTuple_GET_SIZE(self->names)) / 2;
    if (!PyDict_Check(value) || PyDict_GET_SIZE(value) != half) {
        return 0;
    }
    Py_ssize_t i = 0, position = 0;
    PyObject *key, *element;
    while (PyDict_Next(value, &position, &key, &element)) {
        int same = i < half ? is_element_same(self, i, key, n_seen) : 0;
        if (same > 0) {
            same = is_element_same(self, half + i, element, n_seen);
        }
        if (same <= 0) {
            return same;
        }
        i++;
    }
    return i == half;
}

static int
are_fields_same(Held *self, PyObject *value)
{
    Py_ssize_t n_seen = 0;
    PyObject *fields = PyObject_GenericGetDict(value, NULL);
    if (fields == NULL) {
        return -1;
    }
    int same = are_entries_same(self, fields, &n_seen);
    Py_DECREF(fields);
    return same;
}

static int
is_copy_same(Held *self, PyObject *value)
{
    Py_ssize_t n_seen = 0;
    PyObject *copy = PyObject_CallMethod(value, "copy", NULL);
    if (copy == NULL) {
        return -1;
    }
    /* What is shown may be of another class by now. */
    int same = PyDict_CheckExact(copy) ? are_entries_same(self, copy, &n_seen) : 0;
    Py_DECREF(copy);
    return same;
}

/* Whether those with the names, the last elements, are the same. */
static int
are_attributes_same(Held *self, PyObject *value, Py_ssize_t *n_seen)
{
    Py_ssize_t n_names = PyTuple_GET_SIZE(self->names), n_before = self->n - n_names;
    for (Py_ssize_t i = 0; i < n_names; i++) {
        PyObject *element = PyObject_GetAttr(value, PyTuple_GET_ITEM(self->names, i));
        if (element == NULL) {
            return -1;
        }
        int same = is_element_same(self, n_before + i, element, n_seen);
        Py_DECREF(element);
        if (same <= 0) {
            return same;
        }
    }
    return 1;
}

static int
is_garbage(Held *self)
{
    if (self->alive == Py_None) {
        return 0;
    }
#if PY_VERSION_HEX >= 0x030D0000
    PyObject *kept = NULL;
    int lives = PyWeakref_GetRef(self->alive, &kept);
    Py_XDECREF(kept);
    return lives <= 0;
#else
    return PyWeakref_GetObject(self->alive) == Py_None;
#endif
}

static int
held_is(Held *self, PyObject *value)
{
    /* It has no class before it is whole, and once its cycle is collected. */
    if ((PyObject *)Py_TYPE(value) != self->cls || PyList_GET_SIZE(self->died) != 0 ||
        is_garbage(self)) {
        return 0;
    }
    if (Py_EnterRecursiveCall(" while comparing static objects")) {
        return -1;
    }
    int same;
    Py_ssize_t n_seen = 0;
    /* A callback may drop whoever holds it. */
    Py_INCREF(self);
    switch ((Reading)self->reading) {
    case ITEMS:
        same = are_items_same(self, value);
        break;
    case ITERATED:
        same = are_iterated_same(self, value);
        break;
    case ENTRIES:
        same = are_entries_same(self, value, &n_seen);
        if (same > 0) {
            same = are_attributes_same(self, value, &n_seen);
        }
        break;
    case COPIED:
        same = is_copy_same(self, value);
        break;
    case FIELD_DICT:
        same = are_fields_same(self, value);
        break;
    default:
        same = are_attributes_same(self, value, &n_seen);
    }
    Py_DECREF(self);
    Py_LeaveRecursiveCall();
    return same;
}

static PyObject *
held_call(PyObject *callable, PyObject *const *args, size_t n_args_flag, PyObject *kwnames)
{
    if (PyVectorcall_NARGS(n_args_flag) != 1 ||
        (kwnames != NULL && PyTuple_GET_SIZE(kwnames) != 0)) {
        PyErr_SetString(PyExc_TypeError, "Held takes one object");
        return NULL;
    }
    int same = held_is((Held *)callable, args[0]);
    return same < 0 ? NULL : PyBool_FromLong(same);
}

static int
is_of_dict(int reading)
{
    return reading == ENTRIES || reading == COPIED || reading == FIELD_DICT;
}

/* Take the parts, a tuple of (place, what is asked of the element there). */
static int
held_take_parts(Held *self, PyObject *parts)
{
    Py_ssize_t n_parts = PyTuple_GET_SIZE(parts);
    self->parts = PyTuple_New(n_parts);
    self->places = PyMem_Calloc(n_parts ? (size_t)n_parts : 1, sizeof(Py_ssize_t));
    if (self->parts == NULL || self->places == NULL) {
        if (!PyErr_Occurred()) {
            PyErr_NoMemory();
        }
        return -1;
    }
    /* Not in the keys of a dict. */
    Py_ssize_t last = is_of_dict(self->reading) ? (self->n - PyTuple_GET_SIZE(self->names)) / 2 - 1 : -1;
    for (Py_ssize_t i = 0; i < n_parts; i++) {
        PyObject *pair = PyTuple_GET_ITEM(parts, i), *part;
        if (!PyTuple_CheckExact(pair)) {
            PyErr_SetString(PyExc_TypeError, "a part must be a tuple");
            return -1;
        }
        if (!PyArg_ParseTuple(pair, "nO", &self->places[i], &part)) {
            return -1;
        }
        if (self->places[i] <= last || self->places[i] >= self->n) {
            PyErr_SetString(PyExc_ValueError, "a part is out of place");
            return -1;
        }
        last = self->places[i];
        PyTuple_SET_ITEM(self->parts, i, Py_NewRef(part));
    }
    return 0;
}

static PyObject *
held_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    int reading;
    PyObject *cls, *names, *elements, *parts, *died, *alive, *keeps;
    if (has_keywords(type, kwargs) ||
        !PyArg_ParseTuple(args, "O!iO!O!O!O!OO:Held", &PyType_Type, &cls, &reading, &PyTuple_Type,
                          &names, &PyTuple_Type, &elements, &PyTuple_Type, &parts, &PyList_Type,
                          &died, &alive, &keeps)) {
        return NULL;
    }
    if (alive != Py_None && !PyWeakref_CheckRef(alive)) {
        PyErr_SetString(PyExc_TypeError, "alive must be a weak reference, or None");
        return NULL;
    }
    Py_ssize_t n = PyTuple_GET_SIZE(elements);
    Py_ssize_t n_others = n - PyTuple_GET_SIZE(names);
    if (reading < 0 || reading >= N_READINGS || n_others < 0 || (is_of_dict(reading) && n_others % 2) ||
        (reading == ATTRIBUTES && n_others != 0)) {
        PyErr_SetString(PyExc_ValueError, "a number is out of bounds");
        return NULL;
    }
    Held *self = (Held *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->head.vectorcall = held_call;
    self->reading = reading;
    self->names = Py_NewRef(names);
    self->died = Py_NewRef(died);
    self->alive = Py_NewRef(alive);
    self->keeps = Py_NewRef(keeps);
    self->n = n;
    self->addresses = PyMem_Calloc(n ? (size_t)n : 1, sizeof(PyObject *));
    if (self->addresses == NULL) {
        PyErr_NoMemory();
        goto error;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        self->addresses[i] = PyTuple_GET_ITEM(elements, i);
    }
    if (held_take_parts(self, parts) < 0) {
        goto error;
    }
    self->keeps_all = PyTuple_GET_SIZE(parts) == 0 && alive == Py_None;
    self->cls = Py_NewRef(cls);
    return (PyObject *)self;

error:
    Py_DECREF(self);
    return NULL;
}

static int
held_traverse(Held *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->cls);
    Py_VISIT(self->names);
    Py_VISIT(self->died);
    Py_VISIT(self->alive);
    Py_VISIT(self->keeps);
    Py_VISIT(self->parts);
    return 0;
}

static int
held_clear(Held *self)
{
    Py_CLEAR(self->cls);
    Py_CLEAR(self->names);
    Py_CLEAR(self->died);
    Py_CLEAR(self->alive);
    Py_CLEAR(self->keeps);
    Py_CLEAR(self->parts);
    PyMem_Free(self->places);
    self->places = NULL;
    PyMem_Free(self->addresses);
    self->addresses = NULL;
    self->n = 0;
    return 0;
}

static PyType_Slot held_slots[] = {
    {Py_tp_doc, "Held(cls, reading, names, elements, parts, died, alive, keeps): called with an\n"
                "object, returns whether it is of that class and holds those very elements. Each of\n"
                "parts, as (place, part), is asked of one of them, too: a Held, a class that it must\n"
                "have, its class and hash, or a predicate. Once something is in died, or alive is\n"
                "dead, the answer is no."},
    {Py_tp_new, held_new},
    {Py_tp_call, PyVectorcall_Call},
    {Py_tp_members, callable_members},
    {Py_tp_dealloc, dealloc},
    {Py_tp_traverse, held_traverse},
    {Py_tp_clear, held_clear},
    {0, NULL},
};

static PyType_Spec held_spec = {
    .name = "eqxjit._native.Held",
    .basicsize = sizeof(Held),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |
             Py_TPFLAGS_IMMUTABLETYPE,
    .slots = held_slots,
};

/* --- Match ----------------------------------------------------------------------------------- */

typedef struct {
    Callable head;
    Program *program;
    PyObject *own;         /* copies an array that isn't of JAX's; NULL to pass it as it is, ... */
    PyObject *numpy;       /* ... and this. The class of those that are copied together, ... */
    PyObject *own_all;     /* ... a list, by this: None if they aren't arrays after all */
    PyObject *fun_arrays;  /* a tuple: the function's own arrays, ... */
    Py_ssize_t n_first;    /* ... which come behind so many */
    Py_ssize_t n_arrays;
    Py_ssize_t n_kept;
} Match;

/* Where structures take turns, one guard tells most of them apart: that which failed. Looking there
   first costs calls that match a little, and so ends when nothing has failed for so many of them. */
#define LATELY 100

typedef struct {
    const Match *match;
    const Node *nodes;
    PyObject *flat;        /* tuples, filled one by one */
    PyObject *kept;
    Py_ssize_t n_taken;
    Py_ssize_t n_numpy;    /* of those, how many are to be copied together */
    Py_ssize_t n_kept;
    Py_ssize_t failed_at;  /* or -1 */
    int has_asked;         /* whether it has run Python */
} Walk;

static int
ask(Walk *walk, PyObject *predicate, PyObject *value)
{
    walk->has_asked = 1;
    return holds(predicate, value);
}

static int
take_array(Walk *walk, const Node *node, PyObject *value)
{
    const Match *match = walk->match;
    PyObject *array;
    if ((PyObject *)Py_TYPE(value) == node->first) {
        array = Py_NewRef(value);
    }
    else if ((PyObject *)Py_TYPE(value) == match->numpy) {
        array = Py_NewRef(value);
        walk->n_numpy++;
    }
    else {
        int is_array = ask(walk, node->second, value);
        if (is_array <= 0) {
            return is_array;
        }
        array = match->own == NULL ? Py_NewRef(value) : PyObject_CallOneArg(match->own, value);
        if (array == NULL) {
            return -1;
        }
    }
    Py_ssize_t index = walk->n_taken++;
    if (index >= match->n_arrays) {
        Py_DECREF(array);
        PyErr_SetString(PyExc_SystemError, "more arrays than planned");
        return -1;
    }
    if (index >= match->n_first) {
        index += PyTuple_GET_SIZE(match->fun_arrays);
    }
    PyTuple_SET_ITEM(walk->flat, index, array);
    return 1;
}

/* Copy the arrays that are copied together: all that was taken is there. */
static int
own_numpy(Walk *walk)
{
    const Match *match = walk->match;
    Py_ssize_t n_fun = PyTuple_GET_SIZE(match->fun_arrays), n_all = match->n_arrays + n_fun, k = 0;
    PyObject *arrays = PyList_New(walk->n_numpy);
    if (arrays == NULL) {
        return -1;
    }
    for (Py_ssize_t i = 0; i < n_all && k < walk->n_numpy; i++) {
        PyObject *array = PyTuple_GET_ITEM(walk->flat, i);
        int is_funs = i >= match->n_first && i < match->n_first + n_fun;
        if (!is_funs && (PyObject *)Py_TYPE(array) == match->numpy) {
            PyList_SET_ITEM(arrays, k++, Py_NewRef(array));
        }
    }
    Py_ssize_t n = walk->n_numpy;
    PyObject *owned = k == n ? PyObject_CallOneArg(match->own_all, arrays) : NULL;
    int matched = owned == NULL ? -1 : owned != Py_None;
    if (matched > 0 && (!PyList_CheckExact(owned) || PyList_GET_SIZE(owned) != n)) {
        matched = -1;
    }
    for (Py_ssize_t i = n_all - 1; matched > 0 && k > 0; i--) {
        PyObject *array = PyTuple_GET_ITEM(walk->flat, i);
        int is_funs = i >= match->n_first && i < match->n_first + n_fun;
        if (!is_funs && (PyObject *)Py_TYPE(array) == match->numpy) {
            PyTuple_SET_ITEM(walk->flat, i, Py_NewRef(PyList_GET_ITEM(owned, --k)));
            Py_DECREF(array);
        }
    }
    if (matched < 0 && !PyErr_Occurred()) {
        PyErr_SetString(PyExc_SystemError, "other arrays than were to be copied");
    }
    Py_DECREF(arrays);
    Py_XDECREF(owned);
    return matched;
}

static int walk_value(Walk *walk, Py_ssize_t at, PyObject *value);

/* Walk into a value that its container may lose meanwhile. */
static inline int
walk_borrowed(Walk *walk, Py_ssize_t at, PyObject *value)
{
    const Node *node = &walk->nodes[at];
    /* Most static objects are told without a look into them, which would fetch them from memory;
       arrays are held by the tuple that they go to. */
    int is_static = node->op == IS || node->op == SAME || node->op == IS_OR;
    if (is_static && value == node->first && !node->keeps) {
        return 1;
    }
    if (node->op == ARRAY && (PyObject *)Py_TYPE(value) == node->first) {
        return take_array(walk, node, value);
    }
    Py_INCREF(value);
    int matched = walk_value(walk, at, value);
    Py_DECREF(value);
    return matched;
}

/* How many items of a sequence a node below it stands for. */
static Py_ssize_t
n_items_of(const Node *node)
{
    int is_run = node->op == ARRAY_RUN || node->op == SAME_RUN || node->op == REPEAT;
    return is_run ? node->n : 1;
}

static int
walk_sequence(Walk *walk, Py_ssize_t at, PyObject *value)
{
    const Node *node = &walk->nodes[at];
    int is_list = PyList_Check(value);
    if ((is_list ? PyList_GET_SIZE(value) : PyTuple_GET_SIZE(value)) != node->n) {
        return 0;
    }
    Py_ssize_t index = 0;
    for (Py_ssize_t child = at + 1; child < node->end; child = walk->nodes[child].end) {
        const Node *item = &walk->nodes[child];
        Py_ssize_t start = index, stop = index + n_items_of(item);
        for (; index < stop; index++) {
            /* A predicate may have changed it. */
            if (is_list && PyList_GET_SIZE(value) != node->n) {
                return 0;
            }
            PyObject *part = is_list ? PyList_GET_ITEM(value, index)
                                     : PyTuple_GET_ITEM(value, index);
            Py_INCREF(part);
            int matched;
            switch (item->op) {
            case ARRAY_RUN:
                matched = take_array(walk, item, part);
                break;
            case SAME_RUN:
                matched = is_same_constant(part, PyTuple_GET_ITEM(item->first, index - start), 0);
                break;
            default:
                matched = walk_value(walk, item->op == REPEAT ? child + 1 : child, part);
            }
            Py_DECREF(part);
            if (matched <= 0) {
                return matched;
            }
        }
    }
    return index == node->n;
}

/* The value of the next item, borrowed, if its key is this very one. Mostly the items of a dict come in
   the order of the plan, or some of them before their turn. */
static inline PyObject *
next_value(PyObject *dict, Py_ssize_t *position, PyObject *expected)
{
    Py_ssize_t next = *position;
    PyObject *key, *value;
    if (!PyDict_Next(dict, &next, &key, &value) || key != expected) {
        return NULL;
    }
    *position = next;
    return value;
}

static int
has_keys_of(PyObject *dict, PyObject *cls)
{
    Py_ssize_t position = 0;
    PyObject *key;
    while (PyDict_Next(dict, &position, &key, NULL)) {
        if ((PyObject *)Py_TYPE(key) != cls) {
            return 0;
        }
    }
    return 1;
}

static int
walk_dict(Walk *walk, Py_ssize_t at, PyObject *value)
{
    const Node *node = &walk->nodes[at];
    PyObject *keys = node->second;
    Py_ssize_t n = PyTuple_GET_SIZE(keys);
    if (PyDict_GET_SIZE(value) != n) {
        return 0;
    }
    int has_keys = node->op == DICT_BY;
    Py_ssize_t child = at + 1;
    Py_ssize_t position = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *key = PyTuple_GET_ITEM(keys, i);
        PyObject *part = next_value(value, &position, key);
        if (part == NULL) {
            if (!has_keys && !has_keys_of(value, node->third)) {
                return 0;
            }
            has_keys = 1;
            part = PyDict_GetItemWithError(value, key);
        }
        if (part == NULL) {
            return PyErr_Occurred() ? -1 : 0;
        }
        int matched = walk_borrowed(walk, child, part);
        if (matched <= 0) {
            return matched;
        }
        child = walk->nodes[child].end;
    }
    /* In the end: a key that isn't there is found sooner, and without Python. */
    return node->op == DICT_BY ? ask(walk, node->third, value) : 1;
}

static int
walk_fields_in(Walk *walk, Py_ssize_t at, PyObject *fields)
{
    PyObject *names = walk->nodes[at].second;
    Py_ssize_t n = PyTuple_GET_SIZE(names);
    if (PyDict_GET_SIZE(fields) != n) {
        return 0;
    }
    Py_ssize_t child = at + 1;
    Py_ssize_t position = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *name = PyTuple_GET_ITEM(names, i);
        PyObject *part = next_value(fields, &position, name);
        if (part == NULL) {
            part = PyDict_GetItemWithError(fields, name);
        }
        if (part == NULL) {
            return PyErr_Occurred() ? -1 : 0;
        }
        int matched = walk_borrowed(walk, child, part);
        if (matched <= 0) {
            return matched;
        }
        child = walk->nodes[child].end;
    }
    return 1;
}

static int
walk_fields(Walk *walk, Py_ssize_t at, PyObject *value)
{
    PyObject *fields = PyObject_GenericGetDict(value, NULL);
    if (fields == NULL) {
        return -1;
    }
    int matched = PyDict_CheckExact(fields) ? walk_fields_in(walk, at, fields) : 0;
    Py_DECREF(fields);
    return matched;
}

static int
walk_registered(Walk *walk, Py_ssize_t at, PyObject *value)
{
    const Node *node = &walk->nodes[at];
    walk->has_asked = 1;
    PyObject *children = PyObject_CallOneArg(node->second, value);
    if (children == NULL) {
        return -1;
    }
    int matched = PyTuple_CheckExact(children) && PyTuple_GET_SIZE(children) == node->n;
    Py_ssize_t child = at + 1;
    for (Py_ssize_t i = 0; matched > 0 && i < node->n; i++) {
        matched = walk_value(walk, child, PyTuple_GET_ITEM(children, i));
        child = walk->nodes[child].end;
    }
    Py_DECREF(children);
    return matched;
}

static int
walk_value(Walk *walk, Py_ssize_t at, PyObject *value)
{
    const Node *node = &walk->nodes[at];
    int matched;
    switch (node->op) {
    case ARRAY:
        matched = take_array(walk, node, value);
        break;
    case IS:
        matched = value == node->first;
        break;
    case SAME:
        matched = is_same_constant(value, node->first, 0);
        break;
    case IS_OR:
        matched = value == node->first;
        if (!matched && Py_TYPE(value) == Py_TYPE(node->first)) {
            matched = ask(walk, node->second, value);
        }
        break;
    case HELD_OR:
        matched = 0;
        if ((PyObject *)Py_TYPE(value) == node->first) {
            matched = ask(walk, node->second, value);
            if (matched < 0 && PyErr_ExceptionMatches(PyExc_Exception)) {
                PyErr_Clear();
                matched = 0;
            }
            if (matched == 0) {
                matched = ask(walk, node->third, value);
            }
        }
        break;
    case TYPE_AND:
        matched = (PyObject *)Py_TYPE(value) == node->first ? ask(walk, node->second, value) : 0;
        break;
    case PREDICATE:
        matched = ask(walk, node->first, value);
        break;
    case BOTH:
        matched = walk_value(walk, at + 1, value);
        if (matched > 0) {
            matched = walk_value(walk, walk->nodes[at + 1].end, value);
        }
        break;
    case SEQUENCE:
        matched = (PyObject *)Py_TYPE(value) == node->first ? walk_sequence(walk, at, value) : 0;
        break;
    case DICT:
    case DICT_BY:
        matched = (PyObject *)Py_TYPE(value) == node->first ? walk_dict(walk, at, value) : 0;
        break;
    case FIELDS:
        matched = (PyObject *)Py_TYPE(value) == node->first ? walk_fields(walk, at, value) : 0;
        break;
    case REGISTERED:
        matched = (PyObject *)Py_TYPE(value) == node->first ? walk_registered(walk, at, value) : 0;
        break;
    default:
        PyErr_SetString(PyExc_SystemError, "no input");
        return -1;
    }
    if (matched == 0 && walk->failed_at < 0) {
        walk->failed_at = at;
    }
    if (matched > 0 && node->keeps) {
        if (walk->n_kept >= walk->match->n_kept) {
            PyErr_SetString(PyExc_SystemError, "more static objects than planned");
            return -1;
        }
        PyTuple_SET_ITEM(walk->kept, walk->n_kept++, Py_NewRef(value));
    }
    return matched;
}

static int
walk_arguments(Walk *walk, PyObject *const *args, Py_ssize_t n_args)
{
    Py_ssize_t n_nodes = walk->match->program->n_nodes;
    Py_ssize_t at = 0;
    for (Py_ssize_t i = 0; i < n_args; i++) {
        if (at >= n_nodes) {
            return 0;
        }
        /* The caller holds the arguments. */
        int matched = walk_value(walk, at, args[i]);
        if (matched <= 0) {
            return matched;
        }
        at = walk->nodes[at].end;
    }
    return at == n_nodes && walk->n_taken == walk->match->n_arrays &&
           walk->n_kept == walk->match->n_kept;
}

/* The part of a value, new, that a node below looks at, by the `index`th of its nodes, which stands
   for items from `item` on; NULL where there is none, or that isn't to be told without Python. */
static PyObject *
part_for(const Node *node, PyObject *value, Py_ssize_t index, Py_ssize_t item)
{
    PyObject *fields, *part = NULL;
    switch (node->op) {
    case SEQUENCE:
        if (PySequence_Fast_GET_SIZE(value) > item) {
            part = PySequence_Fast_GET_ITEM(value, item);
        }
        return Py_XNewRef(part);
    case DICT:
        if (has_keys_of(value, node->third)) {
            part = PyDict_GetItemWithError(value, PyTuple_GET_ITEM(node->second, index));
        }
        return Py_XNewRef(part);
    case FIELDS:
        fields = PyObject_GenericGetDict(value, NULL);
        if (fields != NULL && PyDict_CheckExact(fields)) {
            part = PyDict_GetItemWithError(fields, PyTuple_GET_ITEM(node->second, index));
            Py_XINCREF(part);
        }
        Py_XDECREF(fields);
        return part;
    default:
        return NULL;
    }
}

/* Whether a node can't match, by what is told without a look below, and without Python. */
static int
is_told_apart(const Node *node, PyObject *value)
{
    switch (node->op) {
    case IS:
        return value != node->first;
    case SAME:
        return is_same_constant(value, node->first, 0) == 0;
    case SEQUENCE:
        return (PyObject *)Py_TYPE(value) != node->first ||
               PySequence_Fast_GET_SIZE(value) != node->n;
    case DICT:
        return (PyObject *)Py_TYPE(value) != node->first ||
               PyDict_GET_SIZE(value) != PyTuple_GET_SIZE(node->second);
    case FIELDS:
        return (PyObject *)Py_TYPE(value) != node->first;
    default:
        return 0;
    }
}

/* Whether the node at which it failed fails again, or one above it. */
static int
fails_again(const Program *program, PyObject *const *args, Py_ssize_t n_args)
{
    const Node *nodes = program->nodes;
    Py_ssize_t target = program->failed_at, at = 0, index = 0;
    if (target < 0 || target >= program->n_nodes) {
        return 0;
    }
    while (nodes[at].end <= target) {
        at = nodes[at].end;
        index++;
    }
    PyObject *value = index < n_args ? Py_NewRef(args[index]) : NULL;
    int fails = 0;
    while (value != NULL) {
        fails = is_told_apart(&nodes[at], value);
        if (fails || at == target) {
            break;
        }
        const Node *above = &nodes[at];
        Py_ssize_t item = 0;
        for (index = 0, at++; nodes[at].end <= target; index++) {
            item += n_items_of(&nodes[at]);
            at = nodes[at].end;
        }
        if (nodes[at].op == REPEAT && at < target) {
            at++;
        }
        PyObject *part = above->op == BOTH ? Py_NewRef(value) : part_for(above, value, index, item);
        Py_DECREF(value);
        value = part;
    }
    Py_XDECREF(value);
    PyErr_Clear();
    return fails;
}

/* Return the flat arrays, a tuple, and what is kept, NULL if nothing is; or None, for no match. */
static PyObject *
match_arguments(Match *self, PyObject *const *args, Py_ssize_t n_args, PyObject **kept)
{
    PyObject *result = NULL;
    *kept = NULL;
    if (self->program == NULL || self->fun_arrays == NULL) {
        /* Its cycle is being collected. */
        Py_RETURN_NONE;
    }
    Py_ssize_t n_fun = PyTuple_GET_SIZE(self->fun_arrays);
    Program *program = self->program;
    Walk walk = {.match = self, .nodes = program->nodes, .failed_at = -1};
    /* The program and the arrays outlive whatever the walk runs. */
    Py_INCREF(self);
    if (fails_again(program, args, n_args)) {
        program->n_failed++;
        Py_DECREF(self);
        Py_RETURN_NONE;
    }
    walk.flat = hidden(PyTuple_New(self->n_arrays + n_fun));
    walk.kept = self->n_kept ? hidden(PyTuple_New(self->n_kept)) : NULL;
    if (walk.flat == NULL || (self->n_kept && walk.kept == NULL)) {
        goto done;
    }
    for (Py_ssize_t i = 0; i < n_fun; i++) {
        PyObject *array = PyTuple_GET_ITEM(self->fun_arrays, i);
        PyTuple_SET_ITEM(walk.flat, self->n_first + i, Py_NewRef(array));
    }
    int matched = walk_arguments(&walk, args, n_args);
    if (matched > 0 && walk.n_numpy) {
        matched = own_numpy(&walk);
    }
    if (matched < 0 && PyErr_ExceptionMatches(PyExc_Exception)) {
        PyErr_Clear();
        matched = 0;
    }
    if (matched == 0) {
        program->failed_at = walk.failed_at;
        program->n_matched = 0;
        program->n_failed++;
        program->n_failed_late += walk.has_asked;
        result = Py_NewRef(Py_None);
    }
    else if (matched > 0) {
        if (program->failed_at >= 0 && ++program->n_matched > LATELY) {
            program->failed_at = -1;
        }
        show(walk.flat);
        result = Py_NewRef(walk.flat);
        if (walk.kept != NULL) {
            show(walk.kept);
            *kept = Py_NewRef(walk.kept);
        }
    }
done:
    Py_XDECREF(walk.flat);
    Py_XDECREF(walk.kept);
    Py_DECREF(self);
    return result;
}

static PyObject *
match_call(PyObject *callable, PyObject *const *args, size_t n_args_flag, PyObject *kwnames)
{
    if (kwnames != NULL && PyTuple_GET_SIZE(kwnames) != 0) {
        PyErr_SetString(PyExc_TypeError, "Match takes no keyword arguments");
        return NULL;
    }
    PyObject *kept;
    PyObject *flat =
        match_arguments((Match *)callable, args, PyVectorcall_NARGS(n_args_flag), &kept);
    if (kept == NULL) {
        return flat;
    }
    PyObject *result = PyTuple_Pack(2, flat, kept);
    Py_DECREF(flat);
    Py_DECREF(kept);
    return result;
}

static PyObject *
match_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *program, *own, *numpy, *own_all, *fun_arrays;
    Py_ssize_t n_first, n_arrays, n_kept;
    PyTypeObject *program_type = program_type_of(type);
    if (program_type == NULL || has_keywords(type, kwargs) ||
        !PyArg_ParseTuple(args, "O!OOOO!nnn:Match", program_type, &program, &own, &numpy, &own_all,
                          &PyTuple_Type, &fun_arrays, &n_first, &n_arrays, &n_kept)) {
        return NULL;
    }
    if (n_first < 0 || n_first > n_arrays || n_kept < 0) {
        PyErr_SetString(PyExc_ValueError, "a number is out of bounds");
        return NULL;
    }
    Match *self = (Match *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->head.vectorcall = match_call;
    self->program = (Program *)Py_NewRef(program);
    self->own = own == Py_None ? NULL : Py_NewRef(own);
    self->numpy = own == Py_None ? NULL : Py_NewRef(numpy);
    self->own_all = own == Py_None ? NULL : Py_NewRef(own_all);
    self->fun_arrays = Py_NewRef(fun_arrays);
    self->n_first = n_first;
    self->n_arrays = n_arrays;
    self->n_kept = n_kept;
    return (PyObject *)self;
}

static int
match_traverse(Match *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->program);
    Py_VISIT(self->own);
    Py_VISIT(self->numpy);
    Py_VISIT(self->own_all);
    Py_VISIT(self->fun_arrays);
    return 0;
}

static int
match_clear(Match *self)
{
    Py_CLEAR(self->program);
    Py_CLEAR(self->own);
    Py_CLEAR(self->numpy);
    Py_CLEAR(self->own_all);
    Py_CLEAR(self->fun_arrays);
    return 0;
}

static PyType_Slot match_slots[] = {
    {Py_tp_doc, "Match(program, own, numpy, own_all, fun_arrays, n_first, n_arrays, n_kept): called with\n"
                "arguments, returns the flat arrays, with what is kept if anything is; or None."},
    {Py_tp_new, match_new},
    {Py_tp_call, PyVectorcall_Call},
    {Py_tp_members, callable_members},
    {Py_tp_dealloc, dealloc},
    {Py_tp_traverse, match_traverse},
    {Py_tp_clear, match_clear},
    {0, NULL},
};

static PyType_Spec match_spec = {
    .name = "eqxjit._native.Match",
    .basicsize = sizeof(Match),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |
             Py_TPFLAGS_IMMUTABLETYPE,
    .slots = match_slots,
};

/* --- Rebuild --------------------------------------------------------------------------------- */

typedef struct {
    Callable head;
    Program *program;
    PyObject *no_arguments;
} Rebuild;

typedef struct {
    const Node *nodes;
    PyObject *arrays;   /* a list, or the only array itself */
    PyObject *kept;     /* a tuple; NULL if nothing is */
    PyObject *no_arguments;
    Py_ssize_t n_taken;
} Build;

/* Of most Modules; the values of more don't fit on the stack. */
#define FEW_FIELDS 16

static PyObject *build_value(Build *build, Py_ssize_t at);

static PyObject *
next_array(Build *build)
{
    int is_list = PyList_CheckExact(build->arrays);
    Py_ssize_t index = build->n_taken++;
    if (index >= (is_list ? PyList_GET_SIZE(build->arrays) : 1)) {
        PyErr_SetString(PyExc_SystemError, "fewer arrays than planned");
        return NULL;
    }
    return Py_NewRef(is_list ? PyList_GET_ITEM(build->arrays, index) : build->arrays);
}

/* Fill a hidden list or tuple, and show it: 0, or -1 with an exception. */
static int
build_items(Build *build, Py_ssize_t at, PyObject *items, int is_list)
{
    const Node *node = &build->nodes[at];
    Py_ssize_t index = 0;
    for (Py_ssize_t child = at + 1; child < node->end; child = build->nodes[child].end) {
        const Node *part = &build->nodes[child];
        int is_run = part->op == TAKE_RUN || part->op == CONSTANT_RUN || part->op == MAKE_RUN;
        Py_ssize_t n = is_run ? part->n : 1;
        if (index + n > node->n) {
            PyErr_SetString(PyExc_SystemError, "more items than planned");
            return -1;
        }
        for (Py_ssize_t i = 0; i < n; i++, index++) {
            PyObject *item;
            switch (part->op) {
            case TAKE_RUN:
                item = next_array(build);
                break;
            case CONSTANT_RUN:
                item = PyTuple_GetItem(part->first, i);
                Py_XINCREF(item);
                break;
            case MAKE_RUN:
                item = build_value(build, child + 1);
                break;
            default:
                item = build_value(build, child);
            }
            if (item == NULL) {
                return -1;
            }
            if (is_list) {
                PyList_SET_ITEM(items, index, item);
            }
            else {
                PyTuple_SET_ITEM(items, index, item);
            }
        }
    }
    if (index != node->n) {
        PyErr_SetString(PyExc_SystemError, "fewer items than planned");
        return -1;
    }
    show(items);
    return 0;
}

static PyObject *
build_list(Build *build, Py_ssize_t at)
{
    PyObject *items = hidden(PyList_New(build->nodes[at].n));
    if (items != NULL && build_items(build, at, items, 1) < 0) {
        Py_CLEAR(items);
    }
    return items;
}

static PyObject *
build_tuple(Build *build, Py_ssize_t at, PyTypeObject *type)
{
    Py_ssize_t n = build->nodes[at].n;
    PyObject *items = hidden(type == &PyTuple_Type ? PyTuple_New(n) : type->tp_alloc(type, n));
    if (items != NULL && build_items(build, at, items, 0) < 0) {
        Py_CLEAR(items);
    }
    return items;
}

static PyObject *
build_dict(Build *build, Py_ssize_t at)
{
    PyObject *keys = build->nodes[at].first, *dict = PyDict_New();
    Py_ssize_t child = at + 1;
    for (Py_ssize_t i = 0; dict != NULL && i < PyTuple_GET_SIZE(keys); i++) {
        PyObject *value = build_value(build, child);
        if (value == NULL || PyDict_SetItem(dict, PyTuple_GET_ITEM(keys, i), value) < 0) {
            Py_CLEAR(dict);
        }
        Py_XDECREF(value);
        child = build->nodes[child].end;
    }
    return dict;
}

/* In this order, so that no Module is found or finalized whose fields can't be made. They are stored
   as Equinox does it: past the class, and CPython makes no dict before somebody asks for it. */
static PyObject *
build_module(Build *build, Py_ssize_t at)
{
    const Node *node = &build->nodes[at];
    Py_ssize_t n = PyTuple_GET_SIZE(node->second), n_made = 0;
    PyObject *few[FEW_FIELDS], **values = n <= FEW_FIELDS ? few : PyMem_New(PyObject *, n);
    if (values == NULL) {
        return PyErr_NoMemory();
    }
    for (Py_ssize_t child = at + 1; n_made < n; n_made++, child = build->nodes[child].end) {
        values[n_made] = build_value(build, child);
        if (values[n_made] == NULL) {
            break;
        }
    }
    PyObject *module = NULL;
    if (n_made == n) {
        module = PyBaseObject_Type.tp_new((PyTypeObject *)node->first, build->no_arguments, NULL);
    }
    for (Py_ssize_t i = 0; i < n_made; i++) {
        if (module != NULL &&
            PyObject_GenericSetAttr(module, PyTuple_GET_ITEM(node->second, i), values[i]) < 0) {
            Py_CLEAR(module);
        }
        Py_DECREF(values[i]);
    }
    if (values != few) {
        PyMem_Free(values);
    }
    return module;
}

static PyObject *
build_by_registry(Build *build, Py_ssize_t at)
{
    PyObject *items = build_list(build, at);
    if (items == NULL) {
        return NULL;
    }
    PyObject *made = PyObject_CallOneArg(build->nodes[at].first, items);
    Py_DECREF(items);
    return made;
}

static PyObject *
build_value(Build *build, Py_ssize_t at)
{
    const Node *node = &build->nodes[at];
    switch (node->op) {
    case TAKE:
        return next_array(build);
    case CONSTANT:
        return Py_NewRef(node->first);
    case KEPT:
        if (build->kept == NULL || node->n >= PyTuple_GET_SIZE(build->kept)) {
            PyErr_SetString(PyExc_SystemError, "fewer static objects than planned");
            return NULL;
        }
        return Py_NewRef(PyTuple_GET_ITEM(build->kept, node->n));
    case MAKE_LIST:
        return build_list(build, at);
    case MAKE_TUPLE:
        return build_tuple(build, at, &PyTuple_Type);
    case MAKE_NAMED_TUPLE:
        return build_tuple(build, at, (PyTypeObject *)node->first);
    case MAKE_DICT:
        return build_dict(build, at);
    case MAKE_MODULE:
        return build_module(build, at);
    case UNFLATTEN:
        return build_by_registry(build, at);
    default:
        PyErr_SetString(PyExc_SystemError, "no output");
        return NULL;
    }
}

/* Return the output for its arrays, and a tuple of what was kept, or NULL. */
static PyObject *
rebuild_output(Rebuild *self, PyObject *arrays, PyObject *kept)
{
    if (self->program == NULL || self->program->n_nodes == 0) {
        PyErr_SetString(PyExc_SystemError, "no program");
        return NULL;
    }
    Py_INCREF(self);
    Build build = {
        .nodes = self->program->nodes,
        .arrays = arrays,
        .kept = kept,
        .no_arguments = self->no_arguments,
    };
    PyObject *result = build_value(&build, 0);
    Py_DECREF(self);
    return result;
}

static PyObject *
rebuild_call(PyObject *callable, PyObject *const *args, size_t n_args_flag, PyObject *kwnames)
{
    Py_ssize_t n_args = PyVectorcall_NARGS(n_args_flag);
    if ((kwnames != NULL && PyTuple_GET_SIZE(kwnames) != 0) || n_args < 1 || n_args > 2 ||
        PyDict_CheckExact(args[0]) || (n_args == 2 && !PyTuple_Check(args[1]))) {
        PyErr_SetString(PyExc_TypeError, "Rebuild takes a list of arrays or one, and a tuple");
        return NULL;
    }
    return rebuild_output((Rebuild *)callable, args[0], n_args == 2 ? args[1] : NULL);
}

static PyObject *
rebuild_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *program;
    PyTypeObject *program_type = program_type_of(type);
    if (program_type == NULL || has_keywords(type, kwargs) ||
        !PyArg_ParseTuple(args, "O!:Rebuild", program_type, &program)) {
        return NULL;
    }
    Rebuild *self = (Rebuild *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->head.vectorcall = rebuild_call;
    self->no_arguments = PyTuple_New(0);
    if (self->no_arguments == NULL) {
        Py_DECREF(self);
        return NULL;
    }
    self->program = (Program *)Py_NewRef(program);
    return (PyObject *)self;
}

static int
rebuild_traverse(Rebuild *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->program);
    return 0;
}

static int
rebuild_clear(Rebuild *self)
{
    Py_CLEAR(self->program);
    Py_CLEAR(self->no_arguments);
    return 0;
}

static PyType_Slot rebuild_slots[] = {
    {Py_tp_doc, "Rebuild(program): called with a list of arrays, or the only one itself, and what\n"
                "Match kept, returns the output."},
    {Py_tp_new, rebuild_new},
    {Py_tp_call, PyVectorcall_Call},
    {Py_tp_members, callable_members},
    {Py_tp_dealloc, dealloc},
    {Py_tp_traverse, rebuild_traverse},
    {Py_tp_clear, rebuild_clear},
    {0, NULL},
};

static PyType_Spec rebuild_spec = {
    .name = "eqxjit._native.Rebuild",
    .basicsize = sizeof(Rebuild),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |
             Py_TPFLAGS_IMMUTABLETYPE,
    .slots = rebuild_slots,
};

/* --- Call ------------------------------------------------------------------------------------ */

/* The most parameters of a function whose keyword arguments are put in order here. */
#define MOST_PARAMETERS 16

typedef struct {
    Callable head;
    Match *match;
    Rebuild *rebuild;
    PyObject *jitted;
    PyObject *names;        /* of the parameters: a str each; None where it can't be passed by name */
    PyObject *defaults;     /* what stands for an argument left out; None where it can't be */
    Py_ssize_t n_positional;/* how many parameters can be passed by position */
    PyObject *otherwise;    /* what to call if the arguments don't match, or can't be bound here */
    PyObject *entry;
    PyObject *unclassified; /* the descriptor of its slot of this name */
    PyObject *miss;         /* the exception by which JAX says that it wants to trace, */
    PyObject *retrace;      /* and what is called then; */
    PyObject *explain;      /* what may raise a clearer exception for any other; */
    PyObject *finish;       /* what is called with an output that isn't as planned, and the arguments;
                               a function, by whose attributes the call is known */
    PyObject *hits;         /* its `next` counts a hit */
    PyObject *owner;        /* whose calls these are */
} Call;

#ifdef _MSC_VER
#define THREAD_LOCAL __declspec(thread)
#else
#define THREAD_LOCAL _Thread_local
#endif

/* A call of this thread while JAX makes it, which shows in no frame. On the heap, and linked both ways:
   greenlets swap the stack, and may end in another order than they began. */
typedef struct InFlight {
    const Call *call;
    PyObject *const *args;
    Py_ssize_t n_args;
    PyObject *kwnames;
    struct InFlight *outer;
    struct InFlight **from;
} InFlight;

static THREAD_LOCAL InFlight *innermost;

static void
begin(InFlight *here)
{
    here->outer = innermost;
    here->from = &innermost;
    if (here->outer != NULL) {
        here->outer->from = &here->outer;
    }
    innermost = here;
}

static void
end(InFlight *here)
{
    *here->from = here->outer;
    if (here->outer != NULL) {
        here->outer->from = here->from;
    }
}

static PyObject *
in_flight(PyObject *Py_UNUSED(module), PyObject *entry)
{
    const InFlight *here = innermost;
    while (here != NULL && here->call->entry != entry) {
        here = here->outer;
    }
    if (here == NULL) {
        Py_RETURN_NONE;
    }
    Py_ssize_t n_keywords = here->kwnames == NULL ? 0 : PyTuple_GET_SIZE(here->kwnames);
    PyObject *args = PyTuple_New(here->n_args), *kwargs = PyDict_New(), *found = NULL;
    if (args == NULL || kwargs == NULL) {
        goto done;
    }
    for (Py_ssize_t i = 0; i < here->n_args; i++) {
        PyTuple_SET_ITEM(args, i, Py_NewRef(here->args[i]));
    }
    for (Py_ssize_t k = 0; k < n_keywords; k++) {
        PyObject *value = here->args[here->n_args + k];
        if (PyDict_SetItem(kwargs, PyTuple_GET_ITEM(here->kwnames, k), value) < 0) {
            goto done;
        }
    }
    found = PyTuple_Pack(3, here->call->owner, args, kwargs);
done:
    Py_XDECREF(args);
    Py_XDECREF(kwargs);
    return found;
}

/* Where a name is among others, from an index on; their number if it isn't there. */
static Py_ssize_t
place_of(PyObject *names, PyObject *name, Py_ssize_t from)
{
    Py_ssize_t n = PyTuple_GET_SIZE(names), i = from;
    while (i < n && PyTuple_GET_ITEM(names, i) != name) {
        i++;
    }
    if (i < n) {
        return i;
    }
    /* Names that are put together at run time are others than those in the source. */
    for (i = from; i < n; i++) {
        PyObject *other = PyTuple_GET_ITEM(names, i);
        if (PyUnicode_Check(other) && PyUnicode_Check(name) && PyUnicode_Compare(other, name) == 0) {
            return i;
        }
    }
    return n;
}

/* Put the arguments in the order of the parameters: 1; 0 if that is for Python to do, or to refuse. */
static int
bind(const Call *self, PyObject *const *args, Py_ssize_t n_args, PyObject *kwnames,
     PyObject **bound)
{
    Py_ssize_t n_parameters = PyTuple_GET_SIZE(self->names);
    Py_ssize_t n_keywords = kwnames == NULL ? 0 : PyTuple_GET_SIZE(kwnames);
    if (n_parameters > MOST_PARAMETERS || n_args > self->n_positional) {
        return 0;
    }
    for (Py_ssize_t i = 0; i < n_parameters; i++) {
        bound[i] = i < n_args ? args[i] : NULL;
    }
    for (Py_ssize_t k = 0; k < n_keywords; k++) {
        Py_ssize_t i = place_of(self->names, PyTuple_GET_ITEM(kwnames, k), n_args);
        if (i == n_parameters) {
            return 0;
        }
        bound[i] = args[n_args + k];
    }
    for (Py_ssize_t i = n_args; i < n_parameters; i++) {
        if (bound[i] == NULL) {
            bound[i] = PyTuple_GET_ITEM(self->defaults, i);
            if (bound[i] == Py_None) {
                return 0;
            }
        }
    }
    return 1;
}

/* Call a function with the arguments of a call, behind `first`. */
static PyObject *
call_with(PyObject *function, PyObject *first, PyObject *const *args, size_t n_args_flag,
          PyObject *kwnames)
{
    Py_ssize_t n_args = PyVectorcall_NARGS(n_args_flag);
    Py_ssize_t n_all = n_args + (kwnames == NULL ? 0 : PyTuple_GET_SIZE(kwnames));
    PyObject **all = PyMem_New(PyObject *, n_all + 1);
    if (all == NULL) {
        return PyErr_NoMemory();
    }
    all[0] = first;
    for (Py_ssize_t i = 0; i < n_all; i++) {
        all[i + 1] = args[i];
    }
    PyObject *result = PyObject_Vectorcall(function, all, n_args + 1, kwnames);
    PyMem_Free(all);
    return result;
}

/* Let Python explain the exception that is set: it stays, unless Python raises a clearer one. */
static void
explain(Call *self, PyObject *const *args, size_t n_args_flag, PyObject *kwnames)
{
#if PY_VERSION_HEX >= 0x030C0000
    PyObject *error = PyErr_GetRaisedException();
#else
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    if (traceback != NULL) {
        PyException_SetTraceback(error, traceback);
    }
#endif
    PyObject *handled = PyErr_GetHandledException();
    PyErr_SetHandledException(error);
    PyObject *explained = PyObject_Vectorcall(self->explain, args, n_args_flag, kwnames);
    PyErr_SetHandledException(handled);
    Py_XDECREF(handled);
    if (explained == NULL) {
        Py_DECREF(error);
#if PY_VERSION_HEX < 0x030C0000
        Py_XDECREF(type);
        Py_XDECREF(traceback);
#endif
        return;
    }
    Py_DECREF(explained);
#if PY_VERSION_HEX >= 0x030C0000
    PyErr_SetRaisedException(error);
#else
    PyErr_Restore(type, error, traceback);
#endif
}

/* Return whether the output of the jitted function is as planned; -1 for an error. */
static int
is_as_planned(Call *self, PyObject *arrays)
{
    PyMemberDef *member = ((PyMemberDescrObject *)self->unclassified)->d_member;
    PyObject *unclassified = PyMember_GetOne((const char *)self->entry, member);
    if (unclassified == NULL) {
        return -1;
    }
    Py_DECREF(unclassified);
    return unclassified == Py_False && !PyDict_CheckExact(arrays);
}

static PyObject *
call_matched(Call *self, PyObject *flat, PyObject *kept, PyObject *const *args,
             size_t n_args_flag, PyObject *kwnames)
{
    InFlight *here = PyMem_New(InFlight, 1);
    if (here == NULL) {
        return PyErr_NoMemory();
    }
    here->call = self;
    here->args = args;
    here->n_args = PyVectorcall_NARGS(n_args_flag);
    here->kwnames = kwnames;
    begin(here);
    PyObject *arrays =
        PyObject_Vectorcall(self->jitted, PySequence_Fast_ITEMS(flat), PyTuple_GET_SIZE(flat), NULL);
    end(here);
    PyMem_Free(here);
    if (arrays == NULL) {
        if (PyErr_ExceptionMatches(self->miss)) {
            PyErr_Clear();
            return PyObject_Vectorcall(self->retrace, args, n_args_flag, kwnames);
        }
        if (PyErr_ExceptionMatches(PyExc_Exception)) {
            explain(self, args, n_args_flag, kwnames);
        }
        return NULL;
    }
    PyObject *result = NULL;
    int planned = is_as_planned(self, arrays);
    if (planned > 0) {
        Py_XDECREF(PyIter_Next(self->hits));
        result = rebuild_output(self->rebuild, arrays, kept);
    }
    else if (planned == 0) {
        result = call_with(self->finish, arrays, args, n_args_flag, kwnames);
    }
    Py_DECREF(arrays);
    return result;
}

/* Return what the call returns; NULL without an exception for no match. */
static PyObject *
call_if_matched(Call *self, PyObject *const *args, size_t n_args_flag, PyObject *kwnames)
{
    Py_ssize_t n_args = PyVectorcall_NARGS(n_args_flag);
    PyObject *in_order[MOST_PARAMETERS];
    PyObject *const *bound = args;
    if (self->finish == NULL) {
        PyErr_SetString(PyExc_ReferenceError, "the function is being garbage collected");
        return NULL;
    }
    Py_ssize_t n_parameters = PyTuple_GET_SIZE(self->names);
    if (kwnames != NULL || n_args != n_parameters || n_args > self->n_positional) {
        if (!bind(self, args, n_args, kwnames, in_order)) {
            return NULL;
        }
        bound = in_order;
    }
    PyObject *result = NULL, *kept;
    PyObject *flat = match_arguments(self->match, bound, n_parameters, &kept);
    if (flat != NULL && flat != Py_None) {
        result = call_matched(self, flat, kept, args, n_args_flag, kwnames);
    }
    Py_XDECREF(flat);
    Py_XDECREF(kept);
    return result;
}

static PyObject *
call_call(PyObject *callable, PyObject *const *args, size_t n_args_flag, PyObject *kwnames)
{
    PyObject *here = Py_NewRef(callable), *result = NULL;
    /* One after the other: there may be hundreds. */
    while (Py_TYPE(here) == Py_TYPE(callable)) {
        result = call_if_matched((Call *)here, args, n_args_flag, kwnames);
        if (result != NULL || PyErr_Occurred()) {
            goto done;
        }
        PyObject *otherwise = Py_NewRef(((Call *)here)->otherwise);
        Py_DECREF(here);
        here = otherwise;
    }
    result = PyObject_Vectorcall(here, args, n_args_flag, kwnames);
done:
    Py_DECREF(here);
    return result;
}

static PyObject *
call_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    State *state = PyType_GetModuleState(type);
    PyObject *match, *rebuild, *jitted, *names, *defaults, *otherwise, *entry, *unclassified, *miss;
    PyObject *retrace, *explain, *finish, *hits, *owner;
    Py_ssize_t n_positional;
    if (state == NULL || has_keywords(type, kwargs) ||
        !PyArg_ParseTuple(args, "O!O!OO!O!nOOO!OOOOOO:Call", state->match_type, &match,
                          state->rebuild_type, &rebuild, &jitted, &PyTuple_Type, &names,
                          &PyTuple_Type, &defaults, &n_positional, &otherwise, &entry,
                          &PyMemberDescr_Type, &unclassified, &miss, &retrace, &explain, &finish,
                          &hits, &owner)) {
        return NULL;
    }
    if (PyTuple_GET_SIZE(names) != PyTuple_GET_SIZE(defaults) || n_positional < 0 ||
        n_positional > PyTuple_GET_SIZE(names) || !PyIter_Check(hits) ||
        !PyObject_TypeCheck(entry, PyDescr_TYPE(unclassified))) {
        PyErr_SetString(PyExc_ValueError,
                        "a default for each name, please, an iterator, and a slot of the entry");
        return NULL;
    }
    Call *self = (Call *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->head.vectorcall = call_call;
    self->match = (Match *)Py_NewRef(match);
    self->rebuild = (Rebuild *)Py_NewRef(rebuild);
    self->jitted = Py_NewRef(jitted);
    self->names = Py_NewRef(names);
    self->defaults = Py_NewRef(defaults);
    self->n_positional = n_positional;
    self->otherwise = Py_NewRef(otherwise);
    self->entry = Py_NewRef(entry);
    self->unclassified = Py_NewRef(unclassified);
    self->miss = Py_NewRef(miss);
    self->retrace = Py_NewRef(retrace);
    self->explain = Py_NewRef(explain);
    self->finish = Py_NewRef(finish);
    self->hits = Py_NewRef(hits);
    self->owner = Py_NewRef(owner);
    return (PyObject *)self;
}

static int
call_traverse(Call *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->match);
    Py_VISIT(self->rebuild);
    Py_VISIT(self->jitted);
    Py_VISIT(self->names);
    Py_VISIT(self->defaults);
    Py_VISIT(self->otherwise);
    Py_VISIT(self->entry);
    Py_VISIT(self->unclassified);
    Py_VISIT(self->miss);
    Py_VISIT(self->retrace);
    Py_VISIT(self->explain);
    Py_VISIT(self->finish);
    Py_VISIT(self->hits);
    Py_VISIT(self->owner);
    return 0;
}

static int
call_clear(Call *self)
{
    /* First: without it, it isn't called any more. */
    Py_CLEAR(self->finish);
    Py_CLEAR(self->match);
    Py_CLEAR(self->rebuild);
    Py_CLEAR(self->jitted);
    Py_CLEAR(self->names);
    Py_CLEAR(self->defaults);
    Py_CLEAR(self->otherwise);
    Py_CLEAR(self->entry);
    Py_CLEAR(self->unclassified);
    Py_CLEAR(self->miss);
    Py_CLEAR(self->retrace);
    Py_CLEAR(self->explain);
    Py_CLEAR(self->hits);
    Py_CLEAR(self->owner);
    return 0;
}

static PyObject *
call_getattro(Call *self, PyObject *name)
{
    PyObject *value = PyObject_GenericGetAttr((PyObject *)self, name);
    if (value == NULL && self->finish != NULL && PyErr_ExceptionMatches(PyExc_AttributeError)) {
        PyErr_Clear();
        value = PyObject_GetAttr(self->finish, name);
    }
    return value;
}

static PyObject *
call_repr(Call *self)
{
    return PyObject_Repr(self->finish == NULL ? Py_None : self->finish);
}

static PyType_Slot call_slots[] = {
    {Py_tp_doc, "Call(match, rebuild, jitted, names, defaults, n_positional, otherwise,\n"
                "entry, unclassified, miss, retrace, explain, finish, hits, owner): a specialised call\n"
                "without a frame. What isn't as planned is left to those functions."},
    {Py_tp_new, call_new},
    {Py_tp_call, PyVectorcall_Call},
    {Py_tp_getattro, call_getattro},
    {Py_tp_repr, call_repr},
    {Py_tp_members, callable_members},
    {Py_tp_dealloc, dealloc},
    {Py_tp_traverse, call_traverse},
    {Py_tp_clear, call_clear},
    {0, NULL},
};

static PyType_Spec call_spec = {
    .name = "eqxjit._native.Call",
    .basicsize = sizeof(Call),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |
             Py_TPFLAGS_IMMUTABLETYPE,
    .slots = call_slots,
};

/* --- Delegate -------------------------------------------------------------------------------- */

typedef struct {
    Callable head;
    PyObject *target;
} Delegate;

static PyObject *
delegate_call(PyObject *callable, PyObject *const *args, size_t n_args_flag, PyObject *kwnames)
{
    PyObject *target = ((Delegate *)callable)->target;
    if (target == NULL) {
        PyErr_SetString(PyExc_AttributeError, "__call__");
        return NULL;
    }
    /* No frame of Python counts the calls of a target that leads back here. */
    if (Py_EnterRecursiveCall(" while calling a wrapper")) {
        return NULL;
    }
    /* The call may put another one in its place. */
    Py_INCREF(target);
    PyObject *result = PyObject_Vectorcall(target, args, n_args_flag, kwnames);
    Py_DECREF(target);
    Py_LeaveRecursiveCall();
    return result;
}

static PyObject *
delegate_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs))
{
    Delegate *self = (Delegate *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->head.vectorcall = delegate_call;
    }
    return (PyObject *)self;
}

static int
delegate_traverse(Delegate *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->target);
    return 0;
}

static int
delegate_clear(Delegate *self)
{
    Py_CLEAR(self->target);
    return 0;
}

/* Unlike `dealloc`, for subclasses, which have cleared what is theirs. */
static void
delegate_dealloc(Delegate *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    delegate_clear(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *
call_directly(PyObject *module, PyObject *cls)
{
    State *state = PyModule_GetState(module);
    if (!PyType_Check(cls) || !PyType_IsSubtype((PyTypeObject *)cls, state->delegate_type)) {
        PyErr_SetString(PyExc_TypeError, "a subclass of Delegate, please");
        return NULL;
    }
    ((PyTypeObject *)cls)->tp_flags |= Py_TPFLAGS_HAVE_VECTORCALL;
    return Py_NewRef(cls);
}

static PyMemberDef delegate_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Callable, vectorcall), READONLY, NULL},
    {"target", T_OBJECT_EX, offsetof(Delegate, target), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot delegate_slots[] = {
    {Py_tp_doc, "A base of classes whose instances, called, call their `target`."},
    {Py_tp_new, delegate_new},
    {Py_tp_call, PyVectorcall_Call},
    {Py_tp_members, delegate_members},
    {Py_tp_dealloc, delegate_dealloc},
    {Py_tp_traverse, delegate_traverse},
    {Py_tp_clear, delegate_clear},
    {0, NULL},
};

static PyType_Spec delegate_spec = {
    .name = "eqxjit._native.Delegate",
    .basicsize = sizeof(Delegate),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |
             Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_BASETYPE,
    .slots = delegate_slots,
};

/* --- The module ------------------------------------------------------------------------------ */

static int
module_exec(PyObject *module)
{
    State *state = PyModule_GetState(module);
    PyType_Spec *specs[] = {&program_spec,  &match_spec, &rebuild_spec,
                            &delegate_spec, &held_spec,  &call_spec};
    PyTypeObject **kept[] = {&state->program_type, &state->match_type, &state->rebuild_type,
                             &state->delegate_type};
    for (int i = 0; i < 6; i++) {
        PyObject *type = PyType_FromModuleAndSpec(module, specs[i], NULL);
        if (type == NULL) {
            return -1;
        }
        int failed = PyModule_AddType(module, (PyTypeObject *)type);
        if (i < 4 && !failed) {
            *kept[i] = (PyTypeObject *)Py_NewRef(type);
        }
        Py_DECREF(type);
        if (failed) {
            return -1;
        }
    }
    return PyModule_AddIntMacro(module, INTERFACE);
}

static int
module_traverse(PyObject *module, visitproc visit, void *arg)
{
    State *state = PyModule_GetState(module);
    Py_VISIT(state->program_type);
    Py_VISIT(state->match_type);
    Py_VISIT(state->rebuild_type);
    Py_VISIT(state->delegate_type);
    return 0;
}

static int
module_clear(PyObject *module)
{
    State *state = PyModule_GetState(module);
    Py_CLEAR(state->program_type);
    Py_CLEAR(state->match_type);
    Py_CLEAR(state->rebuild_type);
    Py_CLEAR(state->delegate_type);
    return 0;
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
#if PY_VERSION_HEX >= 0x030C0000
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
    {0, NULL},
};

static PyMethodDef module_methods[] = {
    {"plan", plan, METH_VARARGS,
     "plan(kinds, arities, metadata, classes, leaves, leaf_kind, kind_classes, dynamic, missing,\n"
     "array, is_array, shape_of, head_of, static_of): the instructions for a treedef, and how many\n"
     "arrays it has; those for an output if array is None."},
    {"in_flight", in_flight, METH_O,
     "in_flight(entry): the innermost Call of an entry that JAX is making in this thread, as\n"
     "(owner, args, kwargs); or None."},
    {"call_directly", call_directly, METH_O,
     "call_directly(cls): lets CPython call the instances of a subclass of Delegate without a look at\n"
     "their `__call__`; returns the class."},
    {"is_same", (PyCFunction)(void (*)(void))is_same, METH_FASTCALL,
     "is_same(value, expected): whether a value is the expected one, or a constant and the same."},
    {"has_more_parts", has_more_parts, METH_VARARGS,
     "has_more_parts(constant, n): whether it has more than n parts, itself included."},
    {"is_constant", is_constant, METH_O,
     "is_constant(value): whether a value is a constant that its hash tells."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,
    .m_name = "eqxjit._native",
    .m_doc = "The native back end of call plans.",
    .m_size = sizeof(State),
    .m_methods = module_methods,
    .m_slots = module_slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
};

PyMODINIT_FUNC
PyInit__native(void)
{
    return PyModuleDef_Init(&module_def);
}
