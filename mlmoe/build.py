"""What a run needs before its first step: the mesh, the functions, and their one compilation."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from mlmoe import optim
from mlmoe.config import TrainConfig
from mlmoe.data.batch import Batch
from mlmoe.evaluate import make_eval_step
from mlmoe.layers.router import Routing
from mlmoe.model import Model, make_model
from mlmoe.precision import make_probe
from mlmoe.sharding import sharding, tree_specs
from mlmoe.step import TrainState, init_state, make_train_step


class Program(NamedTuple):
    """A config as functions, nothing compiled yet."""

    model: Model
    tx: optax.GradientTransformation
    init: Callable[[], TrainState]
    train_step: Callable[[TrainState, Batch], Any]
    eval_step: Callable[[Any, Routing, Batch], Any]


def make_program(config: TrainConfig) -> Program:
    """Model, optimizer, init, train step and eval step of a config."""
    model = make_model(config.model)
    tx = optim.make(config.optim, model.axes)
    return Program(
        model=model,
        tx=tx,
        init=lambda: init_state(config, model, tx),
        train_step=make_train_step(config, model, tx),
        eval_step=make_eval_step(config, model),
    )


def abstract_state(program: Program, mesh: jax.sharding.Mesh) -> TrainState:
    """Shapes, dtypes and shardings of the train state; costs no memory.

    Parameters lie as their logical axes say, and what the optimizer keeps of one lies as it does.
    Call it outside `jax.set_mesh`: init traces a single row, which no mesh can split.
    """
    state = jax.eval_shape(program.init)
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=jax.sharding.NamedSharding(mesh, s)
        ),
        state,
        tree_specs(state, program.model.axes),
    )


def _shardings(state: TrainState) -> TrainState:
    return jax.tree.map(lambda x: x.sharding, state)


def abstract_batch(config: TrainConfig, mesh: jax.sharding.Mesh) -> Batch:
    """The global batch: `config.batch` rows of `config.context` tokens, split over all devices."""
    rows = sharding(mesh, "batch", "time")
    shape = (config.batch, config.context)
    kinds = {name: jnp.int32 for name in Batch._fields} | {"weights_BT": jnp.float32}
    return Batch(**{n: jax.ShapeDtypeStruct(shape, t, sharding=rows) for n, t in kinds.items()})


def put(batch: Batch, mesh: jax.sharding.Mesh) -> Batch:
    """Host rows of this process -> its part of the global batch on the devices."""
    rows = sharding(mesh, "batch", "time")
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(rows, x), batch)


def compiler_options() -> dict[str, str | bool] | None:
    """For XLA:CPU; accelerators take the defaults.

    YNN fusions are slow on small matrices: without them a tiny step takes half the time. Cheap LLVM
    passes cost no measurable speed (the work is in library matmuls) and compile in 3/4 of the time.
    """
    if jax.default_backend() != "cpu":
        return None
    return {
        "xla_cpu_experimental_ynn_fusion_type": "",
        "xla_backend_optimization_level": "1",
        "xla_llvm_disable_expensive_passes": True,
    }


def compile_train(config: TrainConfig, program: Program, mesh: jax.sharding.Mesh) -> Any:
    """The executable train step; it reuses the memory of the state it is given."""
    state, batch = abstract_state(program, mesh), abstract_batch(config, mesh)
    where = (_shardings(state), sharding(mesh))
    step = jax.jit(program.train_step, donate_argnums=0, out_shardings=where)
    with jax.set_mesh(mesh):
        return step.lower(state, batch).compile(compiler_options())


def compile_eval(config: TrainConfig, program: Program, mesh: jax.sharding.Mesh) -> Any:
    """The executable eval step: (params, routing, batch) -> LossSums."""
    state = abstract_state(program, mesh)
    step = jax.jit(program.eval_step, out_shardings=sharding(mesh))
    batch = abstract_batch(config, mesh)
    with jax.set_mesh(mesh):
        return step.lower(state.params, state.routing, batch).compile(compiler_options())


def compile_probe(config: TrainConfig, program: Program, mesh: jax.sharding.Mesh) -> Any:
    """The executable probe of the states: (params, routing, batch) -> samples by layer."""
    state = abstract_state(program, mesh)
    probe = jax.jit(make_probe(config.model), out_shardings=sharding(mesh))
    batch = abstract_batch(config, mesh)
    with jax.set_mesh(mesh):
        return probe.lower(state.params, state.routing, batch).compile(compiler_options())


def first_state(program: Program, mesh: jax.sharding.Mesh) -> TrainState:
    """The state before step 0, made where it will live."""
    init = jax.jit(program.init, out_shardings=_shardings(abstract_state(program, mesh)))
    return init.lower().compile(compiler_options())()
