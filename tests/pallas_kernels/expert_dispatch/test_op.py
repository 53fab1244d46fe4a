"""Routed experts: `ref` against float64 values, the others against `ref`, what must not move."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.expert_dispatch import expert_ffn, grouped
from pallas_kernels.expert_dispatch.activations import glu, parts

GOLDEN = Path(__file__).parents[2] / "golden"
R, F = 6, 10

pytestmark = pytest.mark.usefixtures("narrow_blocks")
ALL = pytest.mark.parametrize("implementation", ["ref", "sorted", "pallas"])
FAST = pytest.mark.parametrize("implementation", ["sorted", "pallas"])


def _error(got, want):
    got, want = (np.asarray(a, np.float64) for a in (got, want))
    return np.sqrt(np.mean((got - want) ** 2)) / max(np.sqrt(np.mean(want**2)), 1e-30)


def _arguments(experts_NA, E, activation="capped", dtype=jnp.float32, seed=0):
    """(x, experts, weights, w_in, w_out) and a cotangent for y."""
    rng, (N, A) = np.random.default_rng(seed), experts_NA.shape

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    w_in_EPRF, w_out_EFR = normal(E, parts(activation), R, F), normal(E, F, R)
    weights_NA = jnp.asarray(rng.uniform(0.1, 1, size=(N, A)), jnp.float32)
    x_NR, dy_NR = normal(N, R), normal(N, R)
    return (x_NR, jnp.asarray(experts_NA, jnp.int32), weights_NA, w_in_EPRF, w_out_EFR), dy_NR


def _distinct(N, A, E, seed=0):
    """A distinct experts a token, some experts far more popular than others."""
    rng = np.random.default_rng(seed)
    return np.argsort(-rng.gumbel(size=(N, E)) - rng.normal(size=E), axis=1)[:, :A]


@partial(jax.jit, static_argnames=("activation", "implementation"))
def _run(args, dy_NR, activation="capped", implementation="sorted"):
    """(y, dx, dweights, dw_in, dw_out)."""
    x_NR, experts_NA, *weights = args
    f = partial(expert_ffn, activation=activation, implementation=implementation)
    y_NR, pull = jax.vjp(lambda x_NR, *weights: f(x_NR, experts_NA, *weights), x_NR, *weights)
    return y_NR, *pull(dy_NR)


def _padded(experts_NA, rows):
    """The same with the given rows turned into padding, in both ways to say no expert."""
    experts_NA = experts_NA.copy()
    experts_NA[rows] = [-1, 7]
    return experts_NA


# E = 7. Sizes around the block sizes 16 and 64, and every way for an expert to be unusual. Few
# shapes: each costs two compilations.
ROUTES = {
    "one token": _distinct(1, 2, 7),
    "A is 1": _distinct(15, 1, 7),
    "A is E": _distinct(17, 7, 7),
    "63 tokens": _distinct(63, 2, 7),
    "65 tokens": _distinct(65, 2, 7),
    "all to one": np.full((65, 2), 3),
    "first and last expert only": np.tile([0, 6], (63, 1)),
    "padding between": _padded(_distinct(63, 2, 7), [0, 5, 6, 62]),
    "some choices missing": np.where(_distinct(65, 2, 7) < 2, -1, _distinct(65, 2, 7)),
    "beyond E is no expert": np.where(_distinct(65, 2, 7) < 2, 7, _distinct(65, 2, 7)),
}


@ALL
def test_latent_moe_reference(implementation):
    case = np.load(GOLDEN / "latent_moe.npz")
    p = {name: jnp.asarray(a, jnp.float32) for name, a in case.items()}
    u_NR = jax.jit(partial(expert_ffn, activation="capped", implementation=implementation))(
        p["x"] @ p["w_down_latent"],
        jnp.asarray(case["experts"], jnp.int32),
        p["weights"],
        jnp.stack([p["e_gate"], p["e_up"]], axis=1),
        p["e_down"],
    )
    shared_NF = glu([p["x"] @ p["s_gate"], p["x"] @ p["s_up"]], "capped")
    scale_N1 = jax.lax.rsqrt(jnp.mean(u_NR**2, axis=1, keepdims=True) + 1e-5)
    y_ND = shared_NF @ p["s_down"] + (u_NR * scale_N1 * p["latent_norm"][None]) @ p["w_up_latent"]
    assert _error(y_ND, case["y"]) < 1e-5


@FAST
@pytest.mark.parametrize("experts_NA", ROUTES.values(), ids=ROUTES)
def test_equals_ref(experts_NA, implementation):
    args, dy_NR = _arguments(experts_NA, E=7)
    names = ("y", "dx", "dweights", "dw_in", "dw_out")
    want, got = (_run(args, dy_NR, implementation=i) for i in ("ref", implementation))
    for name, g, w in zip(names, got, want, strict=True):
        assert _error(g, w) < (1e-5 if name == "y" else 1e-4), name


@FAST
@pytest.mark.parametrize("activation", ["four", "swiglu"])
def test_other_activations(activation, implementation):
    args, dy_NR = _arguments(_distinct(40, 2, 5), E=5, activation=activation)
    want, got = (_run(args, dy_NR, activation, i) for i in ("ref", implementation))
    assert max(map(_error, got, want)) < 1e-5


@ALL
def test_bf16(implementation):
    args, dy_NR = _arguments(_distinct(65, 2, 7), E=7, dtype=jnp.bfloat16)
    exact = [a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a for a in args]
    want = _run(tuple(exact), dy_NR.astype(jnp.float32), implementation="ref")
    y_NR, *gradients = _run(args, dy_NR, implementation=implementation)
    assert y_NR.dtype == jnp.bfloat16 and gradients[1].dtype == jnp.float32
    assert _error(y_NR, want[0]) < 5e-3
    assert max(map(_error, gradients, want[1:])) < 2e-2


@ALL
def test_padding_may_hold_nan(implementation):
    """NaN in x, weights and dy of padding rows: 0 there, and not a bit different elsewhere."""
    pad = np.array([0, 7, 8, 62])
    args, dy_NR = _arguments(_padded(_distinct(63, 2, 7), pad), E=7)
    x_NR, experts_NA, weights_NA, *matrices = args
    clean = _run(args, dy_NR, implementation=implementation)
    x_NR, weights_NA, dy_NR = (a.at[pad].set(jnp.nan) for a in (x_NR, weights_NA, dy_NR))
    holes = (x_NR, experts_NA, weights_NA, *matrices)
    got = _run(holes, dy_NR, implementation=implementation)
    for by_row in got[:3]:
        np.testing.assert_array_equal(by_row[pad], 0)
    for g, w in zip(got, clean, strict=True):
        assert jnp.isfinite(g).all()
        np.testing.assert_array_equal(g, w)


def test_native_grouped_products(monkeypatch):
    """What a TPU runs, NaN in the padding included; a CPU would never come here by itself."""
    monkeypatch.setattr(grouped, "dot", grouped._ragged_dot)
    monkeypatch.setattr(grouped, "pullback", grouped._ragged_pullback)
    pad = np.array([0, 7, 8, 62])
    (x_NR, *rest), dy_NR = _arguments(_padded(_distinct(63, 2, 7), pad), E=7)
    want = _run((x_NR, *rest), dy_NR, implementation="ref")
    holes = ((x_NR.at[pad].set(jnp.nan), *rest), dy_NR.at[pad].set(jnp.nan))
    got = jax.jit(_run.__wrapped__)(*holes)  # not from the cache, which holds the other form
    assert max(map(_error, got, want)) < 1e-5


@FAST
def test_padding_rows_may_be_left_out(implementation):
    pad = np.array([7, 64])
    args, dy_NR = _arguments(_padded(_distinct(65, 2, 7), pad), E=7)
    keep = np.setdiff1d(np.arange(65), pad)
    y_NR, *_, dw_in, dw_out = _run(args, dy_NR, implementation=implementation)
    fewer = tuple(a[keep] for a in args[:3]) + args[3:]
    want_y_NR, *_, want_in, want_out = _run(fewer, dy_NR[keep], implementation=implementation)
    assert max(map(_error, (y_NR[keep], dw_in, dw_out), (want_y_NR, want_in, want_out))) < 1e-6


@ALL
def test_all_padding_gives_zero(implementation):
    args, dy_NR = _arguments(np.full((63, 2), -1), E=7)
    for out in _run(args, dy_NR, implementation=implementation):
        np.testing.assert_array_equal(out, 0)


@FAST
def test_renaming_the_experts_changes_nothing(implementation):
    experts_NA = _distinct(65, 2, 7)
    (x_NR, experts, weights_NA, w_in, w_out), dy_NR = _arguments(experts_NA, E=7)
    old_E = np.random.default_rng(3).permutation(7)  # the new expert e is the old old_E[e]
    new_NA = jnp.asarray(np.argsort(old_E)[experts_NA], jnp.int32)
    run = partial(_run, dy_NR=dy_NR, implementation=implementation)
    y, dx, dp, dw_in, dw_out = run((x_NR, experts, weights_NA, w_in, w_out))
    renamed = run((x_NR, new_NA, weights_NA, w_in[old_E], w_out[old_E]))
    for g, w in zip(renamed, (y, dx, dp, dw_in[old_E], dw_out[old_E]), strict=True):
        assert _error(g, w) < 1e-6


@FAST
def test_unused_experts_get_exactly_zero_gradient(implementation):
    args, dy_NR = _arguments(np.full((65, 2), 2), E=7)
    *_, dw_in, dw_out = _run(args, dy_NR, implementation=implementation)
    for dw in (dw_in, dw_out):
        np.testing.assert_array_equal(jnp.delete(dw, 2, axis=0), 0)
        assert jnp.abs(dw[2]).max() > 0


@FAST
def test_repeated_calls_scan_and_remat_agree_bit_for_bit(implementation):
    args, dy_NR = _arguments(_distinct(65, 2, 7), E=7)
    x_NR, experts_NA, weights_NA, *matrices = args

    def two_layers(x_NR, remat):
        def layer(x_NR, _):
            rest = experts_NA, weights_NA, *matrices
            y_NR = expert_ffn(x_NR, *rest, activation="capped", implementation=implementation)
            return y_NR, None

        y_NR, _ = jax.lax.scan(jax.checkpoint(layer) if remat else layer, x_NR, None, length=2)
        return jnp.vdot(y_NR, dy_NR)

    plain, again, remat = (
        jax.jit(jax.value_and_grad(two_layers), static_argnums=1)(x_NR, r)
        for r in (False, False, True)
    )
    for other in (again, remat):
        np.testing.assert_array_equal(other[0], plain[0])
        np.testing.assert_array_equal(other[1], plain[1])


@pytest.mark.parametrize(
    ("implementation", "check_vma"), [("sorted", False), ("sorted", True), ("pallas", False)]
)
def test_eight_devices_equal_one(implementation, check_vma):
    """Tokens split over 8 devices, experts on each; the gradients of the experts add up."""
    args, dy_NR = _arguments(_distinct(64, 2, 5), E=5)
    x_NR, experts_NA, weights_NA, *matrices = args
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split, whole = jax.P("data"), jax.P()

    def local(x_NR, experts_NA, weights_NA, *matrices):
        if check_vma:  # a custom_vjp does not insert the sum over devices; this transposes to it
            matrices = [jax.lax.pcast(w, "data", to="varying") for w in matrices]
        rest = experts_NA, weights_NA, *matrices
        return expert_ffn(x_NR, *rest, activation="capped", implementation=implementation)

    specs = (split, split, split, whole, whole)
    f = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=split, check_vma=check_vma)

    @jax.jit
    def run(x_NR, *weights):
        y_NR, pull = jax.vjp(lambda x_NR, *w: f(x_NR, experts_NA, *w), x_NR, *weights)
        return y_NR, *pull(dy_NR)

    got = run(x_NR, weights_NA, *matrices)
    assert max(map(_error, got, _run(args, dy_NR))) < 1e-6


def test_bad_input():
    (x, experts, weights, w_in, w_out), _ = _arguments(_distinct(8, 2, 4), E=4)
    call = partial(expert_ffn, activation="capped")
    good = [x, experts, weights, w_in, w_out]
    bad = {
        r"x must have rank 2, got shape \(1, 8, 6\)": (0, x[None]),
        r"weights must have rank 2, got shape \(16,\)": (2, weights.reshape(-1)),
        r"w_out is a NoneType, expected an array": (4, None),
        r"experts has shape \(7, 2\), expected \(8, 2\)": (1, experts[:7]),
        r"weights has shape \(8, 1\), expected \(8, 2\)": (2, weights[:, :1]),
        r"w_in has shape \(4, 2, 5, 10\), expected \(4, 2, 6, 10\)": (3, w_in[:, :, :5]),
        r"w_out has shape \(4, 10, 5\), expected \(4, 10, 6\)": (4, w_out[..., :5]),
        r"'capped' needs 2 projections, w_in \(4, 1, 6, 10\) has 1": (3, w_in[:, :1]),
        r"experts is uint32, expected int32": (1, experts.astype(jnp.uint32)),
        r"x is float16, expected float32 or bfloat16": (0, x.astype(jnp.float16)),
        r"w_out is bfloat16, expected the dtype of x, float32": (4, w_out.astype(jnp.bfloat16)),
        r"weights is int32, expected a float": (2, weights.astype(jnp.int32)),
    }
    for message, (i, value) in bad.items():
        with pytest.raises(ValueError, match=message):
            call(*good[:i], value, *good[i + 1 :])
    with pytest.raises(ValueError, match=r"'dense'; the choices are 'ref', 'sorted' and 'pallas'"):
        call(*good, implementation="dense")
    with pytest.raises(ValueError, match=r"'relu'; the choices are four, capped, swiglu"):
        expert_ffn(*good, activation="relu")
    with pytest.raises(ValueError, match=r"\['capped'\]; the choices are four"):
        expert_ffn(*good, activation=["capped"])
