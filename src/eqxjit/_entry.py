"""One compiled entry: `jax.jit` over flat array leaves, for one static structure of a call."""

import contextlib
import inspect
import sys
import weakref
from collections.abc import Callable, Hashable, Sequence
from types import FrameType, MethodType
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.tree_util import tree_flatten, tree_unflatten

from ._binding import Binding
from ._callbacks import may_raise
from ._changeable import are_unchanged, changeable_among
from ._compat import PyTreeDef, debug_info, is_staging, wrapped_by_tracer
from ._debug_info import argument_names
from ._description import Description, Template
from ._events import observers
from ._given import Given, StaticOutput, have_same_given
from ._jaxpr_size import size_of
from ._key_cache import Seen, treedef_key
from ._numpy_inputs import NumpyInputs
from ._options import Options
from ._partition import DYNAMIC, StaticHalf, has_tracers, split_leaves
from ._stack import CALL_VARIABLE, ENTRY_VARIABLE
from ._trace import Trace

if TYPE_CHECKING:
    from ._site import Site
    from ._specialize import SpecializedCall


class Retrace(Exception):
    """JAX wants to trace in the middle of a warm call: the call must go through the miss path."""


#: What a traced function returns to JAX: its arrays. Those of a trace whose output differs from the
#: first one's in anything but arrays come under the index of its description (see `Entry`).
Output = list[Any] | dict[int, list[Any]]


class OutputDescription(StaticOutput):
    """What a trace returned beside its arrays.

    - `changeable`: the static objects in it that can be changed in place, and didn't come in.
    """

    __slots__ = ("changeable",)

    def __init__(self, treedef: PyTreeDef, leaves: tuple[Any, ...], given: Given):
        super().__init__(treedef, leaves, given)
        # A method changes with its object, which compares by identity.
        found = changeable_among(self.own)
        self.changeable = [pair for pair in found if type(pair.value) is not MethodType]

    def rebuild(self, arrays: list[Any], given: Given | None) -> Any:
        """The output of a call. (A marker behind the last array isn't looked at.)"""
        remaining = iter(arrays)
        static, treedef = self.resolve(given)
        leaves = [next(remaining) if leaf is DYNAMIC else leaf for leaf in static]
        return tree_unflatten(treedef, leaves)

    def describes(self, treedef: PyTreeDef, leaves: tuple[Any, ...], given: Given) -> bool:
        """Whether another trace's output differs in its arrays alone."""
        try:
            own, own_treedef = self.resolve(given)
            if len(leaves) != len(own):
                return False
            if not all(ours is theirs for ours, theirs in zip(own, leaves, strict=True)):
                return False
            if not have_same_given(own_treedef, treedef, given):
                return False
            return treedef_key(own_treedef) == treedef_key(treedef)
        except Exception:
            # Metadata that can't be compared belongs to the one trace that made it.
            return False


class Call:
    """One call on its way through the miss path.

    - `site`: the way of the wrapper that was called.
    - `entry`: the entry that serves it.
    - `arguments`: the static half of `(args, kwargs)`.
    - `leaves`: their arrays; empty once the call is over.
    - `traces`: the traces of the user's function that JAX has made in this call.
    - `description`: of the call, where it is needed once the call is over.
    - `jaxpr`: the first that JAX lowers then; None once the call is over.
    - `may_raise`: whether a program that JAX compiles then can raise; None where that isn't known.
    - `user_raised`: whether the user's function, or a node of theirs, raised while it was traced.
    """

    __slots__ = (
        "arguments",
        "description",
        "entry",
        "jaxpr",
        "leaves",
        "may_raise",
        "site",
        "traces",
        "user_raised",
    )

    def __init__(self, site: "Site", entry: "Entry", arguments: StaticHalf, leaves: list[Any]):
        self.site = site
        self.entry = entry
        self.arguments = arguments
        self.leaves = leaves
        self.traces: list[Trace] = []
        self.jaxpr: Any = None
        self.may_raise: bool | None = None
        self.description: Description | None = None
        self.user_raised = False


