"""How narrow the experts' space should be: R of D, D/2, D/4 at equal expert parameters and FLOPs.

A halved R doubles both the experts and how many a token takes, so that E R and A R, hence the
experts' parameters and active FLOPs, stay the same. What a token sends to each expert shrinks with
R, what it sends in all does not.
"""

from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from experiments.ablate.results import table, write_csv
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
    plot_losses(curves, out / "latent.png", "latent width")


def plot_losses(curves: dict[str, list[float]], path: Path, title: str) -> None:
    """Training loss, a mean of 20 steps, of each arm's first seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from experiments.ablate.results import save_figure

    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, losses in curves.items():
        smooth = np.convolve(losses, np.ones(20) / 20, mode="valid")
        axis.plot(20 + np.arange(len(smooth)), smooth, label=name)
    axis.set(xlabel="step", ylabel="loss (nats)", title=title)
    axis.legend()
    save_figure(figure, path)
    plt.close(figure)
