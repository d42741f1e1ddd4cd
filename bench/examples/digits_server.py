"""A server: how do I serve a frozen model over HTTP, at low latency?

`train` writes a classifier of the UCI digits to a file, `serve` answers requests with it on this
machine alone. `python -m bench.examples.digits_server --help`.
"""

import argparse
import collections
import gc
import json
import signal
import sys
import time
from typing import Any, NoReturn

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import eqxjit

IMAGE = jax.ShapeDtypeStruct((8, 8), jnp.float32)
EXPECTED = 'Send JSON, {"image": [[...], ...]}: 8 rows of 8 numbers from 0 to 16.'
# Several times what an image takes with all digits that a float can have.
MAX_BYTES = 16 * 1024


class Classifier(eqx.Module):
    """From an image, 8x8 pixels from 0 to 16 as the data set has them, to ten probabilities.

    Scaling and softmax are part of the program, so that no server can get them wrong.
    """

    mlp: eqx.nn.MLP

    def __call__(self, image: jax.Array) -> jax.Array:
        """Apply the classifier to one image: a request needn't wait for others."""
        return jax.nn.softmax(self.mlp(jnp.ravel(image) / 16))


def train(path: str, epochs: int) -> None:
    """Train as `bench digits` does, and write the file."""
    # Imported only now: serving needs neither the data nor the optimizer.
    from ..models import digits

    training, test = digits.digits()
    *_, last = digits.train(eqxjit.filter_jit, training, epochs)
    eqxjit.freeze(Classifier(last.model)).save(path, IMAGE)
    print(f"{path}: test accuracy {digits.accuracy(last.model, test):.1%}")


def load(path: str) -> eqxjit.types.FrozenFunction[..., Any]:
    """Load a classifier, compiled and warm: its next call is as fast as all that follow."""
    model = eqxjit.load(path)
    # Any other shape is an error from now on, and no compilation while everybody waits.
    model.compile(IMAGE, other_shapes="raise")
    model(np.zeros(IMAGE.shape, IMAGE.dtype))
    return model


class Application:
    """The endpoints, and what they have served; for one event loop, hence without locks."""

    def __init__(self, model: eqxjit.types.FrozenFunction[..., Any]):
        self._model = model
        self._n_calls = 0
        self._latest: collections.deque[float] = collections.deque(maxlen=10_000)  # seconds a call
        self._refused: collections.Counter[int] = collections.Counter()
        routes = [
            Route("/predict", self._predict, methods=["POST"]),
            Route("/latency", self._latency),
        ]
        handlers: Any = {HTTPException: self._refuse}
        self.asgi = Starlette(routes=routes, exception_handlers=handlers)

    def report(self) -> dict[str, Any]:
        """Return the calls of the model, how long they took, and how many requests were refused.

        `traces` is how often the model was traced or compiled in this process.
        """
        times = sorted(self._latest) or [0.0]
        return {
            "calls": self._n_calls,
            "microseconds": {
                f"p{p}": round(1e6 * times[int(len(times) * p / 100)], 1) for p in (50, 99, 99.9)
            },
            "refused": {str(status): count for status, count in sorted(self._refused.items())},
            "traces": self._model.cache_info().traces,
        }

    async def _predict(self, request: Request) -> Response:
        image = image_in(await body_of(request))
        start = time.perf_counter()
        # In the event loop: a call takes 10 to 40 µs, to hand it to a pool of threads more than
        # 100. NumPy in and out: to make a JAX array first would cost more than the call itself.
        probabilities = np.asarray(self._model(image)).tolist()
        self._latest.append(time.perf_counter() - start)
        self._n_calls += 1
        digit = probabilities.index(max(probabilities))
        return JSONResponse({"digit": digit, "probabilities": probabilities})

    async def _latency(self, _: Request) -> Response:
        return JSONResponse(self.report())

    async def _refuse(self, _: Request, error: HTTPException) -> Response:
        self._refused[error.status_code] += 1
        return JSONResponse({"error": error.detail}, error.status_code, error.headers)


async def body_of(request: Request) -> bytes:
    """Read the body, up to a bound: a client can send without end."""
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > MAX_BYTES:
                refuse(413, f"The body is larger than {MAX_BYTES:,} bytes.")
    except ClientDisconnect:
        refuse(400, "The body ended too early.")
    return bytes(body)


def image_in(body: bytes) -> np.ndarray:
    """Return the image in a body, in the dtype of the program; refuse anything else."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        refuse(400, f"The body isn't JSON ({error}).")
    try:
        image = np.array(content["image"])
    except (KeyError, TypeError, ValueError):
        image = np.zeros(0)
    # Strings and booleans aren't numbers; integers that no float has are objects.
    is_numbers = image.shape == IMAGE.shape and image.dtype.kind in "iuf"
    if not (is_numbers and np.all((image >= 0) & (image <= 16))):
        refuse(422, "The body isn't an image.")
    return image.astype(np.float32)


def refuse(status: int, reason: str) -> NoReturn:
    """Answer with an error."""
    raise HTTPException(status, f"{reason} {EXPECTED}")


def serve(path: str, port: int) -> None:
    """Answer requests until a signal ends it, then print what was served."""
    # Asynchronous dispatch would pass each call on to another thread, and the server would wait for
    # the result at once.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    try:
        application = Application(load(path))
    except (OSError, ValueError) as error:
        sys.exit(f"The model can't be served: {error}")
    # Importing and tracing leaves a hundred thousand objects that stay. To look through them takes
    # the garbage collector 70 ms, in the midst of some request: from now on it passes them over.
    gc.collect()
    gc.freeze()
    # uvicorn finishes what it has begun on either signal, then raises it once more.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit())
    # A server for others belongs behind a proxy, which has TLS, limits and logs. For more cores,
    # start more processes.
    options: Any = {"host": "127.0.0.1", "access_log": False, "timeout_graceful_shutdown": 5}
    server = uvicorn.Server(uvicorn.Config(application.asgi, port=port, **options))
    try:
        server.run()
    finally:
        if server.started:
            print(json.dumps(application.report(), indent=1))


def main(argv: list[str] | None = None) -> None:
    """Run the chosen command."""
    parser = argparse.ArgumentParser(prog="python -m bench.examples.digits_server")
    commands = parser.add_subparsers(required=True, metavar="train | serve")
    command = commands.add_parser("train", help="train a classifier and write it to a file")
    command.add_argument("path")
    command.add_argument("--epochs", type=int, default=30)
    command.set_defaults(run=train)
    command = commands.add_parser("serve", help="load it, and answer requests on this machine")
    command.add_argument("path")
    command.add_argument("--port", type=int, default=8000, help="0 for any that is free")
    command.set_defaults(run=serve)
    arguments = vars(parser.parse_args(argv))
    arguments.pop("run")(**arguments)


if __name__ == "__main__":
    main()
