"""What a study leaves: a CSV of every row, a Markdown table of means, figures."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Row = Mapping[str, Any]


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """Every row as it was measured; columns are those of the first. Studies write after each row:
    one that is stopped leaves what it found."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def table(rows: Sequence[Row], keys: Sequence[str], columns: Sequence[str]) -> str:
    """Markdown: one line for each combination of `keys`, its rows' mean of each column.

    Where several rows differ in a column, their values stand behind the mean.
    """
    lines = ["| " + " | ".join([*keys, *columns]) + " |", "|---" * (len(keys) + len(columns)) + "|"]
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[k] for k in keys), []).append(row)
    for key, mine in groups.items():
        cells = [str(k) for k in key]
        for column in columns:
            values = [row[column] for row in mine]
            each = ", ".join(_short(v) for v in values)
            mean = _short(float(np.mean(values)))
            cells.append(f"{mean} ({each})" if len(set(values)) > 1 else mean)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _short(value: Any) -> str:
    if value == float("inf"):
        return "never"
    if isinstance(value, int) or float(value).is_integer():
        return f"{int(value):,}"
    return f"{value:.4g}" if abs(value) < 1 else f"{value:.4f}".rstrip("0")


def plot_curves(
    points: Mapping[str, tuple[Any, Any]], path: Path, labels: Mapping[str, str]
) -> None:
    """PNG of one line an arm; `labels` are matplotlib's of the axes (xlabel: step, by default)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, (x, y) in points.items():
        axis.plot(x, y, label=name)
    axis.set(**{"xlabel": "step", **labels})
    axis.legend()
    save_figure(figure, path)
    plt.close(figure)


def save_figure(figure: Any, path: Path) -> None:
    """A PNG, and its path said."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"wrote {path}")
