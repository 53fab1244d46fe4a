"""What the hand-overs are worth: the final architecture from the first stage on, a staged one, and
the longest rows alone.

`fixed` and `staged` are the stages of `experiments.curriculum` at scale tiny, equal tokens; `long`
is the final architecture trained on the last stage's rows from the start, for as many seconds of
steps as `fixed` took, at the learning rate of the first stage. Held-out loss is that of the last
stage's rows; the pass key is asked in rows of that length at five depths.
"""

import csv
import dataclasses
from pathlib import Path
from typing import Any

import configs
from experiments import curriculum, evals
from experiments.ablate.arguments import add_out, add_seeds
from experiments.ablate.results import Row, table, write_csv
from mlmoe.config import ARCHITECTURES, TrainConfig
from mlmoe.loop import train
from mlmoe.metrics import read_metrics

EXAMPLES = 4  # at each of five depths
COLUMNS = ("bits/byte", "pass key", "jump", "recovered", "tokens", "seconds")


def seconds_of(config: TrainConfig) -> float:
    """Of the steps of a finished run, without evaluations and compilation."""
    at, seconds = 0, 0.0
    for r in read_metrics(Path(config.workdir) / "metrics.jsonl"):
        if r["kind"] == "train":
            tokens = (r["step"] - at) * config.batch * config.context
            at, seconds = r["step"], seconds + tokens / r["tokens_per_s"]
    return seconds


def long_rows_alone(found: list[TrainConfig], workdir: Path) -> TrainConfig:
    """The last stage from the start, for the seconds that all stages together took."""
    first, last = next(c for c in found if curriculum.is_stage(c)), found[-1]
    a_step = seconds_of(last) / last.steps
    steps = max(1, round(sum(map(seconds_of, found)) / a_step))
    optim = dataclasses.replace(first.optim, warmup=steps // 20)
    every = max(1, steps // 5)
    return dataclasses.replace(
        last,
        init_from="",
        workdir=str(workdir),
        optim=optim,
        steps=steps,
        eval_every=every,
        save_every=every,
        state_check_every=every,
    )


def row_of(arm: str, seed: int, found: list[TrainConfig]) -> Row:
    """What an arm reached on the rows of the last stage."""
    last = found[-1]
    length = ["--lengths", str(last.context), "--examples", str(EXAMPLES)]
    evals.main([last.workdir, "--tasks", curriculum.TASKS[0], *length, "--positions", "0"])
    with (Path(last.workdir) / "evals" / "tasks.csv").open() as file:
        scores = [float(r["accuracy"]) for r in csv.DictReader(file)]
    stages = curriculum.rows(found)
    jumps = [s["handed over"] - s["before"] for s in stages[1:]]
    return {
        "arm": arm,
        "seed": seed,
        "bits/byte": stages[-1]["bits/byte"],
        "pass key": sum(scores) / len(scores),
        "jump": max(jumps, default=0.0),
        "recovered": max((s["recovered"] for s in stages[1:]), default=0.0),
        "tokens": sum(s["tokens"] for s in stages),
        "seconds": sum(map(seconds_of, found)),
    }


def study(seeds: int, stages: int, out: Path) -> None:
    """Trains what is not trained yet, in OUT/curriculum; prints the table, writes a CSV."""
    rows: list[Row] = []
    for seed in range(seeds):
        arms: dict[str, list[TrainConfig]] = {}
        for architecture in ARCHITECTURES:
            folder = out / "curriculum" / f"{architecture}-{seed}"
            line = ["--scale=tiny", f"--architecture={architecture}", f"--workdir={folder}"]
            args, overrides = curriculum.parse([*line, f"--config.seed={seed}"])
            parts = curriculum.stages(args, overrides)
            arms[architecture] = [c for c in parts if c.stage in configs.STAGES[:stages]]
            for config in arms[architecture]:
                train(config)
        alone = long_rows_alone(arms["fixed"], out / "curriculum" / f"long-{seed}")
        train(alone)
        rows += [row_of(arm, seed, found) for arm, found in (*arms.items(), ("long", [alone]))]
        write_csv(rows, out / "curriculum.csv")
    print(table(rows, ("arm",), COLUMNS))
    print("jump and recovered: of the worst hand-over, in bits/byte and as a share of its stage")


def arguments(parser: Any) -> None:
    add_seeds(parser, default=1)
    many = len(configs.STAGES)
    text = "only the first ones (%(default)s: all)"
    parser.add_argument("--stages", type=int, choices=range(1, many + 1), default=many, help=text)
    add_out(parser)
