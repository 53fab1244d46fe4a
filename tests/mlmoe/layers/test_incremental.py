"""The incremental layers: memory at birth, the gate's projection, and packing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlmoe.layers.incremental import IncrementalAttention, memory_bias
from tests.mlmoe.layers.test_attention import model_config

F32 = jnp.dtype("float32")


def test_fresh_channels_remember_from_memory_min_to_memory_max() -> None:
    c = model_config().incremental
    bias = np.asarray(memory_bias(c)(jax.random.key(0), (4, 32)), np.float64)
    g = c.g_min / (1 + np.exp(-bias))
    tau = np.sort(-1 / g.ravel())
    np.testing.assert_allclose([tau[0], tau[-1]], [c.memory_min, c.memory_max], rtol=1e-3)
    np.testing.assert_allclose(np.diff(np.log(tau)), np.log(tau[-1] / tau[0]) / 127, rtol=1e-2)


@pytest.mark.parametrize("letter", "DAS")
def test_packed_documents_equal_separate_ones(letter: str) -> None:
    layer = IncrementalAttention(model_config(), F32, letter)
    x_BTD = jax.random.normal(jax.random.key(0), (1, 40, 128))
    at = jnp.arange(40)[None]
    document_BT = 1 + (at >= 17)
    params = layer.init(jax.random.key(1), x_BTD, document_BT, at)
    y = layer.apply(params, x_BTD, document_BT, at)
    one = jnp.ones((1, 17), int)
    first = layer.apply(params, x_BTD[:, :17], one, at[:, :17])
    second = layer.apply(params, x_BTD[:, 17:], jnp.ones((1, 23), int), at[:, 17:])
    np.testing.assert_allclose(y, jnp.concatenate([first, second], 1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("letter", "DAS")
def test_no_token_sees_a_later_one(letter: str) -> None:
    layer = IncrementalAttention(model_config(), F32, letter)
    x_BTD = jax.random.normal(jax.random.key(0), (1, 20, 128))
    at, one = jnp.arange(20)[None], jnp.ones((1, 20), int)
    params = layer.init(jax.random.key(1), x_BTD, one, at)
    early = lambda x: jnp.sum(layer.apply(params, x, one, at)[:, :11] ** 2)  # noqa: E731
    grad = jax.grad(early)(x_BTD)
    np.testing.assert_array_equal(grad[:, 11:], 0.0)
    assert float(jnp.abs(grad[:, :11]).min(-1).max()) > 0.0
