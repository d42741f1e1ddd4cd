"""The command line: trains the classifier, or serves it."""

import argparse
import gc
import json
import signal
import socket
import sys

import jax
import uvicorn

from . import classifier
from .application import Application

# No option: a server for others belongs behind a proxy, which has TLS, limits and logs.
_HOST = "127.0.0.1"


def main(argv: list[str] | None = None) -> None:
    """Runs the chosen command."""
    parser = argparse.ArgumentParser(prog="python -m bench.examples.digits_server")
    commands = parser.add_subparsers(required=True, metavar="train | serve")
    command = commands.add_parser("train", help="train a classifier and write it to a file")
    command.add_argument("path")
    command.add_argument("--epochs", type=int, default=30)
    command.set_defaults(run=train)
    command = commands.add_parser("serve", help=f"load it, and answer requests on {_HOST}")
    command.add_argument("path")
    command.add_argument("--port", type=int, default=8000, help="0 for any that is free")
    command.set_defaults(run=serve)
    arguments = vars(parser.parse_args(argv))
    arguments.pop("run")(**arguments)


def train(path: str, epochs: int) -> None:
    """Trains as `bench digits` does, and writes the file."""
    # Imported only now: serving needs neither the data nor the optimizer.
    import eqxjit

    from ...models import digits

    training, test = digits.digits()
    *_, last = digits.train(eqxjit.filter_jit, training, epochs)
    classifier.save(last.model, path)
    print(f"{path}: test accuracy {digits.accuracy(last.model, test):.1%}")


def serve(path: str, port: int) -> None:
    """Answers requests until a signal ends it, then prints what was served."""
    # Asynchronous dispatch would pass each call on to another thread, and the server would wait for
    # the result at once.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    try:
        model = classifier.load(path)
    except (OSError, ValueError) as error:
        sys.exit(f"The model can't be served: {error}")
    application = Application(model)
    # Importing and tracing leaves a hundred thousand objects that stay. To look through them takes
    # the garbage collector 70 ms, in the midst of some request: from now on it passes them over.
    gc.collect()
    gc.freeze()
    # uvicorn finishes what it has begun on either signal, then raises it once more.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit())
    # One process with one loop; for more cores, more processes. A line of log for each request
    # would cost more than the model, and what it tells is in the report.
    config = uvicorn.Config(
        application,
        host=_HOST,
        port=port,
        access_log=False,
        ws="none",
        timeout_graceful_shutdown=5,  # seconds; a client may never read its answer
    )
    server = _Server(config)
    try:
        server.run()
    finally:
        if server.started:
            print(json.dumps(application.report(), indent=1))


class _Server(uvicorn.Server):
    """Tells the application that it ends: a client may never finish its request."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends the server."""
        self.config.app.end()  # type: ignore[union-attr]
        await super().shutdown(sockets)


if __name__ == "__main__":
    main()
