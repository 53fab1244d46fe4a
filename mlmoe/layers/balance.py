"""Balance of the experts: `update(bias, stats) -> bias`, once an optimizer step, never a gradient.

    quantile       one exact step of score-margin balance          (arXiv 2607.24653, eq. 13-14)
    quantile_sign  moves only loads outside their 0.1 and 0.9 quantiles, by `rate`
    capacity       each expert's own score threshold; full experts pass tokens on (`capacity.py`)
    sign           by `rate` against the sign of the load's error  (arXiv 2408.15664)
    aux_loss       a loss term (`router.py`); the bias stays
    none           the bias stays

Statistics are those of the whole batch, pooled over micro-batches and devices: averages of each
device's own quantiles would be biased where devices see different text.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mlmoe.config import MoEConfig
from mlmoe.layers.router import RouterStats, Routing, at_place

STARVED = 0.1  # of the mean load; an expert with less is starved


def make_update(config: MoEConfig) -> Callable[[jax.Array, RouterStats], jax.Array]:
    """The rule of `config.balance` for one layer: (bias [E], pooled stats) -> bias [E]."""
    rules: dict[str, Callable[[jax.Array, RouterStats], jax.Array]] = {
        "quantile": quantile,
        "capacity": quantile,
        "quantile_sign": functools.partial(quantile_sign, rate=config.balance_rate),
        "sign": functools.partial(sign, rate=config.balance_rate),
        "aux_loss": keep,
        "none": keep,
    }
    return rules[config.balance]


def first_routing(config: MoEConfig, layers: int) -> Routing:
    """The routing before step 0: no bias, the first temperature, the capacity of training.

    Only the rule `capacity` reads the latter; it is finite always, as is all that is checkpointed.
    """
    return Routing(
        bias=jnp.zeros((layers, config.experts), jnp.float32),
        temperature=jnp.full((layers,), config.temperature, jnp.float32),
        capacity=jnp.full((layers,), config.capacity_factor, jnp.float32),
    )


def next_routing(
    config: MoEConfig, routing: Routing, stats: RouterStats, done: jax.Array
) -> Routing:
    """All layers' routing after a step; `done` is the share of the run that lies behind it.

    The temperature goes from `temperature` to `temperature_final` (0: stays) in a straight line.
    """
    final = config.temperature_final or config.temperature
    temperature = config.temperature + done * (final - config.temperature)
    return routing._replace(
        bias=jax.vmap(make_update(config))(routing.bias, stats),
        temperature=jnp.full_like(routing.temperature, temperature),
    )


def quantile(bias_E: jax.Array, stats: RouterStats) -> jax.Array:
    """One exact step of score-margin balance, to within a bin (`router.place`).

    Token i takes expert j when b_j exceeds alpha_i - s_ij, so b_j = the (q+1)-th smallest of these
    margins, q = N A / E, gives every expert its equal share. The common mean is removed. An
    empty batch (no real token) leaves the bias as it was. With alpha = 0, as `capacity` counts,
    b_j is minus the (1 - A / E) quantile of the expert's scores: its threshold.
    """
    E, B = stats.margin_EB.shape
    # Tokens with a margin up to the bin's end. A scan of log depth: XLA:CPU's cumsum is quadratic.
    below_EB = jax.lax.associative_scan(jnp.add, stats.margin_EB, axis=1)
    taken = jnp.sum(stats.load_E) + stats.dropped  # N A
    rank = taken.astype(jnp.float32) / E  # q; the wanted token is number q + 1
    bin_E = jnp.sum(below_EB <= rank, axis=1)
    before_E = jnp.where(
        bin_E > 0, jnp.take_along_axis(below_EB, jnp.maximum(bin_E - 1, 0)[:, None], 1)[:, 0], 0
    )
    inside_E = jnp.take_along_axis(stats.margin_EB, jnp.minimum(bin_E, B - 1)[:, None], 1)[:, 0]
    part_E = (rank - before_E + 0.5) / jnp.maximum(inside_E, 1)
    new_E = at_place(bin_E + jnp.clip(part_E, 0.0, 1.0), bias_E)
    return jnp.where(taken > 0, new_E - jnp.mean(new_E), bias_E)


def quantile_sign(bias_E: jax.Array, stats: RouterStats, rate: float) -> jax.Array:
    """Cools experts above the 0.9 quantile of the loads by `rate`, warms those below the 0.1 one.

    A sign rule with a dead zone: the middle four fifths of the experts are left alone.
    """
    load_E = stats.load_E.astype(jnp.float32)
    low, high = jnp.quantile(load_E, 0.1), jnp.quantile(load_E, 0.9)
    return bias_E + rate * ((load_E < low).astype(jnp.float32) - (load_E > high))


def sign(bias_E: jax.Array, stats: RouterStats, rate: float) -> jax.Array:
    """b += rate * sign(mean load - load)."""
    load_E = stats.load_E.astype(jnp.float32)
    return bias_E + rate * jnp.sign(jnp.mean(load_E) - load_E)


def keep(bias_E: jax.Array, stats: RouterStats) -> jax.Array:
    """The bias stays."""
    del stats
    return bias_E


class BalanceReport(NamedTuple):
    """How the experts of each layer are used: arrays [L]."""

    max_vio: jax.Array  # max load / mean load - 1: 0 is perfect, E / A - 1 the worst
    max_min: jax.Array  # max load / min load, the latter at least 1
    share_variance: jax.Array  # of load / mean load over the experts
    dead: jax.Array  # experts without a token in this step
    starved: jax.Array  # experts with less than a tenth of the mean load
    rerouted: jax.Array  # choices that a full expert passed on
    dropped: jax.Array  # choices that no expert took, or that a full buffer did not send
    jitter: jax.Array  # share of the load that moved to other experts since the step before
    bias_spread: jax.Array  # max bias - min bias
    temperature: jax.Array  # with the learned factor
    logit_mean: jax.Array  # mean and standard deviation of the router's logits, at temperature 1
    logit_width: jax.Array


def report(stats: RouterStats, routing: Routing, load_before_LE: jax.Array) -> BalanceReport:
    """The report of pooled statistics [L, ...] and the routing they were made with."""
    load_LE = stats.load_E.astype(jnp.float32)
    mean_L1 = jnp.maximum(jnp.mean(load_LE, -1, keepdims=True), 1e-20)
    share_LE = load_LE / mean_L1
    all_L1, before_L1 = (jnp.sum(x, -1, keepdims=True) for x in (load_LE, load_before_LE))
    before_LE = load_before_LE / jnp.maximum(before_L1, 1)
    moved_LE = jnp.abs(load_LE / jnp.maximum(all_L1, 1) - before_LE)
    moved_LE = jnp.where(before_L1 > 0, moved_LE, 0.0)  # the first step moves from nowhere
    number, total, squares, temperature = jnp.moveaxis(stats.logits, -1, 0)
    number = jnp.maximum(number, 1.0)
    width = jnp.sqrt(jnp.maximum(squares / number - (total / number) ** 2, 0.0))
    return BalanceReport(
        max_vio=max_violation(stats.load_E),
        max_min=jnp.max(load_LE, -1) / jnp.maximum(jnp.min(load_LE, -1), 1.0),
        share_variance=jnp.var(share_LE, axis=-1),
        # Where no token came, as in a batch of padding, none is dead.
        dead=jnp.sum((load_LE == 0) & (all_L1 > 0), -1),
        starved=jnp.sum((share_LE < STARVED) & (all_L1 > 0), -1),
        rerouted=stats.rerouted,
        dropped=stats.dropped + stats.unsent,
        jitter=0.5 * jnp.sum(moved_LE, -1),
        bias_spread=jnp.max(routing.bias, -1) - jnp.min(routing.bias, -1),
        temperature=temperature / number,
        logit_mean=total / number * temperature / number,
        logit_width=width * temperature / number,
    )


class Starvation:
    """Notices when a twentieth of a layer's experts starve, and again when half as many more do."""

    def __init__(self, experts: int):
        self.experts, self.said = experts, 0.0

    def look(self, values: Mapping[str, Any]) -> str:
        """What to say about the worst layer, from a step's metrics by name; mostly nothing."""
        starved = values.get("layer_starved", [])
        if not starved or not values["tokens"] or values["bad_in_a_row"]:
            return ""
        if max(starved) <= max(self.experts / 20, 1.5 * self.said):
            return ""
        self.said = max(starved)
        i = starved.index(self.said)
        names = ("layer_logit_mean", "layer_logit_width", "layer_temperature")
        advice = starvation_advice(*(values[name][i] for name in names))
        return (
            f"MoE layer {i}: {self.said:.0f} of {self.experts} experts starve (less than a tenth "
            f"of the mean load); {advice}"
        )


def starvation_advice(mean: float, width: float, temperature: float) -> str:
    """What to do about starved experts: logits that are wide, or far from 0, for their temperature
    saturate the sigmoid, so scores near 0 and 1 hardly differ; narrow ones all look alike."""
    found = f"its router's logits are {mean:.2g} +- {width:.2g} at temperature {temperature:.2g}"
    better = max(width, abs(mean) / 3)  # 0.95: there the sigmoid still has a fifth of its slope
    if better == 0.0 or 0.5 <= better / temperature <= 2.0:
        return f"{found}: another temperature will not help"
    return f"{found}: a temperature of {better:.2g} would help (config.model.moe.temperature)"


def max_violation(load_E: jax.Array) -> jax.Array:
    """MaxVio = max load / mean load - 1; 0 is perfect balance, E / A - 1 the worst."""
    mean = jnp.mean(load_E.astype(jnp.float32), axis=-1)
    return jnp.where(mean > 0, jnp.max(load_E, axis=-1) / jnp.maximum(mean, 1e-20) - 1.0, 0.0)
