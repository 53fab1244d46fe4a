"""Lengths around the tile, causality to the bit, the inverse, decoding, memory and sharding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels.bounded_decay import bounded_decay, chunked, recurrent_step
from pallas_kernels.bounded_decay.triangular import unit_lower_inverse

PER_TOKEN = ("q", "k", "v", "g", "beta")


@pytest.mark.parametrize("T", [2, 15, 16, 17, 65])
def test_any_length(make, oracle, f32, error, T):
    """Lengths 1, 63, 64, 130 and 200 are in test_golden.py, with gradients."""
    x = make(1, T)
    want = oracle(**x, segment_ids=np.ones((1, T), np.int32))
    got = jax.jit(bounded_decay)(**f32(x))
    assert error(got[0], want[0]) < 1e-5
    assert error(got[1], want[1]) < 1e-5


@pytest.mark.parametrize("C", [16, 64])
def test_what_comes_later_moves_no_earlier_bit(make, monkeypatch, C):
    monkeypatch.setattr(chunked, "chunk_size", lambda K: C)
    x, other = make(1, 80), make(1, 80, seed=1)
    other["g"][:] = -5.0  # a midpoint anchor would move with this
    run = jax.jit(lambda x: bounded_decay(**x)[0])

    def output(x):
        return np.asarray(run({n: a.astype(np.float32) for n, a in x.items()}))

    before = output(x)
    for t in (1, 8, 15, 16, 17, 33, 63, 64, 79):
        changed = {n: np.concatenate([x[n][:, :t], other[n][:, t:]], 1) for n in PER_TOKEN}
        after = output(x | changed)
        np.testing.assert_array_equal(after[:, :t], before[:, :t])
        assert np.any(after[:, t] != before[:, t])


@pytest.mark.parametrize("C", [16, 64])
@pytest.mark.parametrize("likeness", [0.5, 1.0])
def test_inverse_with_correlated_keys(error, C, likeness):
    """Sums of powers of A lose all digits here from C = 32 on."""
    rng = np.random.default_rng(0)
    A = np.tril(0.99 * (likeness + (1 - likeness) * rng.uniform(size=(3, C, C))), -1)
    want = np.linalg.inv(np.eye(C) + A)
    got, vjp = jax.vjp(jax.jit(unit_lower_inverse), jnp.asarray(A, jnp.float32))
    assert error(got, want) < 1e-6
    cotangent = rng.normal(size=A.shape)
    transposed = want.swapaxes(1, 2)
    want_grad = -transposed @ cotangent @ transposed
    assert error(vjp(jnp.asarray(cotangent, jnp.float32))[0], want_grad) < 1e-5


@pytest.mark.parametrize("delta", [True, False])
def test_recurrent_step_is_the_definition_token_by_token(make, f32, error, delta):
    x = f32(make(2, 9))
    if not delta:
        x.pop("beta")
    want, want_state = bounded_decay(**x, implementation="ref")
    state, step = x.pop("initial_state"), jax.jit(recurrent_step)
    for t in range(9):
        o, state = step(state, **{n: a[:, t] for n, a in x.items()})
        assert error(o, want[:, t]) < 1e-6
    assert error(state, want_state) < 1e-6


def test_memory_of_a_long_row_grows_with_its_inputs_only():
    """The gradient may hold each chunk's state (K*V/16 = K a token) but no chunk's insides."""
    T, K = 32768, 16
    x = jax.ShapeDtypeStruct((1, T, 1, K), jnp.float32)
    beta = jax.ShapeDtypeStruct((1, T, 1), jnp.float32)
    loss = jax.grad(lambda *a: jnp.sum(bounded_decay(*a)[0]), (0, 1, 2, 3, 4))
    step = jax.jit(loss).lower(x, x, x, x, beta).compile()
    assert step.memory_analysis().temp_size_in_bytes < 16 * T * K * 4


def test_batch_and_heads_shard_without_communication(make, f32, error):
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    x = f32(make(4, 33))
    time_second, state = PartitionSpec("data", None, "model"), PartitionSpec("data", "model")
    shardings = {n: NamedSharding(mesh, state if n == "initial_state" else time_second) for n in x}

    @jax.jit
    def step(x):
        outputs, vjp = jax.vjp(lambda x: bounded_decay(**x), x)
        return outputs, vjp(outputs)[0]

    sharded = step.lower(jax.device_put(x, shardings)).compile()
    collectives = ("all-gather", "all-reduce", "all-to-all", "collective-permute")
    assert not [c for c in collectives if c in sharded.as_text()]
    outcomes = sharded(jax.device_put(x, shardings)), step(x)
    for got, want in zip(*map(jax.tree.leaves, outcomes), strict=True):
        assert error(got, want) < 1e-5
