"""All stages of the curriculum in order, each handing its weights to the next.

    python -m experiments.curriculum --scale=tiny                         the final architecture
    python -m experiments.curriculum --scale=tiny --architecture=staged   attention, then hybrid
    python -m experiments.curriculum --scale=tiny --config.optim.lr=1e-3  any field, in every stage

Stages: {stages}. They train on the Python library's sources and on tasks that need the whole
context, in runs/curriculum-SCALE-ARCHITECTURE/STAGE. The same command goes on where it was stopped.
At the end: a table of the stages, the loss over the whole curriculum (curriculum.png), the loss by
position for each stage, and the tasks by length and depth for the last one (evals/).
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

TASKS = "passkey,needle_single"
MIXTURE = (("stdlib", "", 0.7), ("tasks", TASKS, 0.3))
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
    parser.add_argument("--workdir", type=Path, help="folder with a folder for each stage")
    return parser.parse_known_args(argv)


def stages(args: argparse.Namespace, overrides: Sequence[str]) -> list[TrainConfig]:
    """The config of every stage, each starting from the one before. Raises UserError."""
    default = Path(f"runs/curriculum-{args.scale}-{args.architecture}")
    root, before, found = args.workdir or default, "", []
    for stage in configs.STAGES:
        c = configs.load(f"{stage}:{args.scale}", args.architecture)
        c.data.update(mixture=MIXTURE, packing="best_fit")
        c.sample_tokens = 0
        apply_overrides(c, list(overrides))
        c.update(workdir=str(root / stage), init_from=before)
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
                "stage": config.stage,
                "layout": config.model.letters,
                "context": config.context,
                "tokens": config.steps * config.batch * config.context,
                "before": handed.get("bits_per_byte_before", float("nan")),
                "handed over": handed.get("bits_per_byte", float("nan")),
                "bits/byte": summary["heldout_bits_per_byte"],
            }
        )
    return out


def plot(found: Sequence[TrainConfig], path: Path) -> None:
    """The training loss over the tokens of all stages, a line where one begins."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 4), layout="constrained")
    done = 0
    for config in found:
        size = config.batch * config.context
        records = read_metrics(Path(config.workdir) / "metrics.jsonl")
        train = [(r["step"], r["bits_per_byte"]) for r in records if r["kind"] == "train"]
        step, bits = np.array(train).T
        width = min(SMOOTH, len(bits))
        mean = np.convolve(bits, np.ones(width) / width, mode="valid")
        axis.plot(done + size * step[width - 1 :], mean, label=f"{config.stage}: {config.context}")
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
    columns = ["context", "tokens", "before", "handed over", "bits/byte"]
    print("\n" + table(rows(found), ("stage", "layout"), columns))
    plot(found, root / "curriculum.png")
    for config in found:
        asked = ["--tasks", *(TASKS.split(",") if config == found[-1] else ())]
        lengths = [str(c.context) for c in found[:-1]]
        where = ["--lengths", *lengths, "--examples", "8", "--positions", str(config.context)]
        evals.main([config.workdir, *asked, *where])


def main(argv: list[str]) -> int:
    """Trains every stage; returns the exit code."""
    describe_no_tpu()
    found = stages(*parse(argv))
    from mlmoe.loop import train

    for config in found:
        print(f"\n== stage {config.stage}, {config.context:,} tokens a row", flush=True)
        train(config)
    report(found)
    return 0


if __name__ == "__main__":
    run_program(main, "between two stages: the same command goes on")
