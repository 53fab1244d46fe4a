"""The float64 recurrence against its reference, and a probe that finds the layer that drifts."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import configs
from mlmoe import build
from mlmoe.build import (
    abstract_batch,
    abstract_state,
    compile_probe,
    first_state,
    make_program,
    put,
)
from mlmoe.config import ModelConfig, TrainConfig, from_dict
from mlmoe.layers import incremental
from mlmoe.layers.balance import first_routing
from mlmoe.model import make_model
from mlmoe.precision import alarm, describe, make_probe, measure, recurrence64, relative_error
from mlmoe.sharding import make_mesh
from pallas_kernels.bounded_decay import chunked
from tests.golden import load
from tests.mlmoe.test_model import batch, close, residual, small

LONG = [[1] * 20 + [2] * 76, [1] * 60 + [2] * 30 + [0] * 6]


def dense(layout: str, remat: str = "none") -> ModelConfig:
    """`small` without experts, which take long to compile and feed nothing here."""
    config = small(layout, remat=remat)
    moe = dataclasses.replace(config.moe, dense_layers=config.layers)
    return dataclasses.replace(config, moe=moe)


def fresh(config: ModelConfig) -> Any:
    return jax.jit(make_model(config).init)(jax.random.key(0))


def probe(config: ModelConfig, params: Any) -> dict[str, Any]:
    routing = first_routing(config.moe, config.moe_layers)
    return measure(config, jax.jit(make_probe(config))(params, routing, batch(LONG)))


@pytest.mark.parametrize("name", ["delta_odd", "delta_floor", "additive_plain", "slot"])
def test_float64_meets_the_reference(name: str) -> None:
    ref = load(name)
    names = {"d": ("q", "k", "v", "g", "beta"), "a": ("q", "k", "v", "g")}
    inputs = tuple(ref[n][0, :, -1] for n in names.get(name[0], ("q", "k", "v", "s", "g")))
    ends = ("key_slots", "value_slots") if name == "slot" else ("ht",)
    want = [ref[n][0, -1].astype(np.float64) for n in ends]
    start = tuple(map(np.zeros_like, want)) if name == "slot" else ref["h0"][0, -1]
    o_TV, state = recurrence64(inputs, jax.tree.map(np.float64, start))
    o_TV *= ref["scale"] * inputs[0].shape[-1] ** 0.5
    assert relative_error(o_TV, ref["o"][0, :, -1].astype(np.float64)) < 1e-6
    assert relative_error(jax.tree.leaves(state), want) < 1e-6


def test_scanned_and_recomputed_layers_are_told_apart() -> None:
    """Two scanned repeats of DA, then S; the second A is set to forget at once."""
    config = residual(dense("DADAS", remat="full"), "none", 1)
    params = fresh(config)
    decay = params["block0_0"]["A1"]["mixer"]["decay"]
    decay["bias"] = decay["bias"].at[1].set(100.0)
    values = probe(config, params)
    assert values["layer"] == [0, 1, 2, 3, 4]
    assert np.argmax(values["at_floor"]) == 3 and values["at_floor"][3] == 1.0
    np.testing.assert_allclose([values[f"memory_q{q}"][3] for q in (10, 50, 90)], 0.2, rtol=1e-6)
    assert min(values["state_error"]) > 0 and max(values["state_error"]) < 1e-5
    assert alarm(values, 1e-5) == ""
    assert "decays at the floor 100.0%" in describe(values)


def test_a_state_kept_in_bfloat16_raises_the_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    next_state = chunked._next_state

    def rounded(S_BHKV: jax.Array, step: Any) -> Any:
        S_BHKV, read = next_state(S_BHKV, step)
        return S_BHKV.astype(jnp.bfloat16).astype(jnp.float32), read

    monkeypatch.setattr(chunked, "_next_state", rounded)
    config = dense("D")
    values = probe(config, fresh(config))
    assert 1e-3 < values["state_error"][0] < 1e-1
    assert alarm(values, 1e-1) == ""
    text = alarm(values, 1e-3)
    assert text.startswith("warning: ") and "state_error_max=0.001" in text and "layer 0" in text


def test_the_alarm_names_the_layers_and_hears_nan() -> None:
    values = {"layer": [0, 2, 5], "state_error": [1e-7, float("nan"), 0.02]}
    assert alarm(values, 0.01).endswith("of its size: nan in layer 2, 0.02 in layer 5")
    assert relative_error(np.array([np.nan, 1.0]), np.ones(2)) != 0
    assert np.isnan(relative_error((np.ones(2), np.array([np.nan, 1.0])), (np.ones(2),) * 2))


def run_config(layout: str) -> TrainConfig:
    c = configs.load("8k:tiny")
    c.update(context=96, batch=8, workdir="unused")
    built = from_dict(TrainConfig, c.to_dict())
    return dataclasses.replace(built, model=dense(layout))


def test_eight_devices_find_what_one_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "compiler_options", lambda: None)  # compiles in half the time
    config, mesh = run_config("DS"), make_mesh()
    data = batch([*LONG, [0] * 96, [1] * 96, *LONG, *LONG])
    program = make_program(config)
    state = first_state(program, mesh)
    eight = compile_probe(config, program, mesh)(state.params, state.routing, put(data, mesh))
    params, routing = jax.device_get((state.params, state.routing))
    one = jax.jit(make_probe(config.model))(params, routing, data)
    assert np.asarray(eight[0].document_T).tolist() == [1] * 96
    close(eight, one, 1e-5)
    assert max(measure(config.model, eight)["state_error"]) < 1e-5


def test_training_takes_no_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incremental, "take_sample", lambda *_: pytest.fail("sampled"))
    config = run_config("DL")
    mesh, program = make_mesh(), make_program(config)
    args = abstract_state(program, mesh), abstract_batch(config, mesh)
    with jax.set_mesh(mesh):
        jax.eval_shape(program.train_step, *args)
        with pytest.raises(pytest.fail.Exception, match="sampled"):
            params, routing = args[0].params, args[0].routing
            jax.eval_shape(make_probe(config.model), params, routing, args[1])
