"""Dtypes, defaults, and what a wrong call is told."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.bounded_decay import bounded_decay, recurrent_step, slot_attention


@pytest.fixture
def x(make, f32):
    return f32(make(1, 5))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_all_implementations_share_one_dtype_contract(x, dtype):
    x = {n: a if n == "initial_state" else a.astype(dtype) for n, a in x.items()}

    def shapes(implementation):
        def loss(x):
            o, state = bounded_decay(**x, implementation=implementation)
            return jnp.sum(o.astype(jnp.float32)) + jnp.sum(state), (o, state)

        grads, outputs = jax.eval_shape(jax.grad(loss, has_aux=True), x)
        return outputs, grads

    (o, state), grads = shapes("chunked")
    assert (o.dtype, state.dtype) == (dtype, jnp.float32)
    assert {n: a.dtype for n, a in grads.items()} == {n: a.dtype for n, a in x.items()}
    assert shapes("ref") == shapes("chunked") == shapes("pallas")


def test_a_bf16_step_keeps_an_f32_state(x):
    token = {n: x[n][:, 0].astype(jnp.bfloat16) for n in ("q", "k", "v", "g", "beta")}
    o, state = recurrent_step(x["initial_state"], **token)
    assert (o.dtype, state.dtype) == (jnp.bfloat16, jnp.float32)


def test_scale_multiplies_the_output_only(x):
    run = jax.jit(bounded_decay)
    o, state = run(**x, scale=0.25)
    twice, same = run(**x, scale=0.5)
    np.testing.assert_array_equal(twice, 2 * o)
    np.testing.assert_array_equal(same, state)


@pytest.mark.parametrize("op", ["bounded_decay", "slot_attention"])
def test_choices_that_cannot_run_are_errors(x, op):
    q, k, v, g = (x[n] for n in "qkvg")
    call = {
        "bounded_decay": lambda i: bounded_decay(q, k, v, g, implementation=i),
        "slot_attention": lambda i: slot_attention(q, k, v, g, g, implementation=i),
    }[op]
    with pytest.raises(
        ValueError, match=f"{op}: implementation='triton'.*'ref', 'chunked', 'pallas'"
    ):
        call("triton")


@pytest.mark.parametrize("name", ["k", "v", "g", "beta", "initial_state"])
def test_a_wrong_shape_names_the_argument(x, name):
    x[name] = jnp.concatenate([x[name]] * 2, axis=0)
    with pytest.raises(ValueError, match=rf"{name} has shape .* it must be"):
        bounded_decay(**x)


def test_a_transposed_state_is_refused(x):
    """[B,H,V,K] would be silent garbage wherever it fits; K != V makes it visible."""
    x["initial_state"] = x["initial_state"].swapaxes(2, 3)
    with pytest.raises(ValueError, match="initial_state"):
        bounded_decay(**x)


def test_segment_ids_must_cover_the_row(x):
    with pytest.raises(ValueError, match="segment_ids"):
        bounded_decay(**x, segment_ids=jnp.ones((1, 4), jnp.int32))
