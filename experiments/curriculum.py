"""All stages of the curriculum in order, each handing its weights to the next.

    python -m experiments.curriculum --scale=tiny                         the final architecture
    python -m experiments.curriculum --scale=tiny --architecture=staged   attention, then hybrid
    python -m experiments.curriculum --scale=tiny --budget=long           more steps: hours
    python -m experiments.curriculum --scale=tiny --config.optim.lr=1e-3  any field, in every stage

Stages: {stages}. Before the first, two short parts without text, in which looking back is
learnt; before later ones a part of tasks alone, in which it is learnt at the new length. The stages
train on the Python library's sources and on tasks that need the whole context. Everything is in
runs/curriculum-SCALE-ARCHITECTURE[-long]/PART; the same command goes on where it was stopped.
At the end: a table of the stages, the loss over the whole curriculum (curriculum.png), the loss by
position for each stage, and the pass key by length and depth for the last one, up to four times
the longest row (evals/).
Exit codes are those of experiments.launch.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import configs
from configs.scales import SCALES
from experiments import evals
from experiments.ablate.results import save_figure, table
from experiments.launch import apply_overrides, check_fits
from mlmoe.checkpoint import Checkpoints
from mlmoe.config import ARCHITECTURES, TrainConfig, from_dict
from mlmoe.data.task_documents import parse_tasks
from mlmoe.data.tasks import check_task
from mlmoe.errors import UserError, require
from mlmoe.metrics import read_metrics
from mlmoe.report import SUMMARY
from mlmoe.stop import run_program
from pallas_kernels.libtpu import describe_no_tpu

Mixture = tuple[tuple[str, str, float], ...]


class Part(NamedTuple):
    """A stretch of training between two hand-overs; factors on what the stage's config says."""

    stage: str
    mixture: Mixture
    short: float  # steps, by budget
    long: float
    shorter: int = 1  # rows of this part of the length, and so many times as many
    rows: int = 1
    lr: float = 1.0

    def steps(self, budget: str) -> float:
        """The factor on the stage's steps."""
        return {"short": self.short, "long": self.long}[budget]


TASKS = ("passkey", "needle_single", "needle_queries")
COPIES: Mixture = (("tasks", "copy,digits", 1.0),)
ALL_TASKS: Mixture = (("tasks", ",".join(TASKS), 1.0),)
# Of long rows few should be nothing but needles: they have thirty times the answers of a pass key.
FEW: Mixture = (("tasks", TASKS[2], 0.2), ("tasks", ",".join(TASKS[:2]), 0.8))


def with_text(share: float, tasks: Mixture) -> Mixture:
    """A mixture with so much text."""
    rest = tuple((source, path, (1 - share) * weight) for source, path, weight in tasks)
    return (("stdlib", "", share), *rest)


