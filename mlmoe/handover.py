"""The start of a stage from the checkpoint of the stage before, said tensor by tensor.

plan (refuses here) -> restore -> held-out loss before -> weights over -> held-out loss after
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from mlmoe.build import Program, abstract_state, compile_eval, first_state, make_program
from mlmoe.config import TrainConfig
from mlmoe.data.batch import Batch
from mlmoe.errors import require
from mlmoe.evaluate import evaluate
from mlmoe.step import TrainState
from mlmoe.surgery import Move, apply, by_name, describe, plan
from mlmoe.trained import Trained, load_trained, read_config


class HandOver(NamedTuple):
    """A hand-over that can be done, before anything is computed."""

    old: TrainConfig
    moves: list[Move]


def plan_hand_over(config: TrainConfig, program: Program) -> HandOver:
    """What `config.init_from` gives to this run.

    Raises:
      UserError: it is no run, or something in it cannot be carried over; names what.
    """
    old = read_config(config.init_from)
    require(
        old.data.tokenizer == config.data.tokenizer,
        f"init_from={config.init_from} was trained with data.tokenizer={old.data.tokenizer!r}, "
        f"this run has {config.data.tokenizer!r}: its tokens would mean other things",
    )
    params = jax.eval_shape(program.init).params
    old_params = jax.eval_shape(make_program(old).init).params
    return HandOver(old, plan(old.model, config.model, old_params, params))


def hand_over(
    found: HandOver,
    config: TrainConfig,
    program: Program,
    mesh: jax.sharding.Mesh,
    heldout: tuple[list[Batch], int],
    check: Callable[[], None],
) -> tuple[TrainState, float | None, int]:
    """The first state of this run: `found`, done with the newest checkpoint of `config.init_from`.

    Prints what becomes of each tensor. Also returns the held-out bits/byte of the old model, on
    this run's rows and length; nan without held-out text, None where nothing changes; and the step.
    """
    trained = load_trained(config.init_from, mesh)
    shapes = {k: v.shape for k, v in _named(found.old, trained.state).items()}
    fresh = first_state(program, mesh)
    shapes |= {k: v.shape for k, v in _named(config, fresh).items()}
    print(f"starting from step {trained.step} of {config.init_from}:")
    print(describe(found.moves, shapes), flush=True)
    was, now = trained.config.optim.name, config.optim.name
    if was != now:
        print(f"  optimizer: new ({was} -> {now}), no moments are carried", flush=True)
    # A temperature that was scheduled is not where it began.
    warm, first = (float(s.routing.temperature.sum()) for s in (trained.state, fresh))
    same = trained.config.model == config.model and warm == first
    before = None if same else loss_before(config, trained, mesh, heldout, check)
    where = jax.tree.map(lambda x: x.sharding, abstract_state(program, mesh))
    move = functools.partial(apply, found.moves, found.old.model, config.model)
    with jax.set_mesh(mesh):
        return jax.jit(move, out_shardings=where)(trained.state, fresh), before, trained.step


def loss_before(
    config: TrainConfig,
    trained: Trained,
    mesh: jax.sharding.Mesh,
    heldout: tuple[list[Batch], int],
    check: Callable[[], None],
) -> float:
    """Held-out bits/byte of the old model on the rows of the new stage."""
    batches, n_bytes = heldout
    if not batches:
        return float("nan")
    same_rows = dataclasses.replace(config, model=trained.config.model)
    eval_step = compile_eval(same_rows, make_program(same_rows), mesh)
    state = trained.state
    values = evaluate(eval_step, state.params, state.routing, batches, n_bytes, check)
    return values["bits_per_byte"]


def _named(config: TrainConfig, state: TrainState) -> dict[str, Any]:
    return jax.eval_shape(functools.partial(by_name, config.model), state.params)
