"""The incremental layers: memory at birth, the gate's projection, and packing."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlmoe.layers.incremental import IncrementalAttention, first_carried, memory_bias
from mlmoe.sharding import make_mesh
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


def functions(letter: str) -> Any:
    """A layer's parameters, and its rows at once and in pieces, jitted."""
    layer = IncrementalAttention(model_config(), F32, letter)
    x_BTD, one = jnp.zeros((1, 2, 128)), jnp.ones((1, 2), jnp.int32)
    params = jax.jit(layer.init)(jax.random.key(1), x_BTD, one, one)
    whole = jax.jit(lambda x, ids: layer.apply(params, x, ids, ids))
    extend = jax.jit(lambda x, ids, c: layer.apply(params, x, ids, c, method="extend"))
    return whole, extend


@pytest.mark.parametrize(
    ("letter", "sizes"),
    [("D", (1, 15, 16, 17, 63, 64, 65, 1)), ("A", (1, 17, 64, 1)), ("S", (1, 17, 65, 1))],
)
def test_pieces_of_any_length_equal_the_whole(letter: str, sizes: tuple[int, ...]) -> None:
    whole, extend = functions(letter)
    x_BTD = jax.random.normal(jax.random.key(0), (1, sum(sizes), 128))
    document_BT = jnp.ones((1, sum(sizes)), jnp.int32)
    carried = first_carried(model_config(), F32, letter, rows=1)
    at, found = 0, []
    for size in sizes:
        here = slice(at, at + size)
        y, carried = extend(x_BTD[:, here], document_BT[:, here], carried)
        found.append(y)
        at += size
    y, want = np.concatenate(found, 1), np.asarray(whole(x_BTD, document_BT))
    assert np.sqrt(np.mean((y - want) ** 2) / np.mean(want**2)) < 1e-6


@pytest.mark.parametrize("letter", ["A", *(pytest.param(x, marks=pytest.mark.slow) for x in "DS")])
def test_unequal_prompts_go_on_where_they_end(letter: str) -> None:
    """8 rows on 8 devices: prompts of 0 to 7 tokens, padded to 8, then 4 tokens more each."""
    whole, extend = functions(letter)
    lengths_B = np.arange(8)
    x_BTD, more_BTD = jax.random.normal(jax.random.key(0), (2, 8, 8, 128))
    ids = (np.arange(8)[None] < lengths_B[:, None]).astype(np.int32)
    ids[7, 3:7] = 2  # this row goes on with its second document
    carried = first_carried(model_config(), F32, letter, rows=8)
    with jax.set_mesh(make_mesh()):
        _, carried = extend(x_BTD, jnp.asarray(ids), carried)
        y_BTD, _ = extend(more_BTD, jnp.ones((8, 8), jnp.int32), carried)
    for b in (0, 2, 7):
        prompt_TD = x_BTD[b, 3 if b == 7 else 0 : lengths_B[b]]
        row_1TD = jnp.concatenate([prompt_TD, more_BTD[b]])[None]
        want = whole(row_1TD, jnp.ones(row_1TD.shape[:2], jnp.int32))[0, -8:]
        np.testing.assert_allclose(y_BTD[b], want, atol=1e-5 * float(jnp.abs(want).max()))
