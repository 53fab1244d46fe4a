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


@pytest.mark.parametrize("implementation", ["ref", "chunked", "pallas"])
def test_a_constant_decay_inside_a_trace_is_fine(x, implementation, short_chunks):
    """Fixed decays a head, as in RetNet: g has values while q is traced."""
    g = np.full(x["g"].shape, -0.1, np.float32)
    run = lambda q, g: bounded_decay(q, x["k"], x["v"], g, implementation=implementation)[0]  # noqa: E731
    np.testing.assert_allclose(
        jax.jit(lambda q: run(q, g))(x["q"]), jax.jit(run)(x["q"], g), rtol=1e-5, atol=1e-6
    )
    with pytest.raises(ValueError, match=r"g spans \[-6, -6\]"):
        jax.jit(lambda q: run(q, np.full_like(g, -6.0)))(x["q"])


def test_g_outside_the_bound_is_named_padding_left_out(x):
    segments = jnp.asarray([[1, 1, 0, 2, 2]], jnp.int32)
    bounded_decay(**x | {"g": x["g"].at[:, 2].set(jnp.nan)}, segment_ids=segments)
    for value in (0.1, -5.1, jnp.nan):
        with pytest.raises(ValueError, match=r"a log decay must lie in \[-5.0, 0\]"):
            bounded_decay(**x | {"g": x["g"].at[:, 3].set(value)}, segment_ids=segments)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"v": None}, "v is missing; expected"),
        ({"k": None}, "k is missing; to go with q"),
        ({"beta": 0.5}, "beta is a float, not an array; to go with q"),
        ({"segment_ids": [[1] * 5]}, "segment_ids is a list, not an array; it must have"),
        ({"segment_ids": jnp.ones((1, 5))}, "segment_ids is float32; it must be int32"),
        ({"scale": jnp.ones(3)}, "it must be one number"),
        ({"scale": float("nan")}, "it must be a finite number"),
        ({"scale": 1e39}, "it must be a finite number"),
        ({"scale": 10**400}, "it must be a finite number"),
        ({"scale": "1"}, "scale='1'; it must be a finite number"),
        ({"scale": [1, [2, 3]]}, "it must be a finite number"),
        ({"scale": True}, "it must be a finite number"),
        ({"initial_state": jnp.zeros((1, 2, 8, 12), jnp.bfloat16)}, "is bfloat16; it must be f"),
        ({"g": jnp.zeros((1, 5, 2, 8), jnp.float16)}, "g is float16; it must be float32 or"),
    ],
)
def test_bad_arguments_are_named(x, change, says):
    with pytest.raises(ValueError, match=says):
        bounded_decay(**x | change)


def test_a_step_names_a_wrong_shape(x):
    token = {n: x[n][:, 0] for n in ("q", "k", "v", "g", "beta")}
    with pytest.raises(ValueError, match="recurrent_step: state has shape"):
        recurrent_step(jnp.zeros((2, *x["initial_state"].shape[1:])), **token)
    with pytest.raises(ValueError, match="recurrent_step: beta has shape"):
        recurrent_step(x["initial_state"], **token | {"beta": token["beta"][:, 0]})
    for change, says in (
        ({"v": jnp.ones(token["v"].shape, jnp.int32)}, "v is int32; it must be float32"),
        ({"g": None}, "g is missing; to go with q"),
        ({"q": x["q"]}, r"q has shape \(1, 5, 2, 8\); expected \[B,H,width\]"),
        ({"v": token["v"][:0]}, r"v has shape \(0, 2, 12\); expected"),
        ({"scale": float("nan")}, "scale=nan; it must be a finite number"),
        ({"scale": jnp.ones(3)}, r"scale has shape \(3,\)"),
        ({"g": token["g"] + 6}, "g spans .* a log decay must lie in"),
        ({"beta": token["beta"] + 3}, "beta spans .* it must lie in"),
    ):
        with pytest.raises(ValueError, match=f"recurrent_step: {says}"):
            recurrent_step(x["initial_state"], **token | change)
    with pytest.raises(ValueError, match="recurrent_step: state is bfloat16"):
        recurrent_step(x["initial_state"].astype(jnp.bfloat16), **token)


@pytest.mark.parametrize("implementation", ["ref", "chunked", "pallas"])
def test_a_gradient_from_padding_reaches_nothing(x, implementation, short_chunks):
    """o / |o| at padding is 0 / 0: a NaN gradient of outputs that nobody uses."""
    segments = jnp.asarray([[1, 1, 0, 2, 2]], jnp.int32)

    def loss(x):
        o, _ = bounded_decay(**x, segment_ids=segments, implementation=implementation)
        unit = o / jnp.linalg.norm(o, axis=-1, keepdims=True)
        return jnp.sum(jnp.where((segments != 0)[..., None, None], unit, 0.0))

    grads = jax.grad(loss)(x)
    assert all(np.isfinite(np.asarray(g)).all() for g in grads.values())


def test_second_derivatives_are_refused_by_the_kernels_alone(x, short_chunks):
    def slope(q, implementation):
        loss = lambda q: jnp.sum(bounded_decay(**x | {"q": q}, implementation=implementation)[0])  # noqa: E731
        return jnp.sum(jax.grad(loss)(q) ** 2)

    twice = [jax.grad(slope)(x["q"], i) for i in ("ref", "chunked")]
    np.testing.assert_allclose(*twice, rtol=1e-4, atol=1e-5)
    with pytest.raises(NotImplementedError, match="first derivatives only"):
        jax.grad(slope)(x["q"], "pallas")


def test_beta_beyond_two_is_named(x):
    with pytest.raises(ValueError, match=r"beta spans .* it must lie in \[0, 2\]"):
        bounded_decay(**x | {"beta": x["beta"].at[0, 1].set(3.0)})


@pytest.mark.parametrize("name", ["k", "v", "g", "beta", "initial_state"])
def test_a_wrong_shape_names_the_argument(x, name):
    x[name] = jnp.concatenate([x[name]] * 2, axis=0)
    with pytest.raises(ValueError, match=rf"{name} has shape .* it must have"):
        bounded_decay(**x)


def test_a_transposed_state_is_refused(x):
    """[B,H,V,K] would be silent garbage wherever it fits; K != V makes it visible."""
    x["initial_state"] = x["initial_state"].swapaxes(2, 3)
    with pytest.raises(ValueError, match="initial_state"):
        bounded_decay(**x)


def test_segment_ids_must_cover_the_row(x):
    with pytest.raises(ValueError, match="segment_ids"):
        bounded_decay(**x, segment_ids=jnp.ones((1, 4), jnp.int32))
