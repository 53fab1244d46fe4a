"""Held-out loss in bits per byte, which does not depend on the tokenizer or the batch size."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from mlmoe.config import TrainConfig
from mlmoe.data.batch import Batch
from mlmoe.layers.router import Routing
from mlmoe.loss import LossSums
from mlmoe.model import Model
from mlmoe.step import loss_sums


def make_eval_step(config: TrainConfig, model: Model) -> Callable[[Any, Routing, Batch], LossSums]:
    """Loss sums of one batch with the routing frozen; its statistics are thrown away.

    Experts have no capacity here: a token's route may not depend on what else is in the batch.
    """

    def eval_step(params: Any, routing: Routing, batch: Batch) -> LossSums:
        return loss_sums(config, model, params, routing.without_capacity(), batch)[0]

    return eval_step


def evaluate(
    eval_step: Callable[[Any, Routing, Batch], LossSums],
    params: Any,
    routing: Routing,
    batches: Iterable[Batch],
    n_bytes: int,
    check: Callable[[], None],
) -> dict[str, float]:
    """Sums over all batches, then divides once: loss, bits_per_byte, accuracy, tokens.

    `check` is called between batches and may raise to stop. Bits per byte counts the nats of every
    target, ends of documents included, over the bytes of the text alone.
    """
    total = LossSums(*(jnp.zeros(()) for _ in LossSums._fields))
    for batch in batches:
        check()
        # One batch in flight: a queue of them would delay a stop, and simulated devices can
        # deadlock on one.
        jax.block_until_ready(total)
        total = jax.tree.map(jnp.add, total, eval_step(params, routing, batch))
    nats, tokens = float(total.nats), float(total.tokens)
    return {
        "loss": nats / max(tokens, 1.0),
        "bits_per_byte": nats / math.log(2) / max(n_bytes, 1),
        "accuracy": float(total.correct) / max(tokens, 1.0),
        "tokens": tokens,
    }
