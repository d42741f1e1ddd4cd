"""From the body of a request to an image: whatever else it holds is refused with the reason."""

import asyncio
import json
from typing import Any, NoReturn

import numpy as np
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

_SIDE = 8
_BRIGHTEST = 16

_WANTED = (
    f'Send JSON, {{"image": [[...], ...]}}: {_SIDE} rows of {_SIDE} numbers from 0 to {_BRIGHTEST}.'
)

# Several times what an image takes with all digits that a float can have.
_MAX_BYTES = 16 * 1024

# A client that sends half a body must not hold a connection for ever.
_MAX_SECONDS = 10

_NAMES: dict[type, str] = {
    bool: "a boolean",
    dict: "an object",
    float: "a number",
    int: "a number",
    list: "an array",
    str: "a string",
    type(None): "null",
}


async def read_image(request: Request) -> np.ndarray:
    """The image in a request.

    **Raises:**

    - `HTTPException`, with a status of 4xx and what is wrong, if it holds anything else.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        _refuse(415, f"The content type is {media_type!r}, not 'application/json'")
    return _image(_parsed(await _body(request)))


async def _body(request: Request) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(_MAX_SECONDS):
            async for part in request.stream():
                body += part
                # Looked at as it comes: a client can send without end, and lie about the length.
                if len(body) > _MAX_BYTES:
                    _refuse(413, f"The body is larger than {_MAX_BYTES:,} bytes")
    except TimeoutError:
        _refuse(408, f"The body took longer than {_MAX_SECONDS} seconds")
    except ClientDisconnect:
        # Nobody will read it, but it is counted.
        _refuse(400, "The body ended too early")
    return bytes(body)


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body, parse_constant=_refuse_constant)
    except RecursionError:
        _refuse(400, "The body is nested too deeply")
    except ValueError as error:
        # Also bytes that aren't UTF-8, and integers of more digits than Python reads.
        _refuse(400, f"The body isn't JSON ({error})")


def _refuse_constant(name: str) -> NoReturn:
    """For NaN and Infinity, which Python reads and JSON doesn't have."""
    _refuse(400, f"The body isn't JSON, which has no {name}")


def _image(content: Any) -> np.ndarray:
    if type(content) is not dict:
        _refuse(422, f"The body is {_NAMES[type(content)]}")
    if content.keys() != {"image"}:
        _refuse(422, 'The object doesn\'t have "image" as its only key')
    rows = content["image"]
    _check_array(rows, "image")
    for i, row in enumerate(rows):
        _check_array(row, f"image[{i}]")
        for j, pixel in enumerate(row):
            # By type: to Python a boolean is an integer.
            if type(pixel) is not float and type(pixel) is not int:
                _refuse(422, f"image[{i}][{j}] is {_NAMES[type(pixel)]}")
            if not 0 <= pixel <= _BRIGHTEST:
                _refuse(422, f"image[{i}][{j}] is out of range")
    return np.array(rows, np.float32)


def _check_array(value: Any, name: str) -> None:
    if type(value) is not list:
        _refuse(422, f"{name} is {_NAMES[type(value)]}")
    if len(value) != _SIDE:
        _refuse(422, f"{name} has a length of {len(value):,}")


def _refuse(status: int, reason: str) -> NoReturn:
    raise HTTPException(status, f"{reason}. {_WANTED}")
