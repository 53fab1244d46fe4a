"""All stages of the curriculum in order, each handing its weights to the next.

    python -m experiments.curriculum --scale=tiny                         the final architecture
    python -m experiments.curriculum --scale=tiny --architecture=staged   attention, then hybrid
    python -m experiments.curriculum --scale=tiny --budget=long           more steps: hours
    python -m experiments.curriculum --scale=tiny --config.optim.lr=1e-3  any field, in every stage

Stages: {stages}, and before them two short parts without text, in which looking back is
learnt. They train on the Python library's sources and on tasks that need the whole context, in
runs/curriculum-SCALE-ARCHITECTURE[-long]/STAGE. The same command goes on where it was stopped.
At the end: a table of the stages, the loss over the whole curriculum (curriculum.png), the loss by
position for each stage, and the pass key by length and depth for the last one, up to four times
the longest row (evals/).
Exit codes are those of experiments.launch.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import configs
from configs.scales import SCALES
from experiments import evals
from experiments.ablate.results import save_figure, table
from experiments.launch import apply_overrides, check_fits
from mlmoe.config import ARCHITECTURES, TrainConfig, from_dict
from mlmoe.metrics import read_metrics
from mlmoe.report import SUMMARY
from mlmoe.stop import run_program
from pallas_kernels.libtpu import describe_no_tpu

TASKS = ("passkey", "needle_single", "needle_queries")
MIXTURE = (("stdlib", "", 0.7), ("tasks", ",".join(TASKS), 0.3))
# Before the text: rows of a quarter of the length in which half of the tokens are copies, then the
# tasks alone. 8k:tiny learns to look back within 300 steps of copies, and finds pass keys soon
# after; from the mixture alone it had not after 2,200 steps, with up to 70 % tasks (LOG.md).
FIRST = {"copies": ((("tasks", "copy", 1.0),), 4), "tasks": ((("tasks", ",".join(TASKS), 1.0),), 1)}
STEPS = {"short": (0.2, 0.2, 1, 4, 2, 1), "long": (0.2, 0.2, 3, 16, 12, 6)}  # times the config's
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
    parser.add_argument("--budget", choices=tuple(STEPS), default="short")
    parser.add_argument("--workdir", type=Path, help="folder with a folder for each stage")
    return parser.parse_known_args(argv)


def stages(args: argparse.Namespace, overrides: Sequence[str]) -> list[TrainConfig]:
    """The config of every stage, each starting from the one before. Raises UserError."""
    longer = "" if args.budget == "short" else f"-{args.budget}"
    default = Path(f"runs/curriculum-{args.scale}-{args.architecture}{longer}")
    root, before, found = args.workdir or default, "", []
    for name, times in zip((*FIRST, *configs.STAGES), STEPS[args.budget], strict=True):
        stage = configs.STAGES[0] if name in FIRST else name
        c = configs.load(f"{stage}:{args.scale}", args.architecture)
        c.data.update(mixture=MIXTURE, packing="best_fit")
        if name in FIRST:
            c.data.mixture, shorter = FIRST[name]
            c.update(context=c.context // shorter, batch=shorter * c.batch)
            c.optim.schedule = "wsd"
        c.steps = round(times * c.steps)
        c.optim.warmup = c.steps // 20
        c.save_every = c.state_check_every = max(1, c.steps // 5)
        c.eval_every = max(3, c.steps // 20)  # fine enough to see when a hand-over is made up for
        c.update(final_eval_bytes=min(c.final_eval_bytes, 8 * c.eval_bytes), sample_tokens=0)
        apply_overrides(c, list(overrides))
        c.update(workdir=str(root / name), init_from=before)
        before = c.workdir
        config = from_dict(TrainConfig, c.to_dict())
        check_fits(config)
        found.append(config)
    return found


def rows(found: Sequence[TrainConfig]) -> list[dict[str, Any]]:
    """What became of each stage, from what it left in its folder."""
    out = []
    for config in found:
        records = read_metrics(Path(config.workdir) / "metrics.jsonl")
        handed: dict[str, Any] = next((r for r in records if r["kind"] == "handover"), {})
        summary = json.loads((Path(config.workdir) / SUMMARY).read_text())
        out.append(
            {
                "stage": Path(config.workdir).name,
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


def report(found: Sequence[TrainConfig]) -> None:
    """The table, the plot, and the evaluations of what the stages left."""
    root = Path(found[-1].workdir).parent
    columns = ["context", "tokens", "before", "handed over", "recovered", "bits/byte"]
    print("\n" + table(rows(found), ("stage", "layout"), columns))
    print("recovered: share of the stage's steps until the loss was as before the hand-over")
    plot(found, root / "curriculum.png")
    longest = found[-1].context
    lengths = [*(c.context for c in found[len(FIRST) :]), 4 * longest]
    for config in found:
        asked = [config.workdir, "--positions", str(config.context), "--tasks"]
        if config == found[-1]:
            asked += [TASKS[0], "--examples", "16", "--tokens", str(4 * longest)]
            asked += ["--lengths", *map(str, lengths)]
        evals.main(asked)


def main(argv: list[str]) -> int:
    """Trains every stage; returns the exit code."""
    describe_no_tpu()
    found = stages(*parse(argv))
    from mlmoe.loop import train

    for config in found:
        name = Path(config.workdir).name
        print(f"\n== stage {name}, {config.context:,} tokens a row", flush=True)
        train(config)
    report(found)
    return 0


if __name__ == "__main__":
    run_program(main, "between two stages: the same command goes on")
