"""How narrow the experts' space should be: R of D, D/2, D/4 at equal expert parameters and FLOPs.

A halved R doubles both the experts and how many a token takes, so that E R and A R, hence the
experts' parameters and active FLOPs, stay the same. What a token sends to each expert shrinks with
R, what it sends in all does not.
"""

from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from experiments.ablate.results import plot_curves, table, write_csv
from experiments.ablate.training import fit, heldout_bits, open_setting, tiny
from mlmoe.count import parameters


def latent(c: ConfigDict, divisor: int) -> None:
    """R = D / divisor with experts and active experts scaled by it; 8k:tiny has R = D / 2."""
    moe = c.model.moe
    moe.experts, moe.active = moe.experts * divisor // 2, moe.active * divisor // 2
    moe.latent = c.model.d_model // divisor


ARMS = {
    "D": lambda c: latent(c, 1),
    "D/2": lambda c: latent(c, 2),
    "D/4": lambda c: latent(c, 4),
}


def study(seeds: int, steps: int, out: Path) -> None:
    """Every arm and seed; prints the table and writes CSV and PNG."""
    setting, rows = open_setting(), []
    curves: dict[str, list[float]] = {}
    for seed in range(seeds):
        for name, change in ARMS.items():
            config = tiny(change, seed, steps)
            losses: list[float] = []

            def look(state: Any, metrics: Any, losses: list[float] = losses) -> None:
                losses.append(float(metrics.loss))

            run = fit(setting, config, look)
            curves.setdefault(name, losses)
            count = parameters(config.model)
            rows.append(
                {
                    "R": name,
                    "seed": seed,
                    "bits/byte": heldout_bits(setting, run),
                    "loss": float(np.mean(losses[-steps // 10 :])),
                    "experts": config.model.moe.experts,
                    "active experts": config.model.moe.active,
                    "parameters": count.total,
                    "active": count.active,
                    "ms/step": 1e3 * run.seconds / steps,
                }
            )
            print(rows[-1], flush=True)
            write_csv(rows, out / "latent.csv")
    print(table(rows, ("R",), list(rows[0])[2:]))
    smooth = {n: np.convolve(x, np.ones(20) / 20, mode="valid") for n, x in curves.items()}
    points = {n: (20 + np.arange(len(x)), x) for n, x in smooth.items()}
    labels = {"ylabel": "loss (nats), a mean of 20 steps", "title": "latent width (seed 0)"}
    plot_curves(points, out / "latent.png", labels)
