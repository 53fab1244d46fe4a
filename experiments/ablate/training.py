"""One training run of a study: a tiny config trained for a number of steps, held-out loss after."""

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

import configs
from mlmoe.build import Program, compile_eval, compile_train, first_state, make_program, put
from mlmoe.config import TrainConfig, from_dict
from mlmoe.data.batch import Batch
from mlmoe.data.heldout import heldout_batches
from mlmoe.data.pipeline import train_batches
from mlmoe.data.sources import Corpus, open_corpus
from mlmoe.data.tokenizers import Tokenizer, make_tokenizer
from mlmoe.evaluate import evaluate
from mlmoe.sharding import make_mesh
from mlmoe.step import Metrics, TrainState


class Setting(NamedTuple):
    """What the runs of a study share: the devices and the text."""

    mesh: jax.sharding.Mesh
    tokenizer: Tokenizer
    corpus: Corpus


class Run(NamedTuple):
    config: TrainConfig
    program: Program
    state: TrainState
    seconds: float  # of the steps, without compiling


def tiny(change: Callable[[ConfigDict], None], seed: int, steps: int) -> TrainConfig:
    """8k:tiny with one thing changed."""
    c = configs.load("8k:tiny")
    change(c)
    c.update(seed=seed, steps=steps)
    return from_dict(TrainConfig, c.to_dict())


def open_setting() -> Setting:
    """All devices and the data of 8k:tiny."""
    config = tiny(lambda c: None, 0, 1)
    tokenizer = make_tokenizer(config.data.tokenizer)
    return Setting(make_mesh(), tokenizer, open_corpus(config.data, tokenizer))


def text_of(setting: Setting, config: TrainConfig, seed: int) -> Any:
    """Batches of the training documents, without end; to be closed."""
    return train_batches(
        setting.corpus,
        tokenizer=setting.tokenizer,
        context=config.context,
        batch_size=config.batch,
        seed=seed,
    )


def nothing(state: TrainState, metrics: Metrics) -> None:
    """Looks at no step."""


def fit(
    setting: Setting,
    config: TrainConfig,
    look: Callable[[TrainState, Metrics], None] = nothing,
) -> Run:
    """Trains `config.steps` steps on the text; `look` sees state and metrics after each."""
    batches = text_of(setting, config, config.seed)
    run = fit_to(setting.mesh, config, batches, look)
    batches.close()
    return run


def fit_to(
    mesh: jax.sharding.Mesh,
    config: TrainConfig,
    batches: Iterator[Batch],
    look: Callable[[TrainState, Metrics], None] = nothing,
) -> Run:
    """`fit` on batches of any kind."""
    program = make_program(config)
    train_step = compile_train(config, program, mesh)
    state = first_state(program, mesh)
    times = []
    for _ in range(config.steps):
        began = time.perf_counter()
        state, metrics = train_step(state, put(next(batches), mesh))
        jax.block_until_ready(metrics)
        times.append(time.perf_counter() - began)
        look(state, metrics)
    # The first two steps warm up; a step of theirs counts as the mean of the others.
    seconds = float(np.sum(times[2:])) * config.steps / max(1, config.steps - 2)
    return Run(config, program, state, seconds)


def heldout_bits(setting: Setting, run: Run) -> float:
    """Bits per byte of the held-out documents under the trained model."""
    config = run.config
    eval_step = compile_eval(config, run.program, setting.mesh)
    batches, n_bytes = heldout_batches(
        setting.corpus,
        tokenizer=setting.tokenizer,
        context=config.context,
        batch_size=config.batch,
        max_bytes=config.final_eval_bytes,
    )
    on_device = [put(b, setting.mesh) for b in batches]
    state = run.state
    values = evaluate(eval_step, state.params, state.routing, on_device, n_bytes, lambda: None)
    return values["bits_per_byte"]
