"""How do I serve a frozen model over HTTP, at low latency?

`train` writes a classifier of the UCI digits to a file. `serve` answers requests from this machine
with the file's program. `python -m bench.examples.digits_server --help` lists the options.
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
# Several times the size of a request whose numbers have all their digits.
MAX_BYTES = 16 * 1024


class Classifier(eqx.Module):
    """Takes an image, 8x8 pixels from 0 to 16 as in the data set, and returns ten probabilities.

    Scaling and softmax are part of the program, so that no server can get them wrong.
    """

    mlp: eqx.nn.MLP

    def __call__(self, image: jax.Array) -> jax.Array:
        """Classify one image. There are no batches, so that no request waits for others."""
        return jax.nn.softmax(self.mlp(jnp.ravel(image) / 16))


def train(path: str, epochs: int) -> None:
    """Train as `bench digits` does, and save the classifier."""
    # Imported only here, because serving needs neither the data nor the optimizer.
    from ..models import digits

    training, test = digits.digits()
    *_, last = digits.train(eqxjit.filter_jit, training, epochs)
    eqxjit.freeze(Classifier(last.model)).save(path, IMAGE)
    print(f"{path}: test accuracy {digits.accuracy(last.model, test):.1%}")


def load(path: str) -> eqxjit.types.FrozenFunction[..., Any]:
    """Load a classifier, compile it and call it once, so that the first request is fast."""
    model = eqxjit.load(path)
    # From now on another shape is an error. Compiling it would block all other requests.
    model.compile(IMAGE, other_shapes="raise")
    model(np.zeros(IMAGE.shape, IMAGE.dtype))
    return model


class Application:
    """The endpoints, with statistics. It runs in one event loop, so it needs no locks."""

    def __init__(self, model: eqxjit.types.FrozenFunction[..., Any]):
        self._model = model
        self._n_calls = 0
        self._latest: collections.deque[float] = collections.deque(maxlen=10_000)  # seconds a call
        self._rejected: collections.Counter[int] = collections.Counter()
        routes = [
            Route("/predict", self._predict, methods=["POST"]),
            Route("/latency", self._latency),
        ]
        handlers: Any = {HTTPException: self._reject}
        self.asgi = Starlette(routes=routes, exception_handlers=handlers)

    def report(self) -> dict[str, Any]:
        """Return the number and times of the model's calls, and the rejected requests by status.

        `traces` is how many times the model was traced or compiled in this process.
        """
        times = sorted(self._latest) or [0.0]
        return {
            "calls": self._n_calls,
            "microseconds": {
                f"p{p}": round(1e6 * times[int(len(times) * p / 100)], 1) for p in (50, 99, 99.9)
            },
            "rejected": {str(status): count for status, count in sorted(self._rejected.items())},
            "traces": self._model.cache_info().traces,
        }

    async def _predict(self, request: Request) -> Response:
        image = image_in(await body_of(request))
        start = time.perf_counter()
        # Call in the event loop, because a call takes 10 to 40 µs, and a pool of threads would add
        # more than 100 µs. Pass NumPy, because creating a JAX array costs more than the call.
        probabilities = np.asarray(self._model(image)).tolist()
        self._latest.append(time.perf_counter() - start)
        self._n_calls += 1
        digit = probabilities.index(max(probabilities))
        return JSONResponse({"digit": digit, "probabilities": probabilities})

    async def _latency(self, _: Request) -> Response:
        return JSONResponse(self.report())

    async def _reject(self, _: Request, error: HTTPException) -> Response:
        self._rejected[error.status_code] += 1
        return JSONResponse({"error": error.detail}, error.status_code, error.headers)


async def body_of(request: Request) -> bytes:
    """Read the body, up to a bound, because a client can send without end."""
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > MAX_BYTES:
                reject(413, f"The body is larger than {MAX_BYTES:,} bytes.")
    except ClientDisconnect:
        reject(400, "The body ended too early.")
    return bytes(body)


def image_in(body: bytes) -> np.ndarray:
    """Return the image in a body, in the dtype of the program; reject anything else."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        reject(400, f"The body isn't JSON ({error}).")
    try:
        image = np.array(content["image"])
    except (KeyError, TypeError, ValueError):
        image = np.zeros(0)
    # Strings, booleans and integers too large for NumPy have other kinds of dtypes.
    is_numbers = image.shape == IMAGE.shape and image.dtype.kind in "iuf"
    if not (is_numbers and np.all((image >= 0) & (image <= 16))):
        reject(422, "The body isn't an image.")
    return image.astype(np.float32)


def reject(status: int, reason: str) -> NoReturn:
    """Answer the request with an error."""
    raise HTTPException(status, f"{reason} {EXPECTED}")


def serve(path: str, port: int) -> None:
    """Answer requests until a signal arrives, then print the statistics."""
    # Asynchronous dispatch would hand each call to another thread, and gain nothing, because the
    # server waits for the result at once.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    try:
        application = Application(load(path))
    except (OSError, ValueError) as error:
        sys.exit(f"The model can't be served: {error}")
    # Imports and traces leave a hundred thousand objects that stay. The garbage collector would
    # need 70 ms to visit them, during some request. From now on it skips them.
    gc.collect()
    gc.freeze()
    # On either signal uvicorn finishes its requests, then raises the signal again.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit())
    # A public server belongs behind a proxy with TLS, limits and logs. For more cores, start more
    # processes.
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
    command = commands.add_parser(
        "serve", help="load a classifier, and answer requests from this machine"
    )
    command.add_argument("path")
    command.add_argument("--port", type=int, default=8000, help="0 for any free port")
    command.set_defaults(run=serve)
    arguments = vars(parser.parse_args(argv))
    arguments.pop("run")(**arguments)


if __name__ == "__main__":
    main()
