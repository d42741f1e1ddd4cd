"""The server of the digits: right answers under load, and a reason for whatever it refuses."""

import asyncio
import contextlib
import io
import json
import re
import signal
import subprocess
import sys
import time

import equinox as eqx
import httpx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.examples.digits_server import main
from bench.models import digits
from tests.support.processes import ROOT

pytestmark = pytest.mark.slow

_EPOCHS = 10
_CLIENTS = 16
_REQUESTS = 1_000
# A proxy in the environment is not for the loopback.
_OPTIONS = {"headers": {"content-type": "application/json"}, "timeout": 30, "trust_env": False}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """The file that the command line writes."""
    path = tmp_path_factory.mktemp("digits") / "model.eqxjit"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        main(["train", str(path), "--epochs", str(_EPOCHS)])
    assert float(re.search(r"test accuracy (.*)%", printed.getvalue())[1]) > 90
    return path


@pytest.fixture(scope="module")
def url(path, tmp_path_factory):
    """That of a server on a free port, which ends with a report when it is told to."""
    log = tmp_path_factory.mktemp("server") / "log"
    command = [sys.executable, "-m", "bench.examples.digits_server", "serve", str(path), "--port=0"]
    with log.open("w") as stderr:
        server = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, text=True
        )
    try:
        deadline = time.monotonic() + 300
        while not (found := re.search(r"running on (http://127\.0\.0\.1:\d+)", log.read_text())):
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < deadline, "not up within five minutes"
            time.sleep(0.05)
        yield found[1]
        with httpx.Client(base_url=found[1], **_OPTIONS) as client:
            last = report(client)
        server.send_signal(signal.SIGTERM)
        printed, _ = server.communicate(timeout=15)
        assert server.returncode == 0
        assert json.loads(printed) == last
        assert not re.search("Traceback|ERROR", log.read_text())
    finally:
        # Whatever a test came to, nothing is left running.
        server.kill()


@pytest.fixture(scope="module")
def client(url):
    with httpx.Client(base_url=url, **_OPTIONS) as client:
        yield client


@pytest.fixture(scope="module")
def images():
    """Those of the test set, with pixels from 0 to 16."""
    _, (images, _) = digits.digits()
    return images.reshape(-1, 8, 8) * 16


@pytest.fixture(scope="module")
def expected(images):
    """The probabilities of each, by the plain Equinox model, trained under upstream."""
    training, _ = digits.digits()
    *_, last = digits.train(eqx.filter_jit, training, _EPOCHS)
    logits = jax.vmap(last.model)(jnp.asarray(images).reshape(-1, 64) / 16)
    return np.asarray(jax.nn.softmax(logits))


def body(pixels):
    return json.dumps({"image": np.asarray(pixels).tolist()})


def assert_answer(response, probabilities):
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer.keys() == {"digit", "probabilities"}
    assert np.allclose(answer["probabilities"], probabilities, rtol=1e-4, atol=1e-7)
    assert answer["digit"] == np.argmax(probabilities)


def report(client):
    return client.get("/latency").json()


async def in_parallel(url, requests):
    """Has several clients send requests, each one after the other; returns the responses."""
    responses = [None] * len(requests)
    left = iter(enumerate(requests))

    async def send():
        async with httpx.AsyncClient(base_url=url, **_OPTIONS) as client:
            for i, content in left:
                responses[i] = await client.post("/predict", content=content)

    async with asyncio.timeout(300):
        await asyncio.gather(*(send() for _ in range(_CLIENTS)))
    return responses


def test_under_load_each_request_gets_its_own_answer(url, client, images, expected):
    before = report(client)
    order = np.random.default_rng(0).permutation(np.resize(np.arange(len(images)), _REQUESTS))
    responses = asyncio.run(in_parallel(url, [body(images[i]) for i in order]))
    for i, response in zip(order, responses, strict=True):
        assert_answer(response, expected[i])
    after = report(client)
    assert after["calls"] - before["calls"] == _REQUESTS
    times = after["microseconds"]
    assert 0 < times["p50"] <= times["p99"] <= times["p99.9"]
    assert after["refused"] == before["refused"]
    assert after["traces"] == 1


def with_pixel(pixel):
    rows = [["0"] * 8 for _ in range(8)]
    rows[2][5] = pixel
    written = ", ".join(f"[{', '.join(row)}]" for row in rows)
    return f'{{"image": [{written}]}}'


BAD = {
    "half an object": ('{"image": [', 400, "isn't JSON"),
    "too large": (" " * (16 * 1024 + 1), 413, "larger than 16,384 bytes"),
    "a list": ("[]", 422, "isn't an image"),
    "NaN": (with_pixel("NaN"), 422, "isn't an image"),
    "a row less": (body(np.zeros((7, 8))), 422, "isn't an image"),
    "too bright": (with_pixel("16.001"), 422, "isn't an image"),
}


@pytest.mark.parametrize(("content", "status", "reason"), BAD.values(), ids=BAD)
def test_a_bad_body_is_refused_with_the_reason(client, images, expected, content, status, reason):
    """What was refused is counted, was no call of the model, and leaves it as it was."""
    before = report(client)
    response = client.post("/predict", content=content)
    assert response.status_code == status, response.text
    assert re.search(reason, response.json()["error"])
    assert_answer(client.post("/predict", content=body(images[5])), expected[5])
    after = report(client)
    assert after["calls"] == before["calls"] + 1
    assert sum(after["refused"].values()) == sum(before["refused"].values()) + 1
    assert after["traces"] == before["traces"] == 1
