"""Where the numbers of a run go: metrics.jsonl, TensorBoard, a progress bar or lines.

Values arrive as device scalars and are read when the *next* step is already queued, so that the
device never waits for the host.
"""

import contextlib
import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from mlmoe.errors import UserError
from mlmoe.stop import heard

COLUMNS = (
    "loss",
    "bits_per_byte",
    "tokens_per_s",
    "grad_norm",
    "lr",
    "max_vio",
    "max_min",
    "share_variance",
    "jitter",
    "dead_experts",
    "starved_experts",
    "rerouted",
    "dropped",
)


Values = dict[str, Any]  # by name: a number, or one for each MoE layer


def to_host(metrics: Any) -> Values:
    """A NamedTuple of scalars, arrays [L] and NamedTuples of them, flat, as plain floats."""
    values: Values = {}
    for name, x in zip(metrics._fields, jax.device_get(metrics), strict=True):
        if isinstance(x, tuple):
            values |= {f"layer_{k.removeprefix('layer_')}": v for k, v in to_host(x).items()}
        elif x is not None:
            values[name] = np.asarray(x, np.float64).tolist()
    return values


class MetricsLog:
    """Appends records to `metrics.jsonl` and TensorBoard; only process 0 should own one.

    On resume from step s the records after s are dropped from the file, so it reads as if the run
    had never stopped; of a run that begins at step 0, all.
    """

    def __init__(self, workdir: Path, start_step: int):
        self.path = workdir / "metrics.jsonl"
        with writing(self.path):
            kept = [r for r in read_metrics(self.path) if r["step"] <= start_step and start_step]
            self._written = {(r["kind"], r["step"]) for r in kept}
            temporary = self.path.with_suffix(".tmp")
            temporary.write_text("".join(_line(r) for r in kept))
            temporary.replace(self.path)
            self._file = self.path.open("a")
            self._board = _Board(workdir / "tensorboard", start_step + 1)

    def write(self, kind: str, step: int, values: Values) -> None:
        """One record; `kind` is train, eval or state.

        Raises UserError where the disk takes no more.
        """
        with writing(self.path):
            self._file.write(_line({"kind": kind, "step": step, **values}))
            self._file.flush()
            self._written.add((kind, step))
            self._board.write(kind, step, values)

    def has(self, kind: str, step: int) -> bool:
        """Whether there is such a record."""
        return (kind, step) in self._written

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a full disk was reported when it was written to
            self._file.close()
        with contextlib.suppress(OSError):
            self._board.close()


class _Board:
    """TensorBoard's event file, written in this thread.

    tensorboardX's SummaryWriter writes in a thread of its own, which dies on a full disk and leaves
    the training loop waiting for it forever.
    """

    def __init__(self, folder: Path, purge_step: int):
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2
        from tensorboardX.summary import scalar

        folder.mkdir(exist_ok=True)
        self._event, self._scalar = event_pb2.Event, scalar
        self._writer = EventsWriter(str(folder / "events"))
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._write(step=purge_step, session_log=start)  # older records from here on are void

    def _write(self, **content: Any) -> None:
        self._writer.write_event(self._event(wall_time=time.time(), **content))
        self._writer.flush()

    def write(self, kind: str, step: int, values: Values) -> None:
        for name, value in values.items():
            each = value if isinstance(value, list) else [value]
            for i, x in enumerate(each):
                if math.isfinite(x):
                    tag = f"{kind}/{name}/{i}" if isinstance(value, list) else f"{kind}/{name}"
                    self._write(step=step, summary=self._scalar(tag, x))

    def close(self) -> None:
        self._writer.close()


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around writing `path`: a full disk is a UserError."""
    try:
        yield
    except OSError as e:
        free = shutil.disk_usage(path.parent).free
        raise UserError(
            f"{path} cannot be written: {e.strerror} ({free / 1e6:,.1f} MB free). "
            "The checkpoints are intact; the same command goes on from the newest"
        ) from e


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file; what is none, as a line cut short by a kill, is left out."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text(errors="replace").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            record = json.loads(line)
            if isinstance(record, dict) and "kind" in record and type(record.get("step")) is int:
                records.append(_swap(record, lambda x: math.nan if x is None else x))
    return records


def _line(record: dict[str, Any]) -> str:
    """JSON has no NaN and no infinity: null stands for both."""
    finite = _swap(record, lambda x: x if not isinstance(x, float) or math.isfinite(x) else None)
    return json.dumps(finite) + "\n"


def _swap(record: dict[str, Any], f: Callable[[Any], Any]) -> dict[str, Any]:
    return {k: [f(x) for x in v] if isinstance(v, list) else f(v) for k, v in record.items()}


class Progress:
    """A bar on a terminal, lines elsewhere. `say` prints above the bar."""

    def __init__(self, steps: int, start_step: int):
        self._steps, self._began = steps, time.time()
        self._bar = (
            tqdm(total=steps, initial=start_step, unit="step", dynamic_ncols=True)
            if sys.stderr.isatty()
            else None
        )

    def step(self, step: int, values: Values, log: bool) -> None:
        """Advances to `step`; `log` says whether a line is due where there is no bar."""
        if self._bar is not None:
            with heard():
                self._bar.update(step - self._bar.n)
                self._bar.set_postfix_str(
                    f"loss {values['loss']:.3f} bpb {values['bits_per_byte']:.3f} "
                    f"{values['tokens_per_s']:.0f} tok/s vio {values['max_vio']:.2f} "
                    f"dead {values['dead_experts']:.0f}"
                )
        elif log:
            cells = [f"step {step:>6}/{self._steps}"]
            cells += [f"{name} {values[name]:.4g}" for name in COLUMNS]
            self.say("  ".join(cells))

    def say(self, text: str) -> None:
        with heard():
            if self._bar is not None:
                self._bar.write(text, file=sys.stdout)
            else:
                print(text, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            with contextlib.suppress(OSError):
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
    bits = [r["bits_per_byte"] for r in records if r["kind"] in ("train", "eval")]
    low = min([*baselines.values(), *filter(math.isfinite, bits)], default=1.0)
    bottom, top = max(0.0, low - 0.3), max(5.0, low + 1.0)
    for name, value in baselines.items():
        if value > top:  # xz of texts of a few bytes; a label out there leaves no room for the plot
            continue
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
    axis.set_ylim(bottom, top)
    axis.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
