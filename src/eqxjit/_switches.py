"""The environment variables that switch something on or off, read once, at import."""

import os

_VALUES = dict.fromkeys(("1", "true", "yes", "on"), True)
_VALUES |= dict.fromkeys(("0", "false", "no", "off"), False)


def switch(name: str) -> bool | None:
    """Return whether an environment variable is on or off; None if it is unset or empty.

    **Raises:**

    - `ValueError`: for a value that is neither, which would otherwise be taken for one of them.
    """
    value = os.environ.get(name, "")
    if value and value.lower() not in _VALUES:
        raise ValueError(
            f"The environment variable `{name}` is {value!r}. It takes `1`, `true`, `yes` or `on`, "
            "and `0`, `false`, `no` or `off`; or unset it."
        )
    return _VALUES.get(value.lower())
