"""Slot attention: reference values, its softmax-attention limit, documents, states, causality."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.bounded_decay import slot, slot_attention

pytestmark = pytest.mark.usefixtures("short_chunks")
B, T, H, K, V, M = 2, 40, 2, 8, 6, 10


@pytest.fixture
def x():
    rng = np.random.default_rng(0)
    sizes = {"q": K, "k": K, "v": V, "s": M, "g": M}
    x = {n: rng.normal(size=(B, T, H, size)) for n, size in sizes.items()}
    x["g"] = -5 * rng.uniform(size=x["g"].shape) ** 4
    x["s"] = 1 - np.exp(x["g"])
    return {n: jnp.asarray(a, jnp.float32) for n, a in x.items()}


@pytest.fixture
def states():
    rng = np.random.default_rng(1)
    return tuple(jnp.asarray(rng.normal(size=(B, H, M, n)), jnp.float32) for n in (K, V))


@pytest.mark.parametrize("implementation", ["ref", "chunked", "four tiles a chunk", "pallas"])
def test_reference(golden, error, monkeypatch, implementation):
    """Here M = 24 slots, K = 16."""
    if implementation == "four tiles a chunk":
        monkeypatch.setattr(slot, "chunk_size", lambda M: 64)
        implementation = "chunked"
    case = golden("slot")
    scale = float(case["scale"])
    run = functools.partial(slot_attention, scale=scale, implementation=implementation)
    args = [jnp.asarray(case[n], jnp.float32) for n in ("q", "k", "v", "s", "g")]

    @jax.jit
    def everything(args, do):
        (o, states), vjp = jax.vjp(run, *args)
        return o, *states, *vjp((do, jax.tree.map(jnp.zeros_like, states)))

    got = everything(args, jnp.asarray(case["do"], jnp.float32))
    limits = {"o": 1e-5, "key_slots": 1e-5, "value_slots": 1e-5}
    limits |= dict.fromkeys(("dq", "dk", "dv", "ds", "dg"), 1e-4)
    for (name, limit), array in zip(limits.items(), got, strict=True):
        assert error(array, case[name]) < limit, name


@pytest.mark.parametrize("implementation", ["ref", "chunked"])
def test_one_slot_a_token_without_decay_is_softmax_attention(x, error, implementation):
    q, k, v = x["q"], x["k"], x["v"]
    s = jnp.broadcast_to(jnp.eye(T)[None, :, None], (B, T, H, T))
    run = jax.jit(functools.partial(slot_attention, implementation=implementation))
    o, _ = run(q, k, v, s, jnp.zeros_like(s))
    # Slots not yet written score 0 and hold 0: they join the softmax's denominator only.
    scores = jnp.einsum("bihk,bjhk->bhij", q, k) * K**-0.5
    p = jax.nn.softmax(jnp.where(np.tri(T, dtype=bool)[None, None], scores, 0.0))
    want = jnp.einsum("bhij,bjhv->bihv", p * np.tri(T, dtype=np.float32)[None, None], v)
    assert error(o, want) < 1e-5


def _everything(x, states, segment_ids, implementation):
    def loss(x, states):
        o, end = slot_attention(
            **x, initial_state=states, segment_ids=segment_ids, implementation=implementation
        )
        return sum(jnp.sum(jnp.sin(a)) for a in (o, *end)), (o, end)

    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(x, states)


def _segments():
    rows = [[(0, 3), (1, 12), (0, 2), (1, 5), (2, 18)], [(0, 40)]]
    return np.array([np.repeat(*zip(*row, strict=True)) for row in rows], np.int32)


@pytest.mark.parametrize("implementation", ["chunked", "pallas"])
def test_documents_padding_and_states(x, states, error, implementation):
    """With NaN at padding, against ref: values and gradients, through the final state."""
    segments = _segments()
    pad = jnp.asarray(segments == 0)[:, :, None, None]
    dirty = {n: jnp.where(pad, jnp.nan, a) for n, a in x.items()}
    (_, (o, end)), grads = _everything(dirty, states, jnp.asarray(segments), implementation)
    (_, (ref_o, ref_end)), ref_grads = _everything(x, states, jnp.asarray(segments), "ref")
    assert not np.any(np.asarray(o)[segments == 0])
    np.testing.assert_array_equal(end[0][1], states[0][1])
    for got, want in zip(*map(jax.tree.leaves, ((o, end), (ref_o, ref_end))), strict=True):
        assert error(got, want) < 1e-5
    for got, want in zip(*map(jax.tree.leaves, (grads, ref_grads)), strict=True):
        assert error(got, want) < 1e-4


def test_packed_equals_separate_in_the_definition(x, states, error):
    """Rows pack tokens 0-16 and 17-39; the second document alone starts from zero slots."""
    segments = jnp.asarray(np.repeat([[1, 2]], [17, 23], axis=1).repeat(B, 0).astype(np.int32))
    run = jax.jit(functools.partial(slot_attention, implementation="ref"))
    packed, end = run(**x, initial_state=states, segment_ids=segments)
    alone, alone_end = run(**{n: a[:, 17:] for n, a in x.items()})
    assert error(packed[:, 17:], alone) < 1e-5
    assert all(error(*pair) < 1e-5 for pair in zip(end, alone_end, strict=True))


def test_what_comes_later_moves_no_earlier_bit(x):
    run = jax.jit(lambda x: slot_attention(**x)[0])
    before = np.asarray(run(x))
    for t in (1, 8, 16, 21):
        later = (np.arange(T) >= t)[None, :, None, None]
        after = np.asarray(
            run({n: np.where(later, -2.5 if n == "g" else -a, a) for n, a in x.items()})
        )
        np.testing.assert_array_equal(after[:, :t], before[:, :t])
        assert np.any(after[:, t] != before[:, t])
