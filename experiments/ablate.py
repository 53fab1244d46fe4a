"""Small studies at equal wall clock, each arm in a process of its own.

    python -m experiments.ablate hybrid_vs_dense              three seeds, 180 s of training an arm
    python -m experiments.ablate hybrid_vs_dense --seeds=1 --seconds=60
    python -m experiments.ablate step_time                    the tiny step, split into its parts

hybrid_vs_dense: the architecture of 8k:tiny against a dense softmax-attention GPT (4 layers, width
128, 4 heads, RoPE, SwiGLU, no experts, no attention residuals), both trained by this code on the
same data in the same order, with the same optimizer. An arm first runs a few steps to learn how
many fit into its seconds, so that its schedule ends when its time does. Compilation is apart.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

import configs
from mlmoe.config import TrainConfig, from_dict
from mlmoe.count import parameters
from mlmoe.errors import UserError

CALIBRATION_STEPS = 30


def hybrid(c: ConfigDict) -> None:
    """8k:tiny as it is."""


def dense_gpt(c: ConfigDict) -> None:
    """nanoGPT's CPU shape: 4 layers of width 128 with 4 heads."""
    c.model.update(layout="FFFF", layers=4, d_model=128)
    c.model.attention.update(heads=4, head_dim=32)
    c.model.residual.kind = "none"
    c.model.moe.update(dense_layers=4, dense_hidden=344, activation="swiglu")


ARMS = {"hybrid": hybrid, "dense": dense_gpt}


def run_arm(name: str, seed: int, seconds: float) -> dict[str, Any]:
    """Trains one arm for `seconds` of steps and evaluates it on the held-out documents."""
    import jax

    from mlmoe.build import compile_eval, compile_train, first_state, make_program, put
    from mlmoe.data.heldout import heldout_batches
    from mlmoe.data.pipeline import train_batches
    from mlmoe.data.sources import open_corpus
    from mlmoe.data.tokenizers import make_tokenizer
    from mlmoe.evaluate import evaluate
    from mlmoe.sharding import make_mesh

    base = configs.load("8k:tiny")
    ARMS[name](base)
    base.seed = seed
    mesh = make_mesh()
    tokenizer = make_tokenizer(base.data.tokenizer)
    corpus = open_corpus(from_dict(TrainConfig, base.to_dict()).data, tokenizer)

    def train(steps: int) -> tuple[Any, Any, float, TrainConfig]:
        base.steps = steps
        config = from_dict(TrainConfig, base.to_dict())
        program = make_program(config)
        train_step = compile_train(config, program, mesh)
        state = first_state(program, mesh)
        batches = train_batches(
            corpus,
            tokenizer=tokenizer,
            context=config.context,
            batch_size=config.batch,
            seed=seed,
        )
        times = []
        for _ in range(steps):
            began = time.perf_counter()
            state, metrics = train_step(state, put(next(batches), mesh))
            jax.block_until_ready(metrics)
            times.append(time.perf_counter() - began)
        batches.close()  # type: ignore[attr-defined]
        return state, program, float(np.sum(times[2:]) * steps / (steps - 2)), config

    _, _, spent, _ = train(CALIBRATION_STEPS)
    steps = max(CALIBRATION_STEPS, int(seconds * CALIBRATION_STEPS / spent))
    state, program, spent, config = train(steps)
    eval_step = compile_eval(config, program, mesh)
    batches, n_bytes = heldout_batches(
        corpus,
        tokenizer=tokenizer,
        context=config.context,
        batch_size=config.batch,
        max_bytes=config.final_eval_bytes,
    )
    on_device = [put(b, mesh) for b in batches]
    values = evaluate(eval_step, state.params, state.routing, on_device, n_bytes, lambda: None)
    count = parameters(config.model)
    return {
        "arm": name,
        "seed": seed,
        "bits_per_byte": values["bits_per_byte"],
        "steps": steps,
        "seconds": spent,
        "tokens_per_s": steps * config.batch * config.context / spent,
        "parameters": count.total,
        "active": count.active,
        "peak_MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
    }


