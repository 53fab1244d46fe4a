"""The train step of the main job, compiled by the real TPU compiler, with our kernels in it."""

import importlib.util

import jax
import pytest

import configs
from mlmoe.build import abstract_batch, abstract_state, make_program
from mlmoe.config import TrainConfig, from_dict
from mlmoe.sharding import make_mesh, sharding
from pallas_kernels import aot, schedule


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="needs libtpu, which has wheels for Linux only (extra [plan])",
)
def test_the_train_step_compiles_for_v5p_with_the_recurrence_as_kernels():
    c = configs.load("8k:tiny")
    c.context, c.model.dtype = 64, "bfloat16"
    c.model.moe.dense_layers = 2  # the experts have no kernel of ours yet
    config = from_dict(TrainConfig, c.to_dict())
    mesh, program = make_mesh(aot.devices("v5p")[:1]), make_program(config)
    args, whole = (abstract_state(program, mesh), abstract_batch(config, mesh)), sharding(mesh)
    step = jax.jit(program.train_step, donate_argnums=0, out_shardings=(whole, whole))
    with jax.set_mesh(mesh):
        compiled = step.trace(*args).lower(lowering_platforms=("tpu",)).compile()
    names = schedule.kernel_names(compiled.as_text())
    assert sum(n.startswith("bounded_decay_forward") for n in names) == 1
    assert sum(n.startswith("bounded_decay_backward") for n in names) == 1
