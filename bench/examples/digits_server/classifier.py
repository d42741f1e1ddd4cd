"""The model file: the classifier, frozen together with what comes before and after the network."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import eqxjit

_IMAGE = jax.ShapeDtypeStruct((8, 8), jnp.float32)


class Classifier(eqx.Module):
    """From an image, 8x8 pixels from 0 to 16 as the data set has them, to ten probabilities.

    Scaling and softmax are part of the program, so that no server can get them wrong. One image:
    to gather requests into batches would have each wait for others, to save some microseconds of
    the hundreds that a request takes, and needs a program for each size of batch.
    """

    mlp: eqx.nn.MLP

    def __call__(self, image: jax.Array) -> jax.Array:
        """Applies the classifier."""
        return jax.nn.softmax(self.mlp(jnp.ravel(image) / 16))


def save(mlp: eqx.nn.MLP, path: str) -> None:
    """Writes the classifier to a file."""
    eqxjit.freeze(Classifier(mlp)).save(path, _IMAGE)


def load(path: str) -> eqxjit.types.FrozenFunction[..., Any]:
    """Loads a classifier, compiled and warm: its next call is as fast as all that follow.

    **Raises:**

    - `ValueError`, if the file is damaged, or holds another kind of model.
    - `OSError`, if it can't be read.
    """
    model = eqxjit.load(path)
    # Should an image of another shape or dtype ever get as far as this, it is an error, and not a
    # compilation while everybody waits.
    model.compile(_IMAGE, other_shapes="raise")
    output = model(np.zeros(_IMAGE.shape, _IMAGE.dtype))
    if np.shape(output) != (10,) or not np.isclose(np.sum(output), 1, atol=1e-3):
        raise ValueError(f"{path} holds {model!r}, which doesn't return ten probabilities.")
    return model
