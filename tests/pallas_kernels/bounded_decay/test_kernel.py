"""The chunk of the kernels; and what binds all forms: independent documents to the bit, small
gradients, float64 finite differences."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.bounded_decay import bounded_decay, chunked, tpu

FORMS = pytest.mark.parametrize("implementation", ["chunked", "pallas"])
PER_TOKEN = ("q", "k", "v", "g", "beta")


@functools.partial(jax.jit, static_argnames="implementation")
def _everything(x, segment_ids, do, implementation):
    def run(x):
        return bounded_decay(**x, segment_ids=segment_ids, implementation=implementation)

    (o, state), vjp = jax.vjp(run, x)
    return o, state, vjp((do, jnp.sin(state)))[0]


@pytest.mark.parametrize("chunks", [(16, 32), pytest.param((16, 64), marks=pytest.mark.slow)])
def test_the_chunk_changes_rounding_only(chunks, make, f32, error, monkeypatch):
    x, segments = f32(make(1, 70)), jnp.asarray(np.repeat([[1, 2]], [30, 40], 1), jnp.int32)
    do = jnp.cos(jnp.arange(x["v"].size, dtype=jnp.float32)).reshape(x["v"].shape)
    monkeypatch.setattr(tpu, "LANES", 8)
    found = []
    for chunk in chunks:
        monkeypatch.setattr(tpu, "CHUNK", chunk)
        jax.clear_caches()
        found.append(_everything(x, segments, do, "pallas"))
    for other in found[1:]:
        for got, want in zip(*map(jax.tree.leaves, (other, found[0])), strict=True):
            assert error(got, want) < 2e-6


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("cut", [1, 15, 16, 17, 31, 32, 33])
@FORMS
def test_a_document_does_not_move_another_by_one_bit(make, f32, cut, implementation, monkeypatch):
    """Everything about document 1 changes, its gates too: outputs and gradients of document 2."""
    monkeypatch.setattr(chunked, "chunk_size", lambda K: 32)
    x, other = make(1, 48), make(1, 48, seed=1)
    changed = {n: np.concatenate([other[n][:, :cut], x[n][:, cut:]], 1) for n in PER_TOKEN}
    changed["initial_state"] = other["initial_state"]
    do = np.random.default_rng(2).normal(size=x["v"].shape)
    do_changed = np.concatenate([-do[:, :cut], do[:, cut:]], 1)
    segments = jnp.asarray(np.repeat([[1, 2]], [cut, 48 - cut], 1), jnp.int32)
    before = _everything(f32(x), segments, jnp.asarray(do, jnp.float32), implementation)
    after = _everything(
        f32(changed), segments, jnp.asarray(do_changed, jnp.float32), implementation
    )
    np.testing.assert_array_equal(after[0][:, cut:], before[0][:, cut:])
    np.testing.assert_array_equal(after[1], before[1])
    for n in PER_TOKEN:
        np.testing.assert_array_equal(after[2][n][:, cut:], before[2][n][:, cut:], n)
        assert np.any(np.asarray(after[2][n][:, :cut]) != np.asarray(before[2][n][:, :cut])), n


@pytest.mark.usefixtures("short_chunks")
def test_what_comes_later_moves_no_earlier_bit(make, f32):
    x, other = make(1, 48), make(1, 48, seed=1)
    other["g"][:] = -5.0
    segments, do = jnp.ones((1, 48), jnp.int32), jnp.ones(x["v"].shape, jnp.float32)
    before = np.asarray(_everything(f32(x), segments, do, "pallas")[0])
    for t in (1, 15, 16, 17, 31, 33, 47):
        changed = {n: np.concatenate([x[n][:, :t], other[n][:, t:]], 1) for n in PER_TOKEN}
        after = np.asarray(_everything(f32(x | changed), segments, do, "pallas")[0])
        np.testing.assert_array_equal(after[:, :t], before[:, :t])
        assert np.any(after[:, t] != before[:, t])


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("gates", ["all at the bound", "half of them"])
@FORMS
def test_small_gradients_survive_gates_at_the_bound(make, f32, error, gates, implementation):
    """exp(-80) times the gradient of a mean loss would be flushed to zero."""
    x = make(1, 48)
    x["g"][..., :: 1 if gates == "all at the bound" else 2] = -5.0
    x = f32(x)
    segments, do = jnp.ones((1, 48), jnp.int32), jnp.sin(jnp.arange(x["v"].size) * 1.0)
    do = do.reshape(x["v"].shape)
    run = functools.partial(bounded_decay, **{n: x[n] for n in x if n not in PER_TOKEN})

    def gradients(scale, implementation):
        f = lambda p: run(**p, segment_ids=segments, implementation=implementation)[0]  # noqa: E731
        pull = jax.jit(lambda p, do: jax.vjp(f, p)[1](do)[0])
        return pull({n: x[n] for n in PER_TOKEN}, do * scale)

    small, whole = gradients(1e-9, implementation), gradients(1.0, "ref")
    for n in PER_TOKEN:
        assert error(np.asarray(small[n], np.float64) * 1e9, whole[n]) < 1e-5, n


@pytest.mark.usefixtures("short_chunks")
@FORMS
def test_finite_differences_of_the_definition_in_float64(make, f32, oracle, implementation):
    """Along a random direction of each input, central differences of the float64 oracle."""
    x, rng = make(1, 20, H=1, K=4, V=3), np.random.default_rng(3)
    segments = np.repeat([[1, 2]], [9, 11], 1)
    do, d_state = rng.normal(size=x["v"].shape), rng.normal(size=x["initial_state"].shape)

    def loss(x):
        o, state = oracle(**x, segment_ids=segments)
        return np.sum(o * do) + np.sum(state * d_state)

    @jax.jit
    def gradient(x):
        def run(x):
            ids = jnp.asarray(segments, jnp.int32)
            return bounded_decay(**x, segment_ids=ids, implementation=implementation)

        return jax.vjp(run, x)[1]((jnp.asarray(do, jnp.float32), jnp.asarray(d_state, jnp.float32)))

    got = gradient(f32(x))[0]
    for n in x:
        way = rng.normal(size=x[n].shape)
        ahead, behind = (loss(x | {n: x[n] + s * 1e-6 * way}) for s in (1, -1))
        want = (ahead - behind) / 2e-6
        assert abs(float(np.sum(np.asarray(got[n], np.float64) * way)) - want) < 1e-4 * max(
            1.0, abs(want)
        ), n
