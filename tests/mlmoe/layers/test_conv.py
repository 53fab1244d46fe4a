"""The short convolution: every way a window can leak."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlmoe.layers.conv import after, last_inputs, short_conv


@pytest.mark.parametrize("T", [1, 2, 3, 15, 17])
def test_conv_is_the_sum_over_its_document(T: int) -> None:
    x = np.random.default_rng(0).normal(size=(1, T, 2)).astype(np.float32)
    w = np.random.default_rng(1).normal(size=(4, 2)).astype(np.float32)
    document = np.sort(np.random.default_rng(2).integers(1, 4, size=(1, T)))
    want = np.zeros_like(x)
    for t in range(T):
        for j in range(4):
            if t >= j and document[0, t - j] == document[0, t]:
                want[0, t] += w[j] * x[0, t - j]
    np.testing.assert_allclose(short_conv(x, w, document), want, rtol=1e-5, atol=1e-6)


def test_other_documents_and_padding_never_reach_a_token() -> None:
    document = jnp.array([[1, 1, 0, 2, 2]])
    x = jnp.ones((1, 5, 1)).at[0, :3].set(jnp.nan)
    y = short_conv(x, jnp.ones((4, 1)), document)
    np.testing.assert_array_equal(y[0, 3:, 0], [1.0, 2.0])
    grad = jax.grad(lambda x: jnp.sum(short_conv(x, jnp.ones((4, 1)), document)[0, 3:]))(x)
    np.testing.assert_array_equal(grad[0, :3], 0.0)


@pytest.mark.parametrize("J", [0, 1, 3])
@pytest.mark.parametrize("size", [1, 3, 5])
def test_pieces_with_their_history_equal_the_whole(J: int, size: int) -> None:
    """Row 0 changes documents inside a piece or between two; row 1 begins and ends with padding."""
    document = jnp.array([[1, 1, 1, 1, 2, 2, 2, 2, 2, 2], [0, 3, 3, 3, 3, 3, 3, 3, 0, 0]])
    x = jax.random.normal(jax.random.key(0), (2, 10, 3))
    w = jax.random.normal(jax.random.key(1), (J + 1, 3))
    history, found = jnp.zeros((2, J, 3)), []
    for i in range(0, 10, size):
        piece, ids = x[:, i : i + size], document[:, i : i + size]
        begins_B = (ids[:, 0] == 2) & (i == 4)  # with the piece: the caller starts afresh
        history = jnp.where(begins_B[:, None, None], 0.0, history)
        joined, joined_ids = after(history, piece, ids)
        found.append(short_conv(joined, w, joined_ids)[:, J:])
        history = last_inputs(joined, joined_ids, J)
    real = (document > 0)[..., None]
    want = jnp.where(real, short_conv(x, w, document), 0)
    got = jnp.where(real, jnp.concatenate(found, 1), 0)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


def test_a_history_ends_with_the_last_real_token() -> None:
    """So rows of unequal prompts, padded to one length, all go on where they end."""
    x = jnp.arange(1.0, 7.0).reshape(1, 6, 1)
    joined, ids = after(jnp.zeros((1, 3, 1)), x, jnp.array([[1, 1, 2, 2, 0, 0]]))
    np.testing.assert_array_equal(last_inputs(joined, ids, 3)[0, :, 0], [0.0, 3.0, 4.0])
    joined, ids = after(jnp.ones((1, 3, 1)), x[:, :2], jnp.array([[0, 0]]))
    np.testing.assert_array_equal(last_inputs(joined, ids, 3)[0, :, 0], [1.0, 1.0, 1.0])
