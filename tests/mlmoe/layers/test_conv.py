"""The short convolution: every way a window can leak."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlmoe.layers.conv import short_conv


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
