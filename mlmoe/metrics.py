"""Where the numbers of a run go: metrics.jsonl, TensorBoard, a progress bar or lines.

Values arrive as device scalars and are read when the *next* step is already queued, so that the
device never waits for the host.
"""

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

COLUMNS = ("loss", "bits_per_byte", "tokens_per_s", "grad_norm", "lr", "max_vio")


def to_host(metrics: Any) -> dict[str, float]:
    """A NamedTuple of scalars as plain floats, in one transfer."""
    return {k: float(v) for k, v in zip(metrics._fields, map(np.asarray, metrics), strict=True)}


class MetricsLog:
    """Appends records to `metrics.jsonl` and TensorBoard; only process 0 should own one.

    On resume from step s the records after s are dropped from the file, so it reads as if the run
    had never stopped.
    """

    def __init__(self, workdir: Path, start_step: int):
        from tensorboardX import SummaryWriter

        workdir.mkdir(parents=True, exist_ok=True)
        self.path = workdir / "metrics.jsonl"
        kept = [r for r in read_metrics(self.path) if r["step"] <= start_step]
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(r) + "\n" for r in kept))
        temporary.replace(self.path)
        self._file = self.path.open("a")
        self._board = SummaryWriter(str(workdir / "tensorboard"), purge_step=start_step + 1)

    def write(self, kind: str, step: int, values: dict[str, float]) -> None:
        """One record; `kind` is train or eval."""
        record = {"kind": kind, "step": step, **values}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        for name, value in values.items():
            if math.isfinite(value):
                self._board.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        self._file.close()
        self._board.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file; a last line cut short by a kill is left out."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


class Progress:
    """A bar on a terminal, lines elsewhere. `say` prints above the bar."""

    def __init__(self, steps: int, start_step: int):
        self._steps, self._began = steps, time.time()
        self._bar = (
            tqdm(total=steps, initial=start_step, unit="step", dynamic_ncols=True)
            if sys.stderr.isatty()
            else None
        )

    def step(self, step: int, values: dict[str, float], log: bool) -> None:
        """Advances to `step`; `log` says whether a line is due where there is no bar."""
        if self._bar is not None:
            self._bar.update(step - self._bar.n)
            self._bar.set_postfix_str(
                f"loss {values['loss']:.3f} bpb {values['bits_per_byte']:.3f} "
                f"{values['tokens_per_s']:.0f} tok/s vio {values['max_vio']:.2f}"
            )
        elif log:
            cells = [f"step {step:>6}/{self._steps}"]
            cells += [f"{name} {values[name]:.4g}" for name in COLUMNS]
            self.say("  ".join(cells))

    def say(self, text: str) -> None:
        if self._bar is not None:
            self._bar.write(text, file=sys.stdout)
        else:
            print(text, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def plot_losses(records: list[dict[str, Any]], baselines: dict[str, float], path: Path) -> None:
    """PNG of training and held-out bits/byte against step, with the baselines as lines."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 5), layout="constrained")
    for kind, style in (("train", {"lw": 0.8, "alpha": 0.7}), ("eval", {"marker": "o"})):
        points = [(r["step"], r["bits_per_byte"]) for r in records if r["kind"] == kind]
        if points:
            axis.plot(*zip(*points, strict=True), label=kind, **style)  # type: ignore[arg-type]
    for name, value in baselines.items():
        axis.axhline(value, ls="--", lw=0.8, color="grey")
        axis.annotate(
            f"{name} {value:.2f}",
            (1, value),
            xycoords=("axes fraction", "data"),
            ha="right",
            va="bottom",
            fontsize=8,
        )
    axis.set(xlabel="step", ylabel="bits per byte", title="loss")
    low = min([*baselines.values(), *(r["bits_per_byte"] for r in records)], default=1.0)
    axis.set_ylim(max(0.0, low - 0.3), 5.0)
    axis.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
