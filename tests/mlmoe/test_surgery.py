"""Hand-overs: equality where nothing is converted, what is converted, and what is refused."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlmoe import convert
from mlmoe.config import ModelConfig
from mlmoe.errors import UserError
from mlmoe.layers.balance import first_routing
from mlmoe.loss import cross_entropy
from mlmoe.model import make_model
from mlmoe.optim import make
from mlmoe.step import TrainState, init_state
from mlmoe.surgery import apply, by_name, from_names, plan
from tests.mlmoe.test_model import ROW, batch, residual, small
from tests.mlmoe.test_step import run_config


def state_of(model: ModelConfig, seed: int, first: bool = False) -> TrainState:
    """A state of random numbers, nothing compiled; `first`: what starts as 0 or 1 is 0 or 1."""
    config, built = run_config(), make_model(model)
    shapes = jax.eval_shape(lambda: init_state(config, built, make(config.optim, built.axes)))
    rng = np.random.default_rng(seed)

    def value(path: tuple[Any, ...], x: jax.ShapeDtypeStruct) -> np.ndarray:
        name = jax.tree_util.keystr(path)
        if first and (x.dtype != jnp.float32 or "opt_state" in name or "w_proj" in name):
            return np.zeros(x.shape, x.dtype)
        if "gain" in name:
            return np.ones(x.shape, x.dtype)
        if first and "read" in name:
            return np.zeros(x.shape, x.dtype)
        if x.dtype != jnp.float32:
            return np.full(x.shape, 3, x.dtype)
        return rng.normal(size=x.shape).astype(np.float32) * 0.25

    return jax.tree_util.tree_map_with_path(value, shapes)


def handed(old: ModelConfig, new: ModelConfig) -> tuple[list[Any], TrainState, TrainState]:
    """Moves, the old state, and the state that the new model starts with."""
    state, fresh = state_of(old, 1), state_of(new, 2, first=True)
    moves = plan(old, new, state.params, fresh.params)
    return moves, state, apply(moves, old, new, state, fresh)


def loss(config: ModelConfig, state: TrainState) -> float:
    data, routing = batch(ROW), first_routing(config.moe, config.moe_layers)

    @jax.jit
    def nats(params: Any) -> jax.Array:
        x, head, _ = make_model(config).apply(params, routing, data)
        sums = cross_entropy(x, head, data.targets_BT, data.weights_BT, config.vocab)
        return sums.nats / sums.tokens

    return float(nats(state.params))


@pytest.mark.parametrize("layout", ["DLDLDL", "DLL"])
def test_names_take_a_stack_apart_and_back(layout: str) -> None:
    config = residual(small(layout), "none", 1)
    params = state_of(config, 0).params
    flat = by_name(config, params)
    assert {n.partition("/")[0] for n in flat} >= {f"layer {i}" for i in range(len(layout))}
    jax.tree.map(np.testing.assert_array_equal, from_names(config, flat, params), params)


@pytest.mark.parametrize("kind", ["window", "block"])
def test_a_residual_switched_on_moves_nothing(kind: str) -> None:
    """Zero projections; or a softmax over depth that is a plain mean, of which a norm is taken: the
    same but for the norm's eps, small here, beside a mean that is a part of the sum."""
    old = residual(small("DLL", norm_eps=1e-9), "none", 1)
    new = residual(old, kind, 2)
    moves, state, got = handed(old, new)
    assert {m.how for m in moves} == {"carried", "new"}
    before = loss(old, state)
    assert loss(new, got) == pytest.approx(before, rel=1e-5)
    moved = jax.tree.map(lambda x: x + 0.1, got.params)
    assert abs(loss(new, got._replace(params=moved)) - before) > 1e-3


def test_another_cut_of_the_stack_carries_everything() -> None:
    """Positions change and with them the segments; weights, moments, bias and counts go along."""
    old, new = residual(small("RRRR"), "none", 1), residual(small("RLRL"), "none", 1)
    moves, state, got = handed(old, new)
    assert {m.how for m in moves} == {"carried"}
    for was, now in zip(kept_for(state), kept_for(got), strict=True):
        jax.tree.map(np.testing.assert_array_equal, by_name(old, was), by_name(new, now))
    np.testing.assert_array_equal(got.routing.bias, state.routing.bias)
    assert int(got.step) == 0
    same = by_name(old, state.params), by_name(new, got.params)
    jax.tree.map(np.testing.assert_array_equal, *same)


