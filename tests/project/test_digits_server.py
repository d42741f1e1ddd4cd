"""The server of the digits: right answers under load, and a reason for whatever it rejects."""

import asyncio
import contextlib
import io
import json
import re

import equinox as eqx
import httpx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.examples.digits_server import Application, load, main
from bench.models import digits

pytestmark = pytest.mark.slow

_EPOCHS = 10
_CLIENTS = 16
_REQUESTS = 500


@pytest.fixture(scope="module")
def application(tmp_path_factory):
    """Return the application for a file that the command line wrote."""
    path = tmp_path_factory.mktemp("digits") / "model.eqxjit"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        main(["train", str(path), "--epochs", str(_EPOCHS)])
    assert float(re.search(r"test accuracy (.*)%", printed.getvalue())[1]) > 90
    return Application(load(str(path)))


def requested(application, contents):
    """Return the responses to these bodies, which several clients send at the same time."""
    responses = [None] * len(contents)
    left = iter(enumerate(contents))

    async def send():
        transport = httpx.ASGITransport(application.asgi)
        async with httpx.AsyncClient(transport=transport, base_url="http://digits") as client:
            for i, content in left:
                responses[i] = await client.post("/predict", content=content)

    async def send_all():
        await asyncio.gather(*(send() for _ in range(_CLIENTS)))

    asyncio.run(send_all())
    return responses


@pytest.fixture(scope="module")
def images():
    """Return the images of the test set, with pixels from 0 to 16."""
    _, (images, _) = digits.digits()
    return images.reshape(-1, 8, 8) * 16


@pytest.fixture(scope="module")
def expected(images):
    """Return the probabilities of each image, by a model that was trained under Equinox."""
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


def test_under_load_each_request_gets_its_own_answer(application, images, expected):
    before = application.report()
    order = np.random.default_rng(0).permutation(np.resize(np.arange(len(images)), _REQUESTS))
    responses = requested(application, [body(images[i]) for i in order])
    for i, response in zip(order, responses, strict=True):
        assert_answer(response, expected[i])
    after = application.report()
    assert after["calls"] - before["calls"] == _REQUESTS
    times = after["microseconds"]
    assert 0 < times["p50"] <= times["p99"] <= times["p99.9"]
    assert after["rejected"] == before["rejected"]
    assert after["traces"] == 1


BAD = {
    "half an object": ('{"image": [', 400, "isn't JSON"),
    "too large": (" " * (16 * 1024 + 1), 413, "larger than 16,384 bytes"),
    "a row less": (body(np.zeros((7, 8))), 422, "isn't an image"),
    "too bright": (body(np.full((8, 8), 16.001)), 422, "isn't an image"),
}


@pytest.mark.parametrize(("content", "status", "reason"), BAD.values(), ids=BAD)
def test_a_bad_body_is_rejected_with_the_reason(
    application, images, expected, content, status, reason
):
    """A rejected request is counted, and neither calls nor changes the model."""
    before = application.report()
    rejected, good = requested(application, [content, body(images[5])])
    assert rejected.status_code == status, rejected.text
    assert re.search(reason, rejected.json()["error"])
    assert_answer(good, expected[5])
    after = application.report()
    assert after["calls"] == before["calls"] + 1
    assert sum(after["rejected"].values()) == sum(before["rejected"].values()) + 1
    assert after["traces"] == before["traces"] == 1
