"""The step: accumulation, devices, skipped steps, and that it learns."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import configs
from mlmoe import build
from mlmoe.build import Program, abstract_state, compile_train, first_state, make_program, put
from mlmoe.config import TrainConfig, from_dict
from mlmoe.data.batch import Batch
from mlmoe.layers.router import BINS
from mlmoe.sharding import make_mesh
from mlmoe.step import TrainState
from pallas_kernels.aot import collectives
from tests.mlmoe.test_model import batch, close, small


def run_config(**changes: Any) -> TrainConfig:
    c = configs.load("8k:tiny")
    c.update(context=33, batch=8, steps=20, workdir="unused")
    c.optim.update(warmup=0, lr=0.02, adam_lr=0.02)
    for key, value in changes.items():
        section, _, name = key.rpartition("__")
        (c[section] if section else c)[name] = value
    built = from_dict(TrainConfig, c.to_dict())
    return TrainConfig(**{**vars(built), "model": small("DL")})


def rows(n: int = 8) -> Batch:
    """Rows of very unequal padding, so that a mean of means would differ from the mean."""
    return batch(
        [
            [1] * (1 + 4 * i) + [2] * (32 - 4 * i) if i % 2 else [1] * (2 + i) + [0] * (31 - i)
            for i in range(n)
        ]
    )


class Compiled(NamedTuple):
    mesh: jax.sharding.Mesh
    program: Program
    train_step: Any

    def first_state(self) -> TrainState:
        return first_state(self.program, self.mesh)


@functools.cache
def compiled(config: TrainConfig, devices: int = 1) -> Compiled:
    """Compiled once for all tests: it takes longer than they do."""
    mesh = make_mesh(jax.devices()[:devices])
    program = make_program(config)
    return Compiled(mesh, program, compile_train(config, program, mesh))


def one_step(config: TrainConfig, devices: int, data: Batch) -> tuple[TrainState, Any]:
    run = compiled(config, devices)
    return run.train_step(run.first_state(), put(data, run.mesh))


@pytest.fixture(autouse=True, scope="module")
def quick_compiles() -> Iterator[None]:
    """LLVM as little as tests/conftest.py asks for: half the compile time of a run's options."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "compiler_options", lambda: None)
        yield


@pytest.fixture(scope="module")
def reference() -> tuple[TrainState, Any]:
    return one_step(run_config(), 1, rows())


@pytest.mark.parametrize(
    ("accumulate", "devices"),
    [*(pytest.param(*x, marks=pytest.mark.slow) for x in ((4, 1), (1, 8))), (2, 4)],
)
def test_micro_batches_and_devices_change_nothing(
    accumulate: int, devices: int, reference: tuple[TrainState, Any]
) -> None:
    state, metrics = one_step(run_config(accumulate=accumulate), devices, rows())
    close(metrics._asdict(), reference[1]._asdict(), 1e-5)
    close(state.routing.bias, reference[0].routing.bias, 1e-5)
    # Muon's Newton-Schulz makes small gradients into full-size updates: rounding grows with it.
    close(state.params, reference[0].params, 2e-3)


def test_statistics_cross_devices_in_one_collective_a_step() -> None:
    """Two MoE layers, two micro-batches: one sum over devices of all histograms, not four."""
    config = run_config(accumulate=2, batch=16)
    moe = dataclasses.replace(config.model.moe, dense_layers=0)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, moe=moe))
    text = compile_train(config, make_program(config), make_mesh()).as_text()
    counts = [c for c in collectives(text) if c.dtype == "s32" and BINS in c.shape]
    assert [c.shape for c in counts] == [(2, moe.experts, BINS)]


@pytest.mark.parametrize("optimizer", ["muon", pytest.param("adamw", marks=pytest.mark.slow)])
def test_it_learns_a_batch(optimizer: str) -> None:
    run = compiled(run_config(optim__name=optimizer))
    state, data, losses = run.first_state(), put(rows(), run.mesh), []
    for _ in range(20):
        state, metrics = run.train_step(state, data)
        losses.append(float(metrics.loss))
    assert losses[0] == pytest.approx(np.log(40), rel=0.2)
    assert losses[-1] < 0.6 * losses[0]
    assert int(state.step) == 20 and int(state.skipped) == 0


def test_a_step_that_is_not_finite_changes_only_its_counters() -> None:
    run, data = compiled(run_config()), rows()
    poison = data._replace(weights_BT=np.where(np.arange(33) == 0, np.nan, data.weights_BT))
    before = run.first_state()
    kept = jax.tree.map(np.asarray, (before.params, before.opt_state, before.routing))
    poison = poison._replace(weights_BT=poison.weights_BT.astype(np.float32))
    state, metrics = run.train_step(before, put(poison, run.mesh))
    jax.tree.map(
        np.testing.assert_array_equal, (state.params, state.opt_state, state.routing), kept
    )
    assert (int(state.step), int(state.skipped), int(state.bad_in_a_row)) == (1, 1, 1)
    assert np.isnan(float(metrics.loss))
    state, metrics = run.train_step(state, put(data, run.mesh))
    assert (int(state.step), int(state.skipped), int(state.bad_in_a_row)) == (2, 1, 0)
    assert np.isfinite(float(metrics.loss))


def test_a_batch_of_padding_alone_is_skipped() -> None:
    data = batch([[0] * 33] * 8)
    state, metrics = one_step(run_config(), 1, data)
    assert int(state.skipped) == 1 and np.isfinite(float(metrics.grad_norm))
    assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(state.params))


def test_balance_moves_the_bias_and_keeps_its_mean() -> None:
    state, _ = one_step(run_config(), 1, rows())
    assert float(jnp.abs(state.routing.bias).max()) > 0.0
    np.testing.assert_allclose(jnp.mean(state.routing.bias, -1), 0.0, atol=1e-6)


def test_abstract_state_is_what_init_makes() -> None:
    mesh = make_mesh()
    program = make_program(run_config())
    state = first_state(program, mesh)
    jax.tree.map(
        lambda a, b: (
            (a.shape, a.dtype, a.sharding) == (b.shape, b.dtype, b.sharding) or pytest.fail()
        ),
        abstract_state(program, mesh),
        state,
    )
