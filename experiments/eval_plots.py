"""The figure of the synthetic tasks: accuracy by length and depth."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.ablate.results import Row, save_figure


def plot_scores(rows: Sequence[Row], path: Path) -> None:
    """PNG: a heat map, length by depth, of each task with depths; one panel for the others."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    by_task: dict[str, list[Row]] = {}
    for row in rows:
        by_task.setdefault(row["task"], []).append(row)
    deep = {name: mine for name, mine in by_task.items() if mine[0]["depth"] != ""}
    flat = {name: mine for name, mine in by_task.items() if name not in deep}
    panels = len(deep) + bool(flat)
    figure, axes = plt.subplots(
        1, panels, figsize=(4.5 * panels, 3.6), layout="constrained", squeeze=False
    )
    for axis, (name, mine) in zip(axes[0], deep.items(), strict=False):
        image = _heat_map(axis, name, mine)
    if deep:
        figure.colorbar(image, ax=axes[0, : len(deep)].tolist(), label="accuracy")
    if flat:
        _curves(axes[0, -1], flat)
    save_figure(figure, path)
    plt.close(figure)


def _heat_map(axis: Any, name: str, rows: Sequence[Row]) -> Any:
    lengths = sorted({row["length"] for row in rows})
    depths = sorted({row["depth"] for row in rows})
    grid = np.full((len(depths), len(lengths)), np.nan)  # a stopped run has not all of them
    for row in rows:
        i, j = depths.index(row["depth"]), lengths.index(row["length"])
        grid[i, j] = row["accuracy"]
        axis.text(j, i, f"{row['accuracy']:.2f}", ha="center", va="center", fontsize=8)
    image = axis.imshow(grid, vmin=0, vmax=1, cmap="summer", aspect="auto")
    axis.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths])
    axis.set_yticks(range(len(depths)), [f"{d:g}" for d in depths])
    axis.set(title=name, xlabel="length in tokens", ylabel="depth")
    return image


def _curves(axis: Any, by_task: dict[str, list[Row]]) -> None:
    for name, mine in by_task.items():
        x, y, error = ([row[k] for row in mine] for k in ("length", "accuracy", "standard_error"))
        axis.errorbar(x, y, yerr=error, marker="o", capsize=3, label=name)
    axis.set(xlabel="length in tokens", ylabel="accuracy", xscale="log", ylim=(-0.05, 1.05))
    axis.legend()