def _current_call() -> Call | None:
    """The call that JAX traces for now; None if it is in a warm call."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        names = frame.f_code.co_varnames
        if CALL_VARIABLE in names:
            return frame.f_locals.get(CALL_VARIABLE)
        if ENTRY_VARIABLE in names or ENTRY_VARIABLE in frame.f_globals:
            return None
        frame = frame.f_back
    return None


class Entry:
    """One static structure of a function: its jitted form and what its traces returned."""

    __slots__ = (
        "__weakref__",
        "attempts_left",
        "blocks",
        "descriptions",
        "fate",
        "hides_donation_warning",
        "hits",
        "hits_needed",
        "jitted",
        "key",
        "known_by_address",
        "label",
        "last_used",
        "met_as",
        "n_first",
        "name",
        "numpy_inputs",
        "resting",
        "seconds_of_first_call",
        "specialized",
        "template",
        "traces",
        "unclassified",
        "unspecializable",
        "watches",
    )

    def __init__(self, binding: Binding, options: Options, n_first: int, donated: tuple[int, ...]):
        self.name = binding.name
        self.label = binding.label
        #: Why the program gave it up, once it did; its traces share the list.
        self.fate: list[str] = []
        #: How many arrays the first argument has: those come first, then the function's own.
        self.n_first = n_first
        #: Nothing of it goes to JAX, which keeps the structure of outputs for good.
        self.descriptions: list[OutputDescription] = []
        #: Warm calls through the generic path since the specialised call was last lacking, and how
        #: many of them make it worth its making.
        self.hits = 0
        self.hits_needed = 1
        self.seconds_of_first_call = 0.0
        #: What describes its calls, and the function's static half that is described with it.
        self.template: tuple[Template, weakref.ref[StaticHalf] | None] | None = None
        #: How often making the specialised call may still take too long.
        self.attempts_left = 3
        self.specialized: SpecializedCall | None = None
        #: A specialised call that is out of use until the next call (see `Program`).
        self.resting: SpecializedCall | None = None
        #: Under what the program holds it: the typed static key, and that of a scan, with what must
        #: live for that to be valid.
        self.key: Hashable = None
        self.met_as: Hashable = None
        self.known_by_address: list[weakref.ref[Any]] = []
        #: The greater, the later.
        self.last_used = 0
        #: Weak references to static objects, which tell the program when those die.
        self.watches: list[weakref.ref[Any]] = []
        #: Whether the generic path must serve this structure for good.
        self.unspecializable = False
        self.traces = 0
        self.numpy_inputs = NumpyInputs()
        #: Whether some program of this entry must be waited for, because it can raise.
        self.blocks = options.block
        #: Whether JAX's warning of donated buffers that weren't usable is hidden.
        self.hides_donation_warning = options.hides_donation_warning
        #: Whether a program of this entry, traced or compiled anew, hasn't been looked at yet.
        self.unclassified = False
        # `jax.jit` as it is now: `EQX_ON_ERROR=breakpoint` replaces it.
        self.jitted: Any = jax.jit(
            _Traced(binding, weakref.ref(self)),
            donate_argnums=donated,
            **dict(options.jit_arguments),
        )

    def template_for(self, fun: StaticHalf | None) -> Template | None:
        """What describes its calls together with this static half of the function, if kept."""
        if self.template is None:
            return None
        template, fun_ref = self.template
        if fun is None or fun_ref is None:
            return template if fun is fun_ref else None
        return template if fun_ref() is fun else None

    def flat(self, fun_leaves: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
        """All arrays of a call, in the order of upstream, in which JAX reuses donated ones."""
        return [*leaves[: self.n_first], *fun_leaves, *leaves[self.n_first :]]

    def execute(self, jitted: Callable[..., Output], flat: Sequence[Any]) -> Output:
        """Call the jitted function, or what it was compiled to, with all arrays of a call."""
        if self.blocks:
            return jitted(*flat)
        return self.numpy_inputs.call(jitted, flat, wait_for)

    def is_intact(self, seen: Seen | None = None) -> bool:
        """Whether the static objects that this entry returns are as they were when it was traced.

        Those that came in are each call's own. If a caller has changed others in place, they are no
        longer those that later calls should get back.
        """
        return all(are_unchanged(d.changeable, seen) for d in self.descriptions)

    @property
    def returns_changeable(self) -> bool:
        """Whether there is anything for `is_intact` to look at."""
        return any(description.changeable for description in self.descriptions)

    def describe(self, out: Any, given: Given) -> Output:
        """What the traced function returns to JAX for the output of the user's function."""
        leaves, treedef = tree_flatten(out)
        dynamic, static = split_leaves(leaves)
        for description in tuple(self.descriptions):
            if description.describes(treedef, static, given):
                break
        else:
            description = OutputDescription(treedef, static, given)
            self.descriptions.append(description)
        self.traces += 1
        self.unclassified = not self.blocks
        # A program without an output could not be waited for.
        arrays = dynamic or [jnp.zeros((), bool)]
        index = self.descriptions.index(description)
        return {index: arrays} if index else arrays

    def returns_given(self, output: Output) -> bool:
        """Whether `rebuild` needs what came in with the call."""
        return self.descriptions[index_of(output)].is_given

    def rebuild(self, output: Output, given: Given | None) -> Any:
        """The user's output, from what JAX returned for a call."""
        return self.descriptions[index_of(output)].rebuild(arrays_of(output), given)

    def measure(self, trace: Trace, leaves: list[Any], jaxpr: Any) -> None:
        """Fill in the size of a trace, made just now for these leaves and lowered from `jaxpr`."""
        try:
            if has_tracers(leaves):
                # It became part of an outer program, which is measured; and asking takes its time.
                jaxpr = self.jitted.trace(*leaves).jaxpr if observers else None
            elif jaxpr is None:
                jaxpr = self.jitted.trace(*leaves).jaxpr
            if jaxpr is not None:
                trace.equations, trace.busiest_line = size_of(jaxpr)
        except Exception:
            # No `trace` (`EQX_ON_ERROR=breakpoint`).
            pass

    def classify(self, leaves: list[Any], blocks: bool | None = None) -> bool:
        """Looks at the program for these leaves, which has just run; False if it can't be told.

        Served from JAX's caches, which takes its time, unless `blocks` says if it can raise.
        `unclassified` is for the caller to unset, when all is done.
        """
        if has_tracers(leaves):
            # The outer program is what runs. A later call with arrays is served by this trace.
            return False
        try:
            if blocks is None:
                blocks = may_raise(self.jitted.lower(*leaves).compiler_ir("stablehlo"))
        except Exception:
            # No `lower` (`EQX_ON_ERROR=breakpoint`), or nothing that it knows.
            blocks = True
        self.blocks = self.blocks or blocks
        return True


