"""Short texts of values and numbers for messages, and switches in environment variables."""

import difflib
import os
from typing import Any

from ._signals import suppressed

# The setting of a switch, by the value of its environment variable in lower case.
_SETTINGS = {
    "": None,
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}


def switch(name: str) -> bool | None:
    """Return whether an environment variable is on or off; None if it is unset or empty."""
    value = os.environ.get(name, "")
    if value.lower() not in _SETTINGS:
        raise ValueError(
            f"The environment variable `{name}` is {value!r}. It takes `1`, `true`, `yes` or `on`, "
            "and `0`, `false`, `no` or `off`; or unset it."
        )
    return _SETTINGS[value.lower()]


#: All environment variables that eqxjit reads.
SWITCHES = "EQXJIT_EXPLAIN_RETRACES", "EQXJIT_NATIVE", "EQXJIT_SPECIALIZE"


def unknown_switches() -> list[str]:
    """Return a sentence for each environment variable that looks like a switch and isn't one."""
    known = ", ".join([f"`{name}`" for name in SWITCHES])
    sentences: list[str] = []
    for name in os.environ:
        if name.upper().startswith(("EQXJIT_", "EQX_JIT_")) and name not in SWITCHES:
            similar = difflib.get_close_matches(name.upper(), SWITCHES, 1)
            hint = f"did you mean `{similar[0]}`?" if similar else f"eqxjit reads {known}."
            sentences.append(f"The environment variable `{name}` has no effect: {hint}")
    return sentences


def short(value: Any, limit: int = 40) -> str:
    """Return the `repr` of a value on one line, cut to `limit` characters."""
    text = f"{type(value).__name__} object"
    # If the user's `repr` raises, that error isn't shown, because the text is only a part of a
    # message, which matters more.
    with suppressed:
        text = repr(value)
    text = " ".join(text.split())
    if not text.isprintable():
        # Generated source can't contain a NUL, and a terminal can't print a lone surrogate.
        text = text.encode("unicode_escape").decode("ascii")
    return text if len(text) <= limit else text[: limit - 3] + "..."


def times(count: int) -> str:
    """Return `once`, or `3 times`."""
    return "once" if count == 1 else f"{count} times"


def counted(count: int, noun: str) -> str:
    """Return a number with its noun, such as `1 array` or `3 arrays`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def bytes_text(count: float) -> str:
    """Return a number of bytes with a unit, such as `1.86 GB`."""
    for unit in ("B", "kB", "MB"):
        # Not 1000, because `999.6` with three digits would read `1e+03`.
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