def hybrid_vs_dense(seeds: int, seconds: float) -> None:
    """Runs every arm and seed in its own process and prints the table."""
    rows = []
    for seed in range(seeds):
        for arm in ARMS:
            command = [sys.executable, "-m", "experiments.ablate", "arm", arm, str(seed)]
            out = subprocess.run([*command, str(seconds)], stdout=subprocess.PIPE, check=True)
            rows.append(json.loads(out.stdout.splitlines()[-1]))
            print(json.dumps(rows[-1]), flush=True)
    print(table(rows))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: mean over the seeds of each arm, with the spread of bits/byte."""
    lines = [
        "| arm | bits/byte (seeds) | tokens/s | steps | seconds | parameters | active | peak MB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for arm in ARMS:
        mine = [r for r in rows if r["arm"] == arm]
        scores = [r["bits_per_byte"] for r in mine]
        each = ", ".join(f"{s:.3f}" for s in scores)
        mean = {k: np.mean([r[k] for r in mine]) for k in ("tokens_per_s", "steps", "seconds")}
        lines.append(
            f"| {arm} | {np.mean(scores):.3f} ({each}) | {mean['tokens_per_s']:,.0f} | "
            f"{mean['steps']:.0f} | {mean['seconds']:.0f} | {mine[0]['parameters']:,} | "
            f"{mine[0]['active']:,} | {np.mean([r['peak_MB'] for r in mine]):.0f} |"
        )
    return "\n".join(lines)


def step_time(repeats: int = 30) -> None:
    """Prints the time of the tiny step and of its parts, in milliseconds.

    Each is a program of its own, so that forward, backward and optimizer do not add up to the step
    to the last millisecond: what XLA fuses across them in the step is apart here.
    """
    import jax
    import optax

    from mlmoe.build import compiler_options, first_state, make_program, put
    from mlmoe.data.pipeline import train_batches
    from mlmoe.data.sources import open_corpus
    from mlmoe.data.tokenizers import make_tokenizer
    from mlmoe.sharding import make_mesh
    from mlmoe.step import loss_sums

    config = from_dict(TrainConfig, configs.load("8k:tiny").to_dict())
    mesh, program = make_mesh(), make_program(config)
    tokenizer = make_tokenizer(config.data.tokenizer)
    corpus = open_corpus(config.data, tokenizer)
    sizes = {"context": config.context, "batch_size": config.batch}
    batches = train_batches(corpus, tokenizer=tokenizer, seed=0, **sizes)

    def loss(params: Any, state: Any, batch: Any) -> Any:
        sums, stats = loss_sums(config, program.model, params, state.routing, batch)
        return sums.nats, stats

    def forward(state: Any, batch: Any) -> Any:
        return loss(state.params, state, batch)

    def gradient(state: Any, batch: Any) -> Any:
        return jax.grad(loss, has_aux=True)(state.params, state, batch)

    def update(state: Any, batch: Any) -> Any:
        del batch  # gradients the size of the parameters are all it needs
        updates, opt_state = program.tx.update(state.params, state.opt_state, state.params)
        return optax.apply_updates(state.params, updates), opt_state

    parts = {"forward": forward, "gradient": gradient, "update": update, "step": program.train_step}
    times = {}
    batch = put(next(batches), mesh)
    with jax.set_mesh(mesh):
        state = first_state(program, mesh)
        for name, f in parts.items():
            run = jax.jit(f).lower(state, batch).compile(compiler_options())
            times[name] = _median(lambda run=run: jax.block_until_ready(run(state, batch)), repeats)
    times["host"] = _median(lambda: jax.block_until_ready(put(next(batches), mesh)), repeats)
    batches.close()  # type: ignore[attr-defined]
    print(f"forward    {times['forward']:7.1f} ms")
    print(f"backward   {times['gradient'] - times['forward']:7.1f} ms (gradient less forward)")
    print(f"optimizer  {times['update']:7.1f} ms")
    print(f"step       {times['step']:7.1f} ms")
    print(f"host       {times['host']:7.1f} ms (a batch, prepared while the step runs)")


def _median(f: Any, repeats: int) -> float:
    """Milliseconds of a call, after one that warms up."""
    f()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        f()
        times.append(time.perf_counter() - began)
    return 1e3 * float(np.median(times))


def main(argv: list[str]) -> int:
    """One study; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.ablate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    studies = parser.add_subparsers(dest="study", required=True)
    compare = studies.add_parser("hybrid_vs_dense", help="the architecture against a dense GPT")
    compare.add_argument("--seeds", type=int, default=3)
    compare.add_argument("--seconds", type=float, default=180.0)
    studies.add_parser("step_time", help="the tiny step, split into its parts")
    arm = studies.add_parser("arm", help="one row of hybrid_vs_dense, as JSON")
    arm.add_argument("name", choices=tuple(ARMS))
    arm.add_argument("seed", type=int)
    arm.add_argument("seconds", type=float)
    args = parser.parse_args(argv)
    try:
        if args.study == "hybrid_vs_dense":
            hybrid_vs_dense(args.seeds, args.seconds)
        elif args.study == "step_time":
            step_time()
        else:
            print(json.dumps(run_arm(args.name, args.seed, args.seconds)))
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
