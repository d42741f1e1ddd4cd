"""Asks JAX whether it is tracing."""

from .._compat import is_staging


def currently_jitting() -> bool:
    """Return whether operations are being traced into a program right now, rather than executed.

    Answers as Equinox's (private) `currently_jitting` does, in about a hundredth of the time
    (`python -m bench startup` measures both).

    **Returns:**

    `True` inside `jax.jit`, `jax.lax.scan` and the like, also below a `jax.vmap` or `jax.grad`
    there; `False` outside, directly under `jax.vmap` or `jax.grad`, and within
    `jax.ensure_compile_time_eval`.

    !!! example

        ```python
        >>> import jax
        >>> from eqxjit import currently_jitting
        >>> currently_jitting()
        False
        >>> bool(jax.jit(lambda x: x & currently_jitting())(True))
        True

        ```
    """
    return is_staging()
