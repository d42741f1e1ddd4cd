"""The server of the digits: right answers under load, and a reason for whatever it refuses."""

import asyncio
import contextlib
import io
import itertools
import json
import re
import signal
import socket
import subprocess
import sys
import time

import equinox as eqx
import httpx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.examples.digits_server.__main__ import main
from bench.models import digits
from tests.support.processes import ROOT

pytestmark = pytest.mark.slow

_EPOCHS = 10
# A proxy in the environment is not for the loopback.
_OPTIONS = {"headers": {"content-type": "application/json"}, "timeout": 30, "trust_env": False}
_HEAD = b"""POST /predict HTTP/1.1\r
Host: localhost\r
Content-Type: application/json\r
Content-Length: %d\r
\r
"""

_CLIENTS = 16
_REQUESTS = 2_000


# --- Processes --------------------------------------------------------------------------------


def serve(path, port, stderr):
    return subprocess.Popen(
        [sys.executable, "-m", "bench.examples.digits_server", "serve", path, f"--port={port}"],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )


def end(process):
    """Whatever a test came to, nothing is left running."""
    process.kill()
    process.communicate()


class Server:
    """A server process on a free port, which is up."""

    def __init__(self, path, log, stack):
        self.log = log
        with log.open("w") as stderr:
            self.process = serve(path, 0, stderr)
        stack.callback(end, self.process)
        deadline = time.monotonic() + 300
        while not (found := re.search(r"running on http://127\.0\.0\.1:(\d+)", log.read_text())):
            assert self.process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, "not up within five minutes"
            time.sleep(0.05)
        self.port = int(found[1])
        self.url = f"http://127.0.0.1:{self.port}"

    def connect(self):
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)

    def end(self, number):
        """Sends a signal, and returns what is printed then."""
        self.process.send_signal(number)
        printed, _ = self.process.communicate(timeout=15)
        assert self.process.returncode == 0
        return json.loads(printed)


@contextlib.contextmanager
def serving(path, log):
    with contextlib.ExitStack() as stack:
        yield Server(path, log, stack)


@pytest.fixture(scope="module")
def model():
    """The plain Equinox model, trained under upstream's `filter_jit`."""
    training, _ = digits.digits()
    *_, last = digits.train(eqx.filter_jit, training, _EPOCHS)
    return last.model


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """The file that the command line writes, of the same weights."""
    path = tmp_path_factory.mktemp("digits") / "model.eqxjit"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        main(["train", str(path), "--epochs", str(_EPOCHS)])
    assert float(re.search(r"test accuracy (.*)%", printed.getvalue())[1]) > 90
    return path


@pytest.fixture(scope="module")
def server(path, tmp_path_factory):
    with serving(path, tmp_path_factory.mktemp("server") / "log") as server:
        yield server
        server.end(signal.SIGINT)
        log = server.log.read_text()
        assert "Traceback" not in log
        assert "ERROR" not in log


@pytest.fixture(scope="module")
def client(server):
    with httpx.Client(base_url=server.url, **_OPTIONS) as client:
        yield client


@pytest.fixture(scope="module")
def images():
    """Those of the test set, with pixels from 0 to 16."""
    _, (images, _) = digits.digits()
    return images.reshape(-1, 8, 8) * 16


@pytest.fixture(scope="module")
def expected(model, images):
    """The probabilities of each."""
    logits = jax.vmap(model)(jnp.asarray(images).reshape(-1, 64) / 16)
    probabilities = np.asarray(jax.nn.softmax(logits))
    # No two are so much alike that an answer to one would do for the other.
    for one, other in itertools.pairwise(np.array(sorted(probabilities.tolist()))):
        assert not is_close(one, other)
    return probabilities


def is_close(one, other):
    return np.allclose(one, other, rtol=1e-4, atol=1e-7)


def body(pixels):
    return json.dumps({"image": np.asarray(pixels).tolist()})


def assert_answer(response, probabilities):
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer.keys() == {"digit", "probabilities"}
    assert is_close(answer["probabilities"], probabilities)
    assert answer["digit"] == np.argmax(probabilities)


def report(client):
    return client.get("/latency").json()


async def in_parallel(server, requests):
    """Has several clients send requests, each one after the other; returns the responses."""
    responses = [None] * len(requests)
    left = iter(enumerate(requests))

    async def send():
        async with httpx.AsyncClient(base_url=server.url, **_OPTIONS) as client:
            for i, content in left:
                responses[i] = await client.post("/predict", content=content)

    async with asyncio.timeout(300):
        await asyncio.gather(*(send() for _ in range(_CLIENTS)))
    return responses


# --- Answers ----------------------------------------------------------------------------------


def test_under_load_each_request_gets_its_own_answer(server, client, images, expected):
    before = report(client)
    order = np.random.default_rng(0).permutation(np.resize(np.arange(len(images)), _REQUESTS))
    responses = asyncio.run(in_parallel(server, [body(images[i]) for i in order]))
    for i, response in zip(order, responses, strict=True):
        assert_answer(response, expected[i])
    _, (_, labels) = digits.digits()
    right = [r.json()["digit"] == labels[i] for i, r in zip(order, responses, strict=True)]
    assert np.mean(right) > 0.9

    after = report(client)
    for what in ("model", "request"):
        assert after[what]["count"] - before[what]["count"] == _REQUESTS
        times = after[what]["microseconds"]
        assert 0 < times["p50"] <= times["p99"] <= times["p99.9"]
    assert after["model"]["microseconds"]["p50"] < after["request"]["microseconds"]["p50"]
    assert after["refused"] == before["refused"]
    assert after["traces"] == 1


