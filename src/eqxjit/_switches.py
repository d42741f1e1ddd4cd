"""The environment variables that switch something on or off, read once, at import."""

import os

_ON, _OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def switch(name: str) -> bool | None:
    """Return whether an environment variable is on or off; None if it is unset or empty.

    **Raises:**

    - `ValueError`: for a value that is neither, which would otherwise be taken for one of them.
    """
    value = os.environ.get(name, "")
    if value and value.lower() not in _ON + _OFF:
        raise ValueError(
            f"The environment variable `{name}` is {value!r}. It takes `1`, `true`, `yes` or `on`, "
            "and `0`, `false`, `no` or `off`; or unset it."
        )
    return value.lower() in _ON if value else None
