"""Small studies that decide defaults.

    python -m experiments.ablate hybrid_vs_dense   the architecture and a dense GPT, at equal time
    python -m experiments.ablate balance           strategies of expert balance, side by side
    python -m experiments.ablate balance_cost      what the balance takes of a step, here and on v5p
    python -m experiments.ablate activation        SiTU-GLU and swiglu at equal parameters
    python -m experiments.ablate latent            the experts' width: D, D/2, D/4 at equal FLOPs
    python -m experiments.ablate recall            what each kind of layer can recall and track
    python -m experiments.ablate curriculum        stages, staged and fixed, or long rows alone
    python -m experiments.ablate step_time         the tiny step, split into its parts

Each prints a Markdown table; balance, activation, latent, recall and curriculum also write CSV
(and PNG) to --out. All but the last three train 8k:tiny with one thing changed, three seeds an
arm; `--seeds=1 --steps=100` is a quick look.
"""

import argparse
import json
from typing import Any

from experiments.ablate import (
    activation,
    balance,
    balance_cost,
    curriculum,
    hybrid_vs_dense,
    latent,
    recall,
    step_time,
)
from experiments.ablate.arguments import add_out, add_seeds, at_least
from mlmoe.stop import run_program
from pallas_kernels.libtpu import describe_no_tpu


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.ablate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    studies = parser.add_subparsers(dest="study", required=True)

    def add(name: str, module: Any, text: str) -> argparse.ArgumentParser:
        raw = argparse.RawDescriptionHelpFormatter
        about = module.__doc__
        return studies.add_parser(name, help=text, description=about, formatter_class=raw)

    compare = add("hybrid_vs_dense", hybrid_vs_dense, "the architecture against a dense GPT")
    add_seeds(compare)
    compare.add_argument(
        "--seconds", type=float, default=180.0, help="of training, an arm (%(default)s)"
    )
    balance.arguments(add("balance", balance, "strategies of expert balance"))
    add("balance_cost", balance_cost, "what the balance takes of a step")
    for name, module, text in (
        ("activation", activation, "SiTU-GLU and swiglu"),
        ("latent", latent, "the experts' width"),
    ):
        study = add(name, module, text)
        add_seeds(study)
        study.add_argument("--steps", type=at_least(20), default=500, help="an arm (%(default)s)")
        add_out(study)
    recall.arguments(add("recall", recall, "associative recall and parity by layer"))
    curriculum.arguments(add("curriculum", curriculum, "staged, fixed, the longest rows alone"))
    add("step_time", step_time, "the tiny step, split into its parts")
    arm = studies.add_parser("arm", help="one row of hybrid_vs_dense, as JSON")
    arm.add_argument("name", choices=tuple(hybrid_vs_dense.ARMS))
    arm.add_argument("seed", type=int)
    arm.add_argument("seconds", type=float)
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """One study; returns the exit code."""
    args = parse(argv)
    describe_no_tpu()
    match args.study:
        case "hybrid_vs_dense":
            hybrid_vs_dense.study(args.seeds, args.seconds)
        case "balance":
            balance.study(args)
        case "balance_cost":
            balance_cost.study()
        case "activation":
            activation.study(args.seeds, args.steps, args.out)
        case "latent":
            latent.study(args.seeds, args.steps, args.out)
        case "recall":
            recall.study(args.seeds, args.steps, args.parity_steps, args.out)
        case "curriculum":
            curriculum.study(args.seeds, args.stages, args.out)
        case "step_time":
            step_time.study()
        case "arm":
            print(json.dumps(hybrid_vs_dense.run_arm(args.name, args.seed, args.seconds)))
    if "out" in args:
        print(f"rows and figures are in {args.out}")
    return 0


if __name__ == "__main__":
    run_program(main, "before the end of the study")