# --- Refusals ---------------------------------------------------------------------------------


def with_pixel(pixel):
    rows = [["0"] * 8 for _ in range(8)]
    rows[2][5] = pixel
    written = ", ".join(f"[{', '.join(row)}]" for row in rows)
    return f'{{"image": [{written}]}}'


_ZEROS = [[0] * 8] * 8

BAD = {
    "half an object": ('{"image": [', 400, "isn't JSON"),
    "not UTF-8": (b'{"image": "\xff"}', 400, "isn't JSON"),
    "NaN": (with_pixel("NaN"), 400, "no NaN"),
    "too large": (" " * (16 * 1024 + 1), 413, "larger than 16,384 bytes"),
    "a list": (_ZEROS, 422, "The body is an array"),
    "a row less": ({"image": _ZEROS[1:]}, 422, "image has a length of 7"),
    "ragged": ({"image": [*_ZEROS[:7], [0] * 7]}, 422, r"image\[7\] has a length of 7"),
    "a string as pixel": (with_pixel('"1"'), 422, r"image\[2\]\[5\] is a string"),
    "too bright": (with_pixel("16.001"), 422, r"image\[2\]\[5\] is out of range"),
    "an integer no float holds": (with_pixel("1" * 400), 422, r"image\[2\]\[5\] is out of range"),
}


@pytest.fixture
def still_serves(client, images, expected):
    """What was refused is counted, was no call of the model, and leaves it as it was."""
    before = report(client)
    yield
    assert report(client)["model"]["count"] == before["model"]["count"]
    assert_answer(client.post("/predict", content=body(images[5])), expected[5])
    after = report(client)
    assert sum(after["refused"].values()) == sum(before["refused"].values()) + 1
    assert after["traces"] == before["traces"] == 1


def assert_refused(response, status, reason):
    assert response.status_code == status, response.text
    assert re.search(reason, response.json()["error"])


@pytest.mark.parametrize(
    ("name", "in_parts"), [*[(name, False) for name in BAD], ("NaN", True), ("too large", True)]
)
@pytest.mark.usefixtures("still_serves")
def test_a_bad_body_is_refused_with_the_reason(client, name, in_parts):
    content, status, reason = BAD[name]
    content = content if isinstance(content, (str, bytes)) else json.dumps(content)
    content = content.encode() if isinstance(content, str) else content
    parts = (content[i : i + 10_000] for i in range(0, len(content), 10_000))
    response = client.post("/predict", content=parts if in_parts else content)
    assert_refused(response, status, reason)
    assert response.json()["error"].endswith("8 rows of 8 numbers from 0 to 16.")


# --- Beginning and end ------------------------------------------------------------------------


def test_a_signal_ends_it_with_a_report(path, images, tmp_path):
    """Also while requests are half sent."""
    with serving(path, tmp_path / "log") as server, contextlib.ExitStack() as stack:
        head = _HEAD % 100
        halves = [head[: len(head) // 2], head, head + b'{"image": [', b"POST"]
        clients = [stack.enter_context(server.connect()) for _ in halves]
        for client, half in zip(clients, halves, strict=True):
            client.sendall(half)
        # Until all are being read.
        with httpx.Client(base_url=server.url, **_OPTIONS) as client:
            for pixels in images[:7]:
                client.post("/predict", content=body(pixels))
            last = report(client)
        start = time.monotonic()
        printed = server.end(signal.SIGTERM)
        assert time.monotonic() - start < 10
        assert printed["model"] == last["model"]
        assert (printed["model"]["count"], printed["refused"]) == (7, {})
        for client, half in zip(clients, halves, strict=True):
            answer = client.recv(4096)
            assert answer[:12] == (b"HTTP/1.1 503" if len(half) >= len(head) else b"")
        log = server.log.read_text()
    assert "Finished server process" in log
    assert "Traceback" not in log
    assert "ERROR" not in log


def test_what_cannot_be_served_ends_it_with_the_reason(server, path, tmp_path):
    damaged = tmp_path / "damaged.eqxjit"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    reasons = {
        (damaged, 0): "can't be served: .*damaged.eqxjit is damaged",
        (tmp_path / "none.eqxjit", 0): "can't be served: .*No such file.*none.eqxjit",
        (path, server.port): "address already in use",
    }
    with contextlib.ExitStack() as stack:
        # Side by side: each takes seconds to import JAX.
        processes = [serve(*where, subprocess.PIPE) for where in reasons]
        for process in processes:
            stack.callback(end, process)
        for process, reason in zip(processes, reasons.values(), strict=True):
            printed, log = process.communicate(timeout=300)
            assert process.returncode not in (0, None)
            assert re.search(reason, log)
            assert "Traceback" not in log
            assert "running on" not in log
            assert printed == ""
