"""One optimizer step: (state, batch) -> (state, metrics). Pure; nothing here logs or decides.

A step whose loss, gradient or update is not finite changes nothing but its two counters, so the
state that is saved is always finite.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from mlmoe import optim
from mlmoe.config import TrainConfig
from mlmoe.data.batch import Batch
from mlmoe.layers.router import BALANCE, RouterStats, max_violation
from mlmoe.loss import LossSums, cross_entropy
from mlmoe.model import Model
from mlmoe.sharding import constrain


class TrainState(NamedTuple):
    """Everything that a step changes; all of it is checkpointed."""

    step: jax.Array  # int32: batches consumed, applied or skipped
    params: Any
    opt_state: Any
    bias_LE: jax.Array  # f32 router bias: moved by the balance rule, never by the optimizer
    skipped: jax.Array  # int32: steps not applied because something was not finite
    bad_in_a_row: jax.Array  # int32: the latest of them, in a row


class Metrics(NamedTuple):
    """Scalars of one step (f32), read by the host one step later."""

    loss: jax.Array  # nats per target
    accuracy: jax.Array
    tokens: jax.Array
    grad_norm: jax.Array
    clip: jax.Array  # the factor that clipping applied to the gradient
    update_norm: jax.Array
    lr: jax.Array
    max_vio: jax.Array  # worst layer: max load / mean load - 1
    dead_experts: jax.Array  # experts that received no token, over all layers
    dropped: jax.Array  # (token, choice) pairs without room on their shard, over all layers
    skipped: jax.Array
    bad_in_a_row: jax.Array


def init_state(config: TrainConfig, model: Model, tx: optax.GradientTransformation) -> TrainState:
    """The state before step 0, from `config.seed` alone. Trace it with `jax.eval_shape` or jit."""
    params = model.init(jax.random.key(config.seed))
    zero = jnp.zeros((), jnp.int32)
    bias_LE = jnp.zeros((config.model.moe_layers, config.model.moe.experts), jnp.float32)
    return TrainState(zero, params, tx.init(params), bias_LE, zero, zero)


def loss_sums(
    config: TrainConfig, model: Model, params: Any, bias_LE: jax.Array, batch: Batch
) -> tuple[LossSums, RouterStats | None]:
    """Forward pass and loss of a batch; shared by training and evaluation."""
    x_BTD, head_DW, stats = model.apply(params, bias_LE, batch)
    chunk = config.model.vocab_chunk
    return cross_entropy(x_BTD, head_DW, batch.targets_BT, batch.weights_BT, chunk), stats


def make_train_step(
    config: TrainConfig, model: Model, tx: optax.GradientTransformation
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The step of a run, for `jax.jit(..., donate_argnums=0)` under the run's mesh."""
    c = config.optim

    def objective(params: Any, bias_LE: jax.Array, batch: Batch) -> tuple[jax.Array, Any]:
        sums, stats = loss_sums(config, model, params, bias_LE, batch)
        return sums.nats + c.z_loss * sums.z2, (sums, stats)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        grads, (sums, stats) = _accumulate(objective, config.accumulate, state, batch)
        scale = 1.0 / jnp.maximum(sums.tokens, 1.0)
        grad_norm = optax.tree.norm(grads) * scale
        clip = jnp.minimum(1.0, c.clip / jnp.maximum(grad_norm, 1e-12))
        grads = jax.tree.map(lambda g: g * (scale * clip), grads)
        rate = optim.schedule(c, config.steps, state.step)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        updates = jax.tree.map(lambda u: u * rate, updates)
        update_norm = optax.tree.norm(updates)
        bias_LE = state.bias_LE
        if stats is not None:
            bias_LE = jax.vmap(BALANCE[config.model.moe.balance])(bias_LE, stats)

        good = jnp.isfinite(sums.nats) & jnp.isfinite(grad_norm) & jnp.isfinite(update_norm)
        good &= sums.tokens > 0
        new = (optax.apply_updates(state.params, updates), opt_state, bias_LE)
        old = (state.params, state.opt_state, state.bias_LE)
        params, opt_state, bias_LE = jax.tree.map(lambda n, o: jnp.where(good, n, o), new, old)
        bad = 1 - good.astype(jnp.int32)
        new_state = TrainState(
            step=state.step + 1,
            params=params,
            opt_state=opt_state,
            bias_LE=bias_LE,
            skipped=state.skipped + bad,
            bad_in_a_row=(state.bad_in_a_row + 1) * bad,
        )
        return new_state, Metrics(
            loss=sums.nats * scale,
            accuracy=sums.correct * scale,
            tokens=sums.tokens,
            grad_norm=grad_norm,
            clip=clip,
            update_norm=update_norm,
            lr=rate * (c.lr if c.name == "muon" else c.adam_lr),
            max_vio=jnp.zeros(()) if stats is None else jnp.max(max_violation(stats.load_E)),
            dead_experts=jnp.zeros(()) if stats is None else jnp.sum(stats.load_E == 0),
            dropped=jnp.zeros(()) if stats is None else jnp.sum(stats.dropped),
            skipped=new_state.skipped,
            bad_in_a_row=new_state.bad_in_a_row,
        )

    return train_step


def _accumulate(objective: Any, k: int, state: TrainState, batch: Batch) -> tuple[Any, Any]:
    """Gradient of the summed objective and the summed statistics over k micro-batches.

    Row i goes to micro-batch i mod k, so that each device cuts up its own rows.
    """
    gradient = jax.grad(objective, has_aux=True)

    def cut(x_BT: jax.Array) -> jax.Array:
        x_kbT = jnp.swapaxes(x_BT.reshape(-1, k, *x_BT.shape[1:]), 0, 1)
        return constrain(x_kbT, None, "batch", "time")

    def micro(total: Any, piece: Batch) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, gradient(state.params, state.bias_LE, piece)), None

    pieces = jax.tree.map(cut, batch)
    first = jax.tree.map(lambda x: x[0], pieces)
    shapes = jax.eval_shape(gradient, state.params, state.bias_LE, first)
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    return jax.lax.scan(micro, zeros, pieces)[0]
