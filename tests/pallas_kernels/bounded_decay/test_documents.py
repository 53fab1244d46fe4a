"""Documents, padding and states: packing, splitting, left and interior padding, NaN in padding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.bounded_decay import bounded_decay

pytestmark = pytest.mark.usefixtures("short_chunks")
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["ref", "chunked", "pallas"])
run = jax.jit(bounded_decay, static_argnames="implementation")

# 40 tokens, tiles of 16. Runs of (id, length).
ROWS = [
    [(1, 15), (2, 1), (3, 17), (4, 7)],  # boundaries next to the tile edges
    [(0, 5), (9, 20), (0, 15)],  # left padding: the first document continues the initial state
    [(0, 17), (3, 2), (0, 18), (3, 1), (0, 2)],  # one document around a whole padded tile
    [(1, 6), (0, 3), (2, 8), (1, 13), (0, 1), (1, 9)],  # an id used again is a new document
    [(0, 40)],  # nothing but padding
    [(5, 40)],
]
SEGMENTS = np.array([np.repeat(*zip(*row, strict=True)) for row in ROWS], np.int32)


@IMPLEMENTATIONS
@pytest.mark.parametrize("delta", [True, False])
def test_every_layout_follows_the_definition(make, oracle, f32, error, implementation, delta):
    x = make(len(ROWS), 40)
    x["beta"] = x["beta"] if delta else None
    o, state = oracle(**x, segment_ids=SEGMENTS)
    x = f32({n: a for n, a in x.items() if a is not None})
    got_o, got_state = run(**x, segment_ids=jnp.asarray(SEGMENTS), implementation=implementation)
    assert error(got_o, o) < 1e-5
    assert error(got_state, state) < 1e-5
    assert not np.any(np.asarray(got_o)[SEGMENTS == 0])
    np.testing.assert_array_equal(got_state[4], x["initial_state"][4])


@functools.partial(jax.jit, static_argnames="implementation")
def _value_and_grads(x, segment_ids, weight, implementation):
    def loss(x):
        o, state = bounded_decay(**x, segment_ids=segment_ids, implementation=implementation)
        return jnp.sum(o * weight) + jnp.sum(jnp.sin(state)), (o, state)

    return jax.value_and_grad(loss, has_aux=True)(x)


@pytest.mark.parametrize("implementation", ["chunked", "pallas"])
def test_gradients_agree_on_every_layout(make, f32, error, implementation):
    x = f32(make(len(ROWS), 40))
    weight = jnp.cos(jnp.arange(x["v"].size, dtype=jnp.float32)).reshape(x["v"].shape)
    _, grads = _value_and_grads(x, jnp.asarray(SEGMENTS), weight, implementation)
    _, ref = _value_and_grads(x, jnp.asarray(SEGMENTS), weight, "ref")
    for name in x:
        assert error(grads[name], ref[name]) < 1e-4, name


@IMPLEMENTATIONS
def test_nan_at_padding_reaches_nothing(make, f32, implementation):
    x, segments = f32(make(len(ROWS), 40)), jnp.asarray(SEGMENTS)
    weight = jnp.ones_like(x["v"])
    dirty = {"initial_state": x["initial_state"]}
    for n in ("q", "k", "v", "g", "beta"):
        pad = (segments == 0).reshape(*segments.shape, *(1,) * (x[n].ndim - 2))
        dirty[n] = jnp.where(pad, jnp.nan, x[n])
    clean_all = _value_and_grads(x, segments, weight, implementation)
    dirty_all = _value_and_grads(dirty, segments, weight, implementation)
    jax.tree.map(np.testing.assert_array_equal, dirty_all, clean_all)
    for name in ("q", "k", "v", "g", "beta"):
        assert not np.any(np.asarray(dirty_all[1][name])[SEGMENTS == 0]), name


def test_split_with_state_equals_whole_forward_and_backward(make, f32, error):
    """The gradient through final_state and into initial_state is what carries the second half."""
    x, cut = f32(make(2, 40)), 20
    segments = jnp.asarray(SEGMENTS[[0, 3]])
    state = x.pop("initial_state")

    def whole(x, state):
        return bounded_decay(**x, initial_state=state, segment_ids=segments)

    def halves(x, state):
        first, second = ({n: a[:, s] for n, a in x.items()} for s in (np.s_[:cut], np.s_[cut:]))
        o_1, state = bounded_decay(**first, initial_state=state, segment_ids=segments[:, :cut])
        o_2, state = bounded_decay(**second, initial_state=state, segment_ids=segments[:, cut:])
        return jnp.concatenate([o_1, o_2], 1), state

    # Cut where both rows are inside a document: a state carries no document id.
    assert np.all(SEGMENTS[[0, 3], cut - 1] == SEGMENTS[[0, 3], cut])

    def outputs_and_grads(f):
        outputs, vjp = jax.vjp(f, x, state)
        return outputs, vjp(jax.tree.map(jnp.sin, outputs))

    both = jax.jit(lambda: (outputs_and_grads(halves), outputs_and_grads(whole)))()
    for got, want in zip(*map(jax.tree.leaves, both), strict=True):
        assert error(got, want) < 1e-5


def test_no_initial_state_is_a_zero_state(make, f32):
    x = f32(make(2, 40))
    zero = x.pop("initial_state") * 0
    jax.tree.map(
        np.testing.assert_array_equal,
        run(**x, implementation="ref"),
        run(**x, initial_state=zero, implementation="ref"),
    )


@pytest.mark.parametrize(
    ("implementation", "cuts"), [("chunked", (15, 16, 17, 63, 64, 65)), ("pallas", (17, 63))]
)
def test_any_cut_with_its_state_equals_the_whole(make, f32, error, implementation, cuts):
    x = f32(make(1, 70))
    state = x.pop("initial_state")
    whole, end = run(**x, initial_state=state, implementation=implementation)
    for cut in cuts:
        first, second = ({n: a[:, s] for n, a in x.items()} for s in (np.s_[:cut], np.s_[cut:]))
        o_1, middle = run(**first, initial_state=state, implementation=implementation)
        o_2, last = run(**second, initial_state=middle, implementation=implementation)
        assert error(jnp.concatenate([o_1, o_2], 1), whole) < 1e-5, cut
        assert error(last, end) < 1e-5, cut
