"""Cross entropy: the plain definition, chunks of the vocabulary, and sums that add up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlmoe.loss import cross_entropy


def case() -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(0), 3)
    x = 3 * jax.random.normal(keys[0], (2, 7, 8))
    head = jax.random.normal(keys[1], (8, 24))
    targets = jax.random.randint(keys[2], (2, 7), 0, 24)
    weights = jnp.ones((2, 7)).at[1, 4:].set(0.0)
    return x, head, targets, weights


def plain(x, head, targets, weights):  # type: ignore[no-untyped-def]
    p = jax.nn.log_softmax(jnp.einsum("BTD,DW->BTW", x, head))
    return -jnp.sum(weights * jnp.take_along_axis(p, targets[..., None], -1)[..., 0])


@pytest.mark.parametrize("chunk", [6, 12, 24, 100])
def test_every_chunking_is_the_definition_with_its_gradient(chunk: int) -> None:
    x, head, targets, weights = case()
    f = lambda x, h: cross_entropy(x, h, targets, weights, chunk).nats  # noqa: E731
    want = jax.value_and_grad(lambda x, h: plain(x, h, targets, weights), (0, 1))(x, head)
    got = jax.value_and_grad(f, (0, 1))(x, head)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), got, want)
    sums = cross_entropy(x, head, targets, weights, chunk)
    best = jnp.argmax(jnp.einsum("BTD,DW->BTW", x, head), -1)
    assert float(sums.correct) == float(jnp.sum(weights * (best == targets)))
    assert float(sums.tokens) == 11.0


def test_logits_of_one_chunk_are_all_that_exists() -> None:
    x, targets = jnp.zeros((4, 64, 8)), jnp.zeros((4, 64), int)
    head, weights = jnp.zeros((8, 4096)), jnp.ones((4, 64))

    def peak(chunk: int) -> int:
        f = jax.grad(lambda x, h: cross_entropy(x, h, targets, weights, chunk).nats, (0, 1))
        return jax.jit(f).lower(x, head).compile().memory_analysis().temp_size_in_bytes

    full = 4 * 64 * 4096 * 4
    assert peak(256) < full / 4 < full < peak(4096) + full / 2


def test_no_weight_gives_zero_not_nan() -> None:
    x, head, targets, weights = case()
    f = lambda x: cross_entropy(x, head, targets, 0 * weights, 6).nats  # noqa: E731
    value, grad = jax.value_and_grad(f)(x)
    assert float(value) == 0.0 and float(jnp.abs(grad).max()) == 0.0


def test_huge_logits_stay_finite() -> None:
    x, head, targets, weights = case()
    for chunk in (6, 24):
        sums = cross_entropy(1e4 * x, head, targets, weights, chunk)
        assert np.isfinite(float(sums.nats))