def index_of(output: Output) -> int:
    """Which of an entry's descriptions is that of an output."""
    return next(iter(output)) if isinstance(output, dict) else 0


def arrays_of(output: Output) -> list[Any]:
    """The arrays of an output."""
    return next(iter(output.values())) if isinstance(output, dict) else output


def wait_for(output: Output) -> None:
    """Waits until a program has run, so that its error is raised here."""
    pending: list[Any] = list(arrays_of(output))
    while pending:
        array = pending.pop()
        if isinstance(array, Tracer):
            # Under an eager `vmap` or `grad` the program has run all the same.
            pending.extend(wrapped_by_tracer(array))
        elif isinstance(array, jax.Array):
            array.block_until_ready()


def holds_tracer(output: Output) -> bool:
    """Whether a call was part of some transformation, rather than run for itself."""
    return has_tracers(arrays_of(output))


class _Traced:
    """The function that JAX traces: it rebuilds the call that is in the miss path, and makes it.

    It refers to nothing of the user's: JAX keeps what it jits longer than its user does.
    """

    # Asked for by JAX each time, and slow to find out.
    __signature__ = inspect.Signature(
        [inspect.Parameter("leaves", inspect.Parameter.VAR_POSITIONAL)]
    )

    def __init__(self, binding: Binding, entry_ref: "weakref.ref[Entry]"):
        self.__name__ = self.__qualname__ = binding.name
        self._source = "_".join(binding.name.split()) or "function"
        self._entry_ref = entry_ref
        self._debug_info: Any = None
        if binding.location is not None:
            self._source += f" at {binding.location}"
            # By which JAX finds the place, where it doesn't ask for `__fun_debug_info__`.
            self.__code__ = binding.location.code

    def __repr__(self) -> str:
        return self._source

    @property
    def __fun_debug_info__(self) -> Any:
        """What JAX is to call the function and its arguments; None, for what it finds itself."""
        call = _current_call()
        if self._debug_info is None and call is not None and call.entry is self._entry_ref():
            wrapped = call.site.wrapped
            names = argument_names(wrapped.binding, call.arguments, wrapped.fun, call.entry.n_first)
            self._debug_info = debug_info(self._source, names)
        return self._debug_info

    def __call__(self, *leaves: Any) -> Output:
        call = _current_call()
        entry = self._entry_ref()
        # With `jax_debug_nans` JAX also runs what has made a NaN, on the arrays themselves.
        is_traced = has_tracers(leaves) or (not leaves and is_staging())
        if not is_traced:
            _check_not_donated(self.__name__, leaves)
        if call is None or entry is None or call.entry is not entry:
            raise Retrace
        fun_static, arguments = call.site.wrapped.fun, call.arguments
        # The user's function may call its own wrapper, which is a call of its own.
        __eqxjit_call__ = None  # noqa: F841
        try:
            with call.site.tracing(call) if is_traced else contextlib.nullcontext():
                start, stop = entry.n_first, entry.n_first + fun_static.n_arrays
                fun = fun_static.combine(leaves[start:stop])
                args, kwargs = arguments.combine(leaves[:start] + leaves[stop:])
                return entry.describe(fun(*args, **kwargs), call.site.given(arguments))
        except BaseException:
            call.user_raised = True
            raise


def _check_not_donated(name: str, leaves: Sequence[Any]) -> None:
    """Raise JAX's error for a NaN where JAX can't find it, because the arrays are gone."""
    config: Any = jax.config
    if config.jax_disable_jit or not (config.jax_debug_nans or config.jax_debug_infs):
        return
    if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves):
        raise FloatingPointError(
            f"invalid value (nan or inf) encountered in the output of `{name}`. Which operation "
            "made it can't be found, because the arguments were donated: call it without `donate`."
        )
