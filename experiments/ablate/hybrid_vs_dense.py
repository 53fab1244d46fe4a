"""The architecture against a dense GPT at equal wall clock.

8k:tiny against a dense softmax-attention GPT (4 layers, width 128, 4 heads, RoPE, SwiGLU, no
experts, no attention residuals), both trained by this code on the same data in the same order, with
the same optimizer. An arm first runs a few steps to learn how many fit into its seconds, so that
its schedule ends when its time does. Compilation is apart, and each arm is a process of its own.
"""

import json
import resource
import subprocess
import sys
from typing import Any

from ml_collections import ConfigDict

from experiments.ablate.results import table
from mlmoe.count import parameters

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
    from experiments.ablate.training import fit, heldout_bits, open_setting, tiny

    setting = open_setting()
    spent = fit(setting, tiny(ARMS[name], seed, CALIBRATION_STEPS)).seconds
    steps = max(CALIBRATION_STEPS, int(seconds * CALIBRATION_STEPS / spent))
    config = tiny(ARMS[name], seed, steps)
    run = fit(setting, config)
    count = parameters(config.model)
    return {
        "arm": name,
        "seed": seed,
        "bits/byte": heldout_bits(setting, run),
        "steps": steps,
        "seconds": run.seconds,
        "tokens/s": steps * config.batch * config.context / run.seconds,
        "parameters": count.total,
        "active": count.active,
        "peak MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
    }


def study(seeds: int, seconds: float) -> None:
    """Runs every arm and seed in its own process and prints the table."""
    rows = []
    for seed in range(seeds):
        for arm in ARMS:
            command = [sys.executable, "-m", "experiments.ablate", "arm", arm, str(seed)]
            out = subprocess.run([*command, str(seconds)], stdout=subprocess.PIPE, check=True)
            rows.append(json.loads(out.stdout.splitlines()[-1]))
            print(json.dumps(rows[-1]), flush=True)
    columns = ["bits/byte", "tokens/s", "steps", "seconds", "parameters", "active", "peak MB"]
    print(table(rows, ("arm",), columns))
