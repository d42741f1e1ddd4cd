"""The ASGI application: answers requests with a model, and keeps account of them."""

import asyncio
import collections
import time
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

import eqxjit

from .image import read_image
from .latency import Latencies

_PREDICT = "/predict"

# In seconds.
_PATIENCE = 0.5

_ENDPOINTS = "There are POST /predict, GET /latency and GET /health."


class Application:
    """Serves a classifier to whoever asks; for one event loop, hence without locks."""

    def __init__(self, model: eqxjit.types.FrozenFunction[..., Any]):
        self._model = model
        self._calls = Latencies()
        self._requests = Latencies()
        #: How long a request's body is waited for once the server ends, and those under way.
        self._patience: float | None = None
        self._reading: set[asyncio.Timeout] = set()
        self._refused: collections.Counter[int] = collections.Counter()
        self._starlette = Starlette(
            routes=[
                Route(_PREDICT, self._predict, methods=["POST"]),
                Route("/latency", self._latency),
                Route("/health", self._health),
            ],
            exception_handlers={HTTPException: self._refuse},
        )
        # `/predict/` isn't there, rather than moved.
        self._starlette.router.redirect_slashes = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request, as ASGI has it, and takes the time of a prediction."""
        start = time.perf_counter()
        await self._starlette(scope, receive, send)
        if scope["type"] == "http" and scope["path"] == _PREDICT:
            self._requests.add(time.perf_counter() - start)

    def end(self) -> None:
        """Gives requests that aren't complete a moment more; called in the event loop."""
        self._patience = _PATIENCE
        for reading in self._reading:
            reading.reschedule(asyncio.get_running_loop().time() + _PATIENCE)

    def report(self) -> dict[str, Any]:
        """What was served so far, and how fast.

        - `model`: the calls of the model, from a NumPy array to a list.
        - `request`: the requests for a prediction, answered or refused, from when their head has
            been read until their answer is written.
        - `refused`: how many requests were refused, by status.
        - `traces`: how often the model was traced or compiled in this process.
        """
        info = self._model.cache_info()
        return {
            "model": self._calls.report(),
            "request": self._requests.report(),
            "refused": {str(status): count for status, count in sorted(self._refused.items())},
            "traces": info.traces,
        }

    # --- Endpoints ----------------------------------------------------------------------------

    async def _predict(self, request: Request) -> Response:
        reading = asyncio.timeout(self._patience)
        try:
            async with reading:
                self._reading.add(reading)
                image = await read_image(request)
        except TimeoutError:
            # Not the request's fault, hence no refusal.
            return JSONResponse({"error": "The server is shutting down."}, 503)
        finally:
            self._reading.discard(reading)
        start = time.perf_counter()
        # In the event loop: a call takes 10 to 40 µs, to hand it to a pool of threads and wait more
        # than 100, and nobody waits long for it. NumPy in and out: to make a JAX array first would
        # cost more than the call itself.
        probabilities = np.asarray(self._model(image)).tolist()
        self._calls.add(time.perf_counter() - start)
        digit = probabilities.index(max(probabilities))
        return JSONResponse({"digit": digit, "probabilities": probabilities})

    async def _latency(self, request: Request) -> Response:
        return JSONResponse(self.report())

    async def _health(self, request: Request) -> Response:
        # The model has been called before the server listens.
        return JSONResponse({"status": "ok"})

    async def _refuse(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        self._refused[error.status_code] += 1
        is_lost = error.status_code in (404, 405)
        message = f"{error.detail}. {_ENDPOINTS}" if is_lost else error.detail
        return JSONResponse({"error": message}, error.status_code, error.headers)
