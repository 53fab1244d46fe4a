"""A training step with its experts split over the mesh against one device; its checkpoints."""

import dataclasses
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlmoe import build, optim
from mlmoe.build import abstract_state, compile_train, first_state, make_program, put
from mlmoe.checkpoint import Checkpoints
from mlmoe.config import MeshConfig, TrainConfig
from mlmoe.layers import exchange
from mlmoe.layers.balance import first_routing
from mlmoe.sharding import make_mesh, sharding
from mlmoe.step import TrainState, loss_sums
from tests.mlmoe.layers.test_expert_parallel import emulated
from tests.mlmoe.test_model import close
from tests.mlmoe.test_step import rows, run_config

# All experts of two layers as parameters, and as the batch of matrices that Muon makes of them.
WHOLE = r"\[(2,8,2,8,12|32,8,12|2,8,12,8|16,12,8|16,8,12)\]"


@pytest.fixture(autouse=True, scope="module")
def on_cpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "ragged_all_to_all", emulated)
        patch.setattr(build, "compiler_options", lambda: None)  # half the compile time of a run's
        yield


def config(expert: int, transport: str = "auto", buffer: float = 0.0) -> TrainConfig:
    """Two layers of 8 experts in one scan, so that the experts' axis is not their first."""
    c = run_config(optim__name="adamw")
    moe = dataclasses.replace(
        c.model.moe, experts=8, active=3, transport=transport, buffer=buffer, dense_layers=0
    )
    plain = dataclasses.replace(c.model.residual, kind="none")
    model = dataclasses.replace(c.model, layout="LL", moe=moe, residual=plain)
    return dataclasses.replace(c, model=model, mesh=MeshConfig(expert))


def one_step(c: TrainConfig, devices: int = 8) -> tuple[TrainState, Any, str]:
    mesh, program = make_mesh(jax.devices()[:devices], c.mesh.expert), make_program(c)
    step = compile_train(c, program, mesh)
    state, metrics = step(first_state(program, mesh), put(rows(), mesh))
    return state, metrics, step.as_text()


@pytest.fixture(scope="module")
def reference() -> tuple[TrainState, Any]:
    return one_step(config(1), 1)[:2]


@pytest.mark.parametrize(
    ("expert", "transport"),
    [(8, "gather"), (4, "ragged"), pytest.param(2, "gather", marks=pytest.mark.slow)],
)
def test_a_step_on_any_mesh_is_the_same_step(
    expert: int, transport: str, reference: tuple[TrainState, Any]
) -> None:
    state, metrics, text = one_step(config(expert, transport))
    close(metrics._asdict(), reference[1]._asdict(), 1e-5)
    close(state.routing, reference[0].routing, 1e-5)
    close(state.params, reference[0].params, 1e-3)  # Adam divides by the root of tiny squares
    w_in = state.params["block0_0"]["L0"]["channel"]["w_in"]
    assert w_in.sharding.shard_shape(w_in.shape) == (2, 8 // expert, 2, 8, 12)
    assert not re.search(WHOLE, text)


def test_a_tight_buffer_is_counted() -> None:
    """A bias sends all tokens to experts 0, 1 and 2, each alone on its shard, in both layers."""
    c = config(8, "ragged", buffer=1.0)
    mesh, model = make_mesh(expert=8), make_program(c).model
    data = rows()
    routing = first_routing(c.model.moe, 2)
    routing = routing._replace(bias=jnp.tile(10.0 * (jnp.arange(8) < 3), (2, 1)))
    params, placed = jax.jit(model.init)(jax.random.key(0)), put(data, mesh)
    with jax.set_mesh(mesh):
        _, stats = jax.jit(partial(loss_sums, c, model))(params, routing, placed)
    tokens, room = int((data.segment_ids_BT > 0).sum()), 33 * 3
    stats = jax.tree.map(lambda x: np.sum(x, axis=1), stats)  # over the devices
    np.testing.assert_array_equal(stats.load_E[:, :3], tokens)
    np.testing.assert_array_equal(stats.unsent, 3 * (tokens - room))


def test_init_makes_only_the_own_experts() -> None:
    mesh, program = make_mesh(expert=8), make_program(config(8))
    where = jax.tree.map(lambda x: x.sharding, abstract_state(program, mesh))
    text = jax.jit(program.init, out_shardings=where).lower().compile().as_text()
    assert not re.search(WHOLE, text)


def test_muon_treats_each_expert_where_it_is() -> None:
    axes = {"w_in": ("layer", "expert", "part", "latent", "hidden"), "norm": ("norm",)}
    tx = optim.make(run_config().optim, axes)
    shapes = {"w_in": (2, 8, 2, 8, 12), "norm": (8,)}
    grads = {k: jax.random.normal(jax.random.key(i), s) for i, (k, s) in enumerate(shapes.items())}
    params = jax.tree.map(jnp.ones_like, grads)
    want, kept = jax.jit(tx.update)(grads, tx.init(params), params)
    mesh = make_mesh(expert=8)
    where = {k: sharding(mesh, *axes[k]) for k in axes}
    put = lambda tree: jax.tree.map(jax.device_put, tree, where)  # noqa: E731
    with jax.set_mesh(mesh):
        update = jax.jit(tx.update).lower(put(grads), tx.init(put(params)), put(params)).compile()
        got, kept_split = update(put(grads), tx.init(put(params)), put(params))
    close((got, kept_split), (want, kept), 1e-5)
    assert not re.search(WHOLE, update.as_text())


def test_a_checkpoint_moves_between_meshes(tmp_path: Path) -> None:
    """Saved from 8 parts of the experts, restored as 2, and as one on a single device."""
    program = make_program(config(8))
    split = make_mesh(expert=8)
    bias_LE = np.random.default_rng(0).normal(size=(2, 8)).astype(np.float32)
    state = first_state(program, split)
    bias_LE = jax.device_put(bias_LE, state.routing.bias.sharding)
    state = state._replace(routing=state.routing._replace(bias=bias_LE))
    moved = jax.tree.map(lambda x: x + 1, state)  # moments of the optimizer that are not 0
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, moved, data_state={}, meta={})
        for expert, devices in ((2, 8), (1, 1)):
            mesh = make_mesh(jax.devices()[:devices], expert)
            wanted = abstract_state(program, mesh)
            found = checkpoints.restore(wanted)
            assert found is not None
            jax.tree.map(np.testing.assert_array_equal, found.state, moved)
            for got, want in zip(
                jax.tree.leaves(found.state), jax.tree.leaves(wanted), strict=True
            ):
                assert got.sharding == want.sharding
