"""AdamW and Muon from optax, and the learning-rate schedule.

Which parameters are matrices is read off their logical axes. Muon orthogonalises the last two
matrix axes of a parameter; every other axis (heads, experts, layers) is a batch of separate
matrices, so q, k and v projections are treated per head. The rest goes to Adam: embedding, head,
norms, gates' a_log and bias, convolutions, router. Only matrices (embedding and head included)
decay: never norms, a_log, bias or convolutions.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, muon

from mlmoe.config import OptimConfig
from mlmoe.sharding import per_part

MATRIX_AXES = {"embed", "rank", "key", "value", "latent", "hidden"}


def muon_axes(axes: tuple[str, ...]) -> MuonDimensionNumbers | None:
    """(input axis, output axis) of a parameter, or None when it is not a (batch of) matrix."""
    matrix = [i for i, name in enumerate(axes) if name in MATRIX_AXES]
    return MuonDimensionNumbers(matrix[0], matrix[1]) if len(matrix) == 2 else None


def decays(axes: tuple[str, ...]) -> bool:
    """True for matrices, and for the embedding, the head and the router."""
    return any(name in MATRIX_AXES for name in axes) and not {"conv", "gate", "norm"} & set(axes)


def _map_axes(f: Any, axes: Any) -> Any:
    return jax.tree.map(f, axes, is_leaf=lambda x: isinstance(x, tuple))


def make(config: OptimConfig, axes: Any) -> optax.GradientTransformation:
    """The optimizer at its peak learning rate; the step multiplies by `schedule`.

    Args:
      config: `lr` for matrices under Muon (RMS-matched to AdamW, so the same size fits both) and
        `adam_lr` for everything Adam does.
      axes: tree of logical axis names, as `Model.axes`.
    """
    if config.name == "adamw":
        lr, base = config.adam_lr, optax.adam(config.adam_lr, config.b1, config.b2)
    else:
        lr, base = (
            config.lr,
            muon(
                config.lr,
                beta=config.momentum,
                adam_b1=config.b1,
                adam_b2=config.b2,
                adam_learning_rate=config.adam_lr,
                muon_weight_dimension_numbers=_map_axes(muon_axes, axes),
                consistent_rms=0.2,
            ),
        )
    # Added here and not by optax.muon, which decays everything that Adam updates, norms included.
    decay = optax.add_decayed_weights(-lr * config.weight_decay, _map_axes(decays, axes))
    tx = optax.chain(base, decay)
    return optax.GradientTransformation(tx.init, per_part(tx.update, axes))


def schedule(config: OptimConfig, steps: int, step: jax.Array) -> jax.Array:
    """The learning rate at `step` of `steps`, as a fraction of its peak.

    Linear warm-up over `warmup` steps, then to `final_lr`: `cosine` over all the rest, `wsd`
    (warm-up, stable, decay) linearly over the last `decay` share of the run.
    """
    t = step.astype(jnp.float32)
    warm = jnp.minimum(1.0, (t + 1.0) / (config.warmup + 1.0))
    if config.schedule == "cosine":
        part = jnp.clip((t - config.warmup) / max(1, steps - config.warmup), 0.0, 1.0)
        fall = 0.5 * (1.0 + jnp.cos(jnp.pi * part))
    else:
        fall = jnp.clip((steps - t) / max(1.0, config.decay * steps), 0.0, 1.0)
    return warm * (config.final_lr + (1.0 - config.final_lr) * fall)
