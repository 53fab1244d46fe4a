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
from mlmoe.layers import balance
from mlmoe.layers.router import RouterStats, Routing
from mlmoe.loss import LossSums, cross_entropy
from mlmoe.model import Model, expert_norms
from mlmoe.sharding import constrain


class TrainState(NamedTuple):
    """Everything that a step changes; all of it is checkpointed."""

    step: jax.Array  # int32: batches consumed, applied or skipped
    params: Any
    opt_state: Any
    routing: Routing  # of all MoE layers: moved by the balance rule, never by the optimizer
    load_LE: jax.Array  # int32: tokens of each expert in the last step
    skipped: jax.Array  # int32: steps not applied because something was not finite
    bad_in_a_row: jax.Array  # int32: the latest of them, in a row


class LayerMetrics(NamedTuple):
    """What is measured for each MoE layer: arrays [L]. Norms are over an expert's w_in and w_out:
    an expert can die, its weights near 0, while its load looks balanced."""

    balance: balance.BalanceReport
    expert_norm_min: jax.Array
    expert_norm_max: jax.Array
    expert_grad_min: jax.Array
    expert_grad_max: jax.Array


class Metrics(NamedTuple):
    """What is measured in one step, read by the host one step later; scalars are f32."""

    loss: jax.Array  # nats per target
    accuracy: jax.Array
    tokens: jax.Array
    grad_norm: jax.Array
    clip: jax.Array  # the factor that clipping applied to the gradient
    update_norm: jax.Array
    lr: jax.Array
    max_vio: jax.Array  # worst layer: max load / mean load - 1
    max_min: jax.Array  # worst layer: max load / min load
    share_variance: jax.Array  # worst layer: of load / mean load
    jitter: jax.Array  # worst layer: share of the load that changed experts since the last step
    dead_experts: jax.Array  # experts that received no token, over all layers
    starved_experts: jax.Array  # with less than a tenth of the mean load, over all layers
    rerouted: jax.Array  # choices that a full expert passed on, over all layers
    dropped: jax.Array  # choices that no expert took, over all layers
    skipped: jax.Array
    bad_in_a_row: jax.Array
    layers: LayerMetrics | None  # of the MoE layers; None where there are none


def init_state(config: TrainConfig, model: Model, tx: optax.GradientTransformation) -> TrainState:
    """The state before step 0, from `config.seed` alone. Trace it with `jax.eval_shape` or jit."""
    params = model.init(jax.random.key(config.seed))
    zero = jnp.zeros((), jnp.int32)
    routing = balance.first_routing(config.model.moe, config.model.moe_layers)
    load_LE = jnp.zeros_like(routing.bias, jnp.int32)
    return TrainState(zero, params, tx.init(params), routing, load_LE, zero, zero)


def loss_sums(
    config: TrainConfig, model: Model, params: Any, routing: Routing, batch: Batch
) -> tuple[LossSums, RouterStats | None]:
    """Forward pass and loss of a batch; shared by training and evaluation."""
    x_BTD, head_DW, stats = model.apply(params, routing, batch)
    chunk = config.model.vocab_chunk
    return cross_entropy(x_BTD, head_DW, batch.targets_BT, batch.weights_BT, chunk), stats


def make_train_step(
    config: TrainConfig, model: Model, tx: optax.GradientTransformation
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The step of a run, for `jax.jit(..., donate_argnums=0)` under the run's mesh."""
    c = config.optim

    def objective(params: Any, routing: Routing, batch: Batch) -> tuple[jax.Array, Any]:
        sums, stats = loss_sums(config, model, params, routing, batch)
        aux = 0.0 if stats is None else config.model.moe.aux_weight * jnp.sum(stats.aux)
        return sums.nats + c.z_loss * sums.z2 + aux, (sums, stats)

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
        routing, load_LE, layers = state.routing, state.load_LE, None
        if stats is not None:
            # The one sum over devices of everything the balance needs, for all layers.
            stats = jax.tree.map(lambda x: jnp.sum(x, axis=1), stats)
            done = (state.step + 1) / config.steps
            routing = balance.next_routing(config.model.moe, routing, stats, done)
            load_LE = stats.load_E
            layers = _layer_metrics(config, state, stats, grads)
        good = jnp.isfinite(sums.nats) & jnp.isfinite(grad_norm) & jnp.isfinite(update_norm)
        good &= sums.tokens > 0
        params = optax.apply_updates(state.params, updates)
        new = state._replace(params=params, opt_state=opt_state, routing=routing, load_LE=load_LE)
        new = jax.tree.map(lambda n, o: jnp.where(good, n, o), new, state)
        bad = 1 - good.astype(jnp.int32)
        new_state = new._replace(
            step=state.step + 1,
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
            **_totals(layers),
            skipped=new_state.skipped,
            bad_in_a_row=new_state.bad_in_a_row,
            layers=layers,
        )

    return train_step


def _layer_metrics(
    config: TrainConfig, state: TrainState, stats: RouterStats, grads: Any
) -> LayerMetrics:
    norm_LE, grad_LE = (expert_norms(config.model, x) for x in (state.params, grads))
    return LayerMetrics(
        balance.report(stats, state.routing, state.load_LE),
        jnp.min(norm_LE, -1),
        jnp.max(norm_LE, -1),
        jnp.min(grad_LE, -1),
        jnp.max(grad_LE, -1),
    )


def _totals(layers: LayerMetrics | None) -> dict[str, jax.Array]:
    """Over the layers, the scalars of Metrics that the balance gives: zeros without experts."""
    if layers is None:
        names = ["max_vio", "max_min", "share_variance", "jitter"]
        names += ["dead_experts", "starved_experts", "rerouted", "dropped"]
        return dict.fromkeys(names, jnp.zeros(()))
    b = layers.balance
    return {
        "max_vio": jnp.max(b.max_vio),
        "max_min": jnp.max(b.max_min),
        "share_variance": jnp.max(b.share_variance),
        "jitter": jnp.max(b.jitter),
        "dead_experts": jnp.sum(b.dead),
        "starved_experts": jnp.sum(b.starved),
        "rerouted": jnp.sum(b.rerouted),
        "dropped": jnp.sum(b.dropped),
    }


def _accumulate(objective: Any, k: int, state: TrainState, batch: Batch) -> tuple[Any, Any]:
    """Gradient of the summed objective and the summed statistics over k micro-batches.

    Row i goes to micro-batch i mod k, so that each device cuts up its own rows.
    """
    gradient = jax.grad(objective, has_aux=True)

    def cut(x_BT: jax.Array) -> jax.Array:
        x_kbT = jnp.swapaxes(x_BT.reshape(-1, k, *x_BT.shape[1:]), 0, 1)
        return constrain(x_kbT, None, "batch", "time")

    def micro(total: Any, piece: Batch) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, gradient(state.params, state.routing, piece)), None

    pieces = jax.tree.map(cut, batch)
    first = jax.tree.map(lambda x: x[0], pieces)
    shapes = jax.eval_shape(gradient, state.params, state.routing, first)
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    return jax.lax.scan(micro, zeros, pieces)[0]
