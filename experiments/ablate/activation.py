"""SiTU-GLU in both forms and SwiGLU at equal parameters: held-out loss, and how large h gets.

h is the product that enters the output matrix of a feed-forward layer, here of those at full width
(dense and shared). `four` has a third more matrices, so its hidden widths are three quarters.
`capped` is bounded by 100 by construction, `four` in its gate only, SwiGLU not at all.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from experiments.ablate.results import Row, plot_curves, table, write_csv
from experiments.ablate.training import Setting, fit, heldout_bits, open_setting, text_of, tiny
from mlmoe.config import TrainConfig
from mlmoe.count import parameters
from mlmoe.model import LM, compute_dtype

LOOK_EVERY = 20
WIDTHS = ("dense_hidden", "hidden", "shared_hidden")


def four(c: ConfigDict) -> None:
    """The four-matrix form, at three quarters of the widths."""
    c.model.moe.activation = "four"
    c.model.moe.update({name: c.model.moe[name] * 3 // 4 for name in WIDTHS})


def capped(c: ConfigDict) -> None:
    c.model.moe.activation = "capped"


def swiglu(c: ConfigDict) -> None:
    c.model.moe.activation = "swiglu"


ARMS = {"four": four, "capped": capped, "swiglu": swiglu}


def largest(config: TrainConfig, batch: Any) -> Any:
    """(params, routing) -> the largest |h| over all feed-forward layers on one batch."""
    module = LM(config.model, compute_dtype(config.model.dtype))
    inputs = (batch.tokens_BT, batch.segment_ids_BT, batch.positions_BT)

    @jax.jit
    def measure(params: Any, routing: Any) -> jax.Array:
        _, measured = module.apply({"params": params}, *inputs, routing, mutable=["measured"])
        return jnp.max(jnp.stack([jnp.max(x) for x in jax.tree.leaves(measured)]))

    return measure


def run_arm(setting: Setting, name: str, seed: int, steps: int) -> tuple[Row, list[float]]:
    """One arm's row, and the largest |h| every 20 steps."""
    config = tiny(ARMS[name], seed, steps)
    batches = text_of(setting, config, seed=99)
    measure = largest(config, next(batches))
    batches.close()
    losses, sizes = [], []

    def look(state: Any, metrics: Any) -> None:
        losses.append(float(metrics.loss))
        if len(losses) % LOOK_EVERY == 1:
            sizes.append(float(measure(state.params, state.routing)))

    run = fit(setting, config, look)
    row = {
        "activation": name,
        "seed": seed,
        "bits/byte": heldout_bits(setting, run),
        "loss": float(np.mean(losses[-steps // 10 :])),
        "largest h": max(sizes),
        "parameters": parameters(config.model).total,
        "ms/step": 1e3 * run.seconds / steps,
    }
    print(row, flush=True)
    return row, sizes


def study(seeds: int, steps: int, out: Path) -> None:
    """Every arm and seed; prints the table, writes CSV and the growth of |h| as PNG."""
    setting, rows = open_setting(), []
    curves: dict[str, list[float]] = {}
    for seed in range(seeds):
        for name in ARMS:
            row, sizes = run_arm(setting, name, seed, steps)
            rows.append(row)
            write_csv(rows, out / "activation.csv")
            curves.setdefault(name, sizes)
    print(table(rows, ("activation",), list(rows[0])[2:]))
    points = {n: (1 + LOOK_EVERY * np.arange(len(s)), s) for n, s in curves.items()}
    labels = {"ylabel": "largest |h|", "yscale": "log", "title": "activation growth (seed 0)"}
    plot_curves(points, out / "activation.png", labels)