@pytest.mark.parametrize("was", ["F", "L", "R"])
def test_attention_becomes_incremental(was: str) -> None:
    old, new = residual(small(was + "L"), "none", 1), residual(small("DL"), "none", 1)
    moves, state, got = handed(old, new)
    how = {m.name: m.how for m in moves}
    made = {n for n, h in how.items() if h == "converted"}
    names = ["w_q", "w_k", "w_v", "w_o"] + ["w_gate"] * (was != "F")
    assert made == {f"layer 0/mixer/{n}" for n in names}
    assert how["layer 0/mixer/conv_q/w"] == how["layer 0/mixer/decay/bias"] == "new"
    assert how["layer 1/mixer/w_uq"] == how["layer 0/channel/w_in"] == "carried"
    source, flat = by_name(old, state.params), by_name(new, got.params)
    np.testing.assert_array_equal(flat["layer 0/mixer/w_o"], source["layer 0/mixer/w_o"])
    assert was != "L" or np.isfinite(loss(new, got))
    # The scores of a head keep their form, up to the size that normalised keys do not have.
    if was == "F":
        q, k = source["layer 0/mixer/w_q"], source["layer 0/mixer/w_k"]
    else:
        q, k, _ = convert._multiplied_out(old, 0, source)
    want = jnp.einsum("DHK,EHK->HDE", q, k)
    have = jnp.einsum("DHK,EHK->HDE", flat["layer 0/mixer/w_q"], flat["layer 0/mixer/w_k"])
    for h in range(2):
        np.testing.assert_allclose(_unit(have[h]), _unit(want[h]), atol=1e-4)
    # Moments of what was converted are fresh; what was carried keeps its own.
    kept = [by_name(new, x) for x in kept_for(got)]
    assert any("layer 0/mixer/w_q" in x for x in kept)
    for x in kept:
        assert not np.any(x.get("layer 0/mixer/w_q", 0.0))
        assert np.any(x.get("layer 1/mixer/w_uq", 1.0))


def kept_for(state: TrainState) -> list[Any]:
    """The parts of the optimizer's state that are shaped like the parameters."""
    is_params = lambda x: isinstance(x, dict) and "embedding" in x  # noqa: E731
    return [x for x in jax.tree.leaves(state.opt_state, is_leaf=is_params) if is_params(x)]


def _unit(x: jax.Array) -> np.ndarray:
    return np.asarray(x / jnp.linalg.norm(x))


def test_wider_scores_get_their_best_approximation() -> None:
    q, k = jax.random.normal(jax.random.key(0), (2, 10, 3, 6))
    q4, k4 = convert._to_width(q, k, 4)
    for h in range(3):
        u, s, vt = np.linalg.svd(np.asarray(q[:, h] @ k[:, h].T))
        want = (u[:, :4] * s[:4]) @ vt[:4]
        np.testing.assert_allclose(q4[:, h] @ k4[:, h].T, want, atol=1e-4)


def test_sharing_latents_drops_the_followers_own() -> None:
    old = residual(small("DLRL" + "L"), "none", 1)
    attention = dataclasses.replace(old.attention, kv_share=2)
    new = dataclasses.replace(old, attention=attention)
    moves, state, got = handed(old, new)
    dropped = sorted(m.name for m in moves if m.how == "dropped")
    assert dropped == [f"layer {i}/mixer/{n}" for i in (2, 4) for n in ("kv_norm/gain", "w_dkv")]
    assert np.isfinite(loss(new, got))
    with pytest.raises(UserError, match="layer 2/mixer/w_dkv: the old model has no such tensor"):
        plan(new, old, got.params, state.params)


@pytest.mark.parametrize(
    ("new", "says"),
    [
        (small("DLL"), "2 layers and the new one 3"),
        (small("LL"), "there is no way from incremental attention, delta update to latent"),
        (small("DL", d_model=24), r"embedding: is \(40, 16\) in the old model, \(40, 24\)"),
        (residual(small("DL"), "none", 1), "mixer_read/w: the new model has no such tensor"),
    ],
)
def test_what_cannot_be_carried_over_is_named(new: ModelConfig, says: str) -> None:
    old = small("DL")
    shapes = [jax.eval_shape(make_model(c).init, jax.random.key(0)) for c in (old, new)]
    with pytest.raises(UserError, match=says):
        plan(old, new, *shapes)
