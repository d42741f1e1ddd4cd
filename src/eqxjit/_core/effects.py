"""Tells whether a compiled program can raise at runtime, from what JAX lowered it to.

Only host callbacks and foreign calls can. The lowered module shows them all, also those that a
primitive hides from the jaxpr (lineax's solve, Equinox's `noinline`).
"""

from typing import Any

from .._compat import lowered_operations

# Custom calls that JAX emits itself and that report trouble by NaNs or not at all. A target that
# isn't listed here counts as a foreign call: waiting in vain is slow, not waiting loses an error.
_HARMLESS_TARGETS = frozenset(
    {
        "Sharding",
        "SPMDFullToShardShape",
        "SPMDShardToFullShape",
        "LayoutConstraint",
        "AllocateBuffer",
        "ApproxTopK",
        "TopK",
        "mhlo.topk",
        "mhlo.erf",
        "Qr",
        "ProductOfElementaryHouseholderReflectors",
        "annotate_device_placement",
        "xla.sdy.FuncResultSharding",
        "xla.sdy.GlobalToLocalShape",
        "xla.sdy.LocalToGlobalShape",
    }
)
_HARMLESS_PREFIXES = (
    "lapack_",
    "cusolver_",
    "cublas_",
    "cusparse_",
    "cu_",
    "hipsolver_",
    "hipblas_",
    "__cublas",
    "__cudnn",
    "mhlo.",
    "chlo.",
    "stablehlo.",
)
# How a TPU talks to its host in the middle of a program.
_HOST_TRANSFERS = frozenset({"stablehlo.send", "stablehlo.recv", "stablehlo.outfeed"})


def may_raise(module: Any) -> bool:
    """Return whether a StableHLO program can raise once it runs; True if that is unclear."""
    operations = lowered_operations(module)
    if operations is None:
        return True
    for name, target in operations:
        if name in _HOST_TRANSFERS:
            return True
        if target and target not in _HARMLESS_TARGETS and not target.startswith(_HARMLESS_PREFIXES):
            return True
    return False
