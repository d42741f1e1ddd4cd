"""Short texts of values and numbers, which users read, and switches, which they write."""

import difflib
import os
import signal
import traceback
import types
from typing import Any

_SWITCH = {
    "": None,
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}


def switch(name: str) -> bool | None:
    """Return whether an environment variable is on or off; None if it is unset or empty."""
    value = os.environ.get(name, "")
    if value.lower() not in _SWITCH:
        raise ValueError(
            f"The environment variable `{name}` is {value!r}. It takes `1`, `true`, `yes` or `on`, "
            "and `0`, `false`, `no` or `off`; or unset it."
        )
    return _SWITCH[value.lower()]


#: All environment variables that eqxjit reads.
SWITCHES = "EQXJIT_EXPLAIN_RETRACES", "EQXJIT_NATIVE", "EQXJIT_SPECIALIZE"


def unknown_switches() -> list[str]:
    """Return a sentence for each environment variable that looks like a switch and isn't one."""
    found: list[str] = []
    for name in os.environ:
        if name.upper().startswith(("EQXJIT_", "EQX_JIT_")) and name not in SWITCHES:
            similar = difflib.get_close_matches(name.upper(), SWITCHES, 1)
            hint = f"did you mean `{similar[0]}`?" if similar else f"eqxjit reads {_KNOWN}."
            found.append(f"The environment variable `{name}` has no effect: {hint}")
    return found


_KNOWN = ", ".join([f"`{name}`" for name in SWITCHES])


def short(value: Any, limit: int = 40) -> str:
    """Return the `repr` of a value on one line, cut to so many characters."""
    try:
        text = repr(value)
    except Exception as error:
        if comes_from_signal_handler(error):
            raise
        # The user's `repr` raised. The text is for an error or a description of something else.
        text = f"{type(value).__name__} object"
    text = " ".join(text.split())
    if not text.isprintable():
        # Source, or a terminal, takes no NUL and no half of a character.
        text = text.encode("unicode_escape").decode("ascii")
    return text if len(text) <= limit else text[: limit - 3] + "..."


def comes_from_signal_handler(error: BaseException) -> bool:
    """Return whether a signal handler raised an error, such as that of a timeout.

    Python runs a handler in the middle of whatever the main thread does. What it raises isn't an
    error of the interrupted code, so nothing that expects errors of that code may catch it.
    """
    handlers = [_code_of_handler(signal.getsignal(each)) for each in signal.valid_signals()]
    interrupted: types.FrameType | None = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        # A handler gets the frame that it interrupts, which comes right before its own frame. Its
        # code alone wouldn't tell, because some handlers put the former one back before they raise.
        passed = [*frame.f_locals.values()]
        passed += [each for value in passed if type(value) is tuple for each in value]
        if interrupted is not None and any(value is interrupted for value in passed):
            return True
        if frame.f_code in handlers:
            return True
        interrupted = frame
    return False


def _code_of_handler(handler: Any) -> Any:
    # A method has the code of its function, and an instance of a class is called by a function.
    for each in (handler, type(handler).__call__):
        code = getattr(each, "__code__", None)
        if isinstance(code, types.CodeType):
            return code
    return None


def times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def bytes_text(count: float) -> str:
    """Return a number of bytes with a unit, as `1.86 GB`."""
    for unit in ("B", "kB", "MB"):
        # Not 1e+03.
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
