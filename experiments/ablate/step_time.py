"""The tiny step, split into its parts."""

import time
from typing import Any

import jax
import numpy as np
import optax

from experiments.ablate.training import open_setting, tiny
from mlmoe.build import compiler_options, first_state, make_program, put
from mlmoe.data.pipeline import train_batches
from mlmoe.step import loss_sums


def step_milliseconds(repeats: int = 30) -> dict[str, float]:
    """Median milliseconds of the tiny step and of its parts.

    Each is a program of its own, so that forward, backward and optimizer do not add up to the step
    to the last millisecond: what XLA fuses across them in the step is apart here.
    """
    config, (mesh, tokenizer, corpus) = tiny(lambda c: None, 0, 1), open_setting()
    program = make_program(config)
    sizes = {"context": config.context, "batch_size": config.batch}
    batches = train_batches(corpus, tokenizer=tokenizer, seed=0, **sizes)

    def loss(params: Any, state: Any, batch: Any) -> Any:
        sums, stats = loss_sums(config, program.model, params, state.routing, batch)
        return sums.nats, stats

    def forward(state: Any, batch: Any) -> Any:
        return loss(state.params, state, batch)

    def gradient(state: Any, batch: Any) -> Any:
        return jax.grad(loss, has_aux=True)(state.params, state, batch)

    def update(state: Any, batch: Any) -> Any:
        del batch  # gradients the size of the parameters are all it needs
        updates, opt_state = program.tx.update(state.params, state.opt_state, state.params)
        return optax.apply_updates(state.params, updates), opt_state

    parts = {"forward": forward, "gradient": gradient, "update": update, "step": program.train_step}
    times = {}
    batch = put(next(batches), mesh)
    with jax.set_mesh(mesh):
        state = first_state(program, mesh)
        for name, f in parts.items():
            run = jax.jit(f).lower(state, batch).compile(compiler_options())
            times[name] = _median(lambda run=run: jax.block_until_ready(run(state, batch)), repeats)
    times["host"] = _median(lambda: jax.block_until_ready(put(next(batches), mesh)), repeats)
    batches.close()  # type: ignore[attr-defined]
    return times


def study() -> None:
    """Prints them."""
    times = step_milliseconds()
    print(f"forward    {times['forward']:7.1f} ms")
    print(f"backward   {times['gradient'] - times['forward']:7.1f} ms (gradient less forward)")
    print(f"optimizer  {times['update']:7.1f} ms")
    print(f"step       {times['step']:7.1f} ms")
    print(f"host       {times['host']:7.1f} ms (a batch, prepared while the step runs)")


def _median(f: Any, repeats: int) -> float:
    """Milliseconds of a call, after one that warms up."""
    f()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        f()
        times.append(time.perf_counter() - began)
    return 1e3 * float(np.median(times))