# 8k:tiny learns to look back within 300 steps of copies, and finds pass keys soon after; from the
# mixture alone it had not after 2,200 steps. At a new length the same: 200 steps of tasks alone do
# what 400 of a mixture do not, and a low rate keeps it beside text. One row a step is too few: what
# Muon makes of a gradient without answers is as large as of one with many (LOG.md).
PARTS = {
    "copies": Part("8k", COPIES, 0.2, 0.2, shorter=4),
    "tasks": Part("8k", ALL_TASKS, 0.2, 0.2),
    "8k": Part("8k", with_text(0.7, ALL_TASKS), 1, 1),
    "64k-tasks": Part("64k", FEW, 2.25, 2.25, rows=4, lr=3.0),
    "64k": Part("64k", with_text(0.5, FEW), 1.25, 1.25, rows=4),
    "256k": Part("256k", with_text(0.5, FEW), 0.5, 2, rows=2, lr=0.25),
    "1m": Part("1m", with_text(0.5, FEW), 0.2, 1, lr=0.125),
}
# By budget: longest rows that pass keys of a length may fill at the end.
EVALUATED = {"short": 10, "long": 40}
SAME = 1e-4  # bits/byte that are no difference
SMOOTH = 20  # records of training that a point of the plot is the mean of


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options, and the overrides of fields."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.curriculum",
        description=(__doc__ or "").format(stages=", ".join(configs.STAGES)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--scale", choices=tuple(SCALES), required=True)
    parser.add_argument("--architecture", choices=ARCHITECTURES, default="fixed")
    parser.add_argument("--budget", choices=tuple(EVALUATED), default="short")
    parser.add_argument("--workdir", type=Path, help="folder with a folder for each stage")
    return parser.parse_known_args(argv)


def stages(args: argparse.Namespace, overrides: Sequence[str]) -> list[TrainConfig]:
    """The config of every part, each starting from the one before. Raises UserError."""
    longer = "" if args.budget == "short" else f"-{args.budget}"
    default = Path(f"runs/curriculum-{args.scale}-{args.architecture}{longer}")
    root, before, found = (args.workdir or default).expanduser(), "", []
    check_overrides(overrides)
    for name, part in PARTS.items():
        c = configs.load(f"{part.stage}:{args.scale}", args.architecture)
        c.update(context=c.context // part.shorter, batch=c.batch * part.shorter * part.rows)
        has_files = any(source == "stdlib" for source, _, _ in part.mixture)
        c.data.update(mixture=part.mixture, packing="best_fit")
        c.data.join_files = c.data.join_files and has_files
        c.steps = round(part.steps(args.budget) * c.steps)
        c.optim.update(lr=part.lr * c.optim.lr, adam_lr=part.lr * c.optim.adam_lr)
        c.optim.warmup = c.steps // 20
        if name not in configs.STAGES:
            c.optim.schedule = "wsd"
        c.save_every = max(1, c.steps // 5)
        # Fine enough to see when a hand-over that moves the loss is made up for.
        c.eval_every = max(3, c.steps // (20 if args.architecture == "staged" else 3))
        c.state_check_every = c.steps if name in configs.STAGES else 0
        # The last evaluation on the text of the others: they are compared.
        c.update(final_eval_bytes=c.eval_bytes, sample_tokens=0)
        apply_overrides(c, list(overrides))
        c.update(workdir=str(root / name), init_from=before)
        before = c.workdir
        config = from_dict(TrainConfig, c.to_dict())
        check_fits(config)
        check_texts(config)
        found.append(config)
    return found


def check_overrides(overrides: Sequence[str]) -> None:
    """Refuses what every part has its own of. Raises UserError."""
    instead = {
        "architecture": "give --architecture, which decides the layers, too",
        "workdir": "give --workdir, the folder of all parts",
        "init_from": "the first part starts fresh, each of the others from the one before",
    }
    for text in overrides:
        field = text.partition("=")[0].removeprefix("--config.")
        require(field not in instead, f"{text}: {instead.get(field)}")


def check_texts(config: TrainConfig) -> None:
    """There is text to compare stages by, and tasks fit, now and at the end. Raises UserError."""
    require(
        config.data.heldout > 0,
        "data.heldout=0: the stages are compared by held-out loss; nearest valid: 0.01",
    )
    for source, path, _ in config.data.mixture:
        if source == "tasks":
            parse_tasks(path, config.context)
    if is_stage(config):
        check_task(TASKS[0], config.context)


def check_order(config: TrainConfig) -> None:
    """A part that has begun did so from the last step of the one before, as that is now."""
    records = read_metrics(Path(config.workdir) / "metrics.jsonl")
    handed = next((r for r in records if r["kind"] == "handover"), None)
    if handed is None or "from_step" not in handed:
        return
    with Checkpoints(Path(config.init_from), keep=1) as checkpoints:
        last = max(checkpoints.steps(), default=0)
    require(
        handed["from_step"] == last,
        f"{config.workdir} began from step {handed['from_step']} of {config.init_from}, which now "
        f"has step {last}: move it and the later parts away, or give another --workdir",
    )


def is_stage(config: TrainConfig) -> bool:
    """Whether a part is the one with text that its stage ends with."""
    return Path(config.workdir).name in configs.STAGES


def rows(found: Sequence[TrainConfig]) -> list[dict[str, Any]]:
    """What became of each part, from what it left in its folder."""
    out = []
    for config in found:
        records = read_metrics(Path(config.workdir) / "metrics.jsonl")
        handed: dict[str, Any] = next((r for r in records if r["kind"] == "handover"), {})
        summary = json.loads((Path(config.workdir) / SUMMARY).read_text())
        out.append(
            {
                "part": Path(config.workdir).name,
                "layout": config.model.letters,
                "context": config.context,
                "tokens": config.steps * config.batch * config.context,
                "before": handed.get("bits_per_byte_before", float("nan")),
                "handed over": handed.get("bits_per_byte", float("nan")),
                "recovered": recovered(records, config.steps),
                "bits/byte": summary["heldout_bits_per_byte"],
            }
        )
    return out


def recovered(records: Sequence[dict[str, Any]], steps: int) -> float:
    """Share of the stage's steps until the held-out loss was no worse than before the hand-over;
    nan without one, inf where it never was."""
    handed = next((r for r in records if r["kind"] == "handover"), None)
    if handed is None:
        return float("nan")
    before = handed["bits_per_byte_before"]
    tests = [handed, *(r for r in records if r["kind"] == "eval")]
    back = (r["step"] / steps for r in tests if r["bits_per_byte"] <= before + SAME)
    return next(back, float("inf"))


def plot(found: Sequence[TrainConfig], path: Path) -> None:
    """The training loss over the tokens of all stages, a line where one begins."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 4), layout="constrained")
    done = 0
    for config in found:
        size, name = config.batch * config.context, Path(config.workdir).name
        records = read_metrics(Path(config.workdir) / "metrics.jsonl")
        train = [(r["step"], r["bits_per_byte"]) for r in records if r["kind"] == "train"]
        step, bits = np.array(train).T
        width = min(SMOOTH, len(bits))
        mean = np.convolve(bits, np.ones(width) / width, mode="valid")
        axis.plot(done + size * step[width - 1 :], mean, label=f"{name}: {config.context}")
        tests = [(r["step"], r["bits_per_byte"]) for r in records if r["kind"] == "eval"]
        at, heldout = np.array(tests).T
        axis.plot(done + size * at, heldout, "k.", ms=4)
        axis.axvline(done, color="grey", lw=0.6)
        done += config.steps * size
    axis.set(xlabel="tokens", ylabel="bits per byte", title="loss; dots: held out")
    axis.legend()
    save_figure(figure, path)
    plt.close(figure)


def report(found: Sequence[TrainConfig], args: argparse.Namespace) -> None:
    """The table, the plot, and the evaluations of what the stages left."""
    root = Path(found[-1].workdir).parent
    columns = ["context", "tokens", "before", "handed over", "recovered", "bits/byte"]
    print("\n" + table(rows(found), ("part", "layout"), columns))
    print("recovered: share of the part's steps until the loss was as before the hand-over")
    plot(found, root / "curriculum.png")
    longest = found[-1].context
    stages_alone = [c for c in found if is_stage(c)]
    lengths = [*(c.context for c in stages_alone), 4 * longest]
    for config in stages_alone:
        asked = [config.workdir, "--positions", str(config.context), "--tasks"]
        if config == found[-1]:
            asked += [
                TASKS[0],
                "--examples",
                "40",
                "--tokens",
                str(EVALUATED[args.budget] * longest),
            ]
            asked += ["--lengths", *map(str, lengths)]
        try:
            evals.main(asked)
        except UserError as e:  # the other stages can be evaluated
            print(f"{Path(config.workdir).name} is not evaluated: {e}")


def main(argv: list[str]) -> int:
    """Trains every part; returns the exit code."""
    describe_no_tpu()
    args, overrides = parse(argv)
    found = stages(args, overrides)
    from mlmoe.loop import train

    for config in found:
        name = Path(config.workdir).name
        print(f"\n== {name}: {config.steps:,} steps, {config.context:,} tokens a row", flush=True)
        check_order(config)
        train(config)
    report(found, args)
    return 0


if __name__ == "__main__":
    run_program(main, "between two parts: the same command goes on")
