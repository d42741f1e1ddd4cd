"""Short texts for values of the user's, whatever their `repr` does."""

from typing import Any


def short(value: Any, limit: int = 40) -> str:
    """Return the `repr` of a value on one line, cut to so many characters."""
    if type(value) is str and len(value) <= limit - 2 and value.isidentifier():
        # Most keys of dicts.
        return f"'{value}'"
    try:
        text = " ".join(repr(value).split())
    except KeyboardInterrupt:
        raise
    except BaseException:
        text = f"{type(value).__name__} object"
    if not text.isprintable():
        # Source, or a terminal, takes no NUL and no half of a character.
        text = text.encode("unicode_escape").decode("ascii")
    return text if len(text) <= limit else text[: limit - 3] + "..."
