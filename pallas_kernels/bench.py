"""What a kernel costs, by the TPU compiler's schedule or by the clock.

    python -m pallas_kernels.bench bounded_decay                     v5p, B=1 T=8192 H=96 K=V=128
    python -m pallas_kernels.bench bounded_decay --chip=v6e --shape=1,65536,96,128,128
    python -m pallas_kernels.bench bounded_decay --here --shape=1,4096,4,64,64     timed here
    python -m pallas_kernels.bench expert_dispatch                   a chip's share at full scale
    python -m pallas_kernels.bench expert_dispatch --shape=16384,1,14,3584,3072,2  N,A,E,R,F,P

Without an accelerator each implementation is compiled ahead of time for --chip (extra `[plan]`) and
its schedule is read. That is an estimate: it leaves out stalls on memory traffic, so the byte bound
stands beside it and `ms` is the larger of the two. Where a kernel's steps depend on the routing,
experts with equally many rows are assumed. `of it XLA ms` is what is not a kernel: XLA's own
estimates, several times too high for elementwise work, and for gathers, which it does not
estimate, their bytes. With an accelerator, or with --here, implementations are timed instead. What
each op compares, its shapes and its bounds: `cases.py` in its folder.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import aot, schedule
from pallas_kernels.bounded_decay import cases as bounded_decay
from pallas_kernels.expert_dispatch import cases as expert_dispatch
from pallas_kernels.libtpu import describe_no_tpu

OPS: dict[str, Any] = {"bounded_decay": bounded_decay, "expert_dispatch": expert_dispatch}
PASSES = ("forward", "forward+backward")
REPEATS = 5


def measure_schedule(
    op: str, implementation: str, which: str, shape: Any, chip: str
) -> dict[str, Any]:
    """One row, from the compiler. Runs in a process of its own: libtpu reads its flags once."""
    with tempfile.TemporaryDirectory() as folder:
        dump, spec, cases = Path(folder), aot.CHIPS[chip], OPS[op]
        aot.prepare(dump)
        f = cases.function_of(implementation, which, shape)
        began = time.perf_counter()
        compiled = aot.compile_for(chip, f, *cases.arguments(shape, jnp.bfloat16))
        hlo = compiled.as_text()
        kernels = schedule.kernel_costs(
            hlo, dump, spec, lambda kernel: cases.visits(implementation, kernel, shape)
        )
    around = schedule.xla_cycles(hlo) / spec.clock + schedule.gathered_bytes(hlo) / spec.hbm_rate
    issue = sum(k.cycles for k in kernels) / spec.clock + around
    memory = compiled.memory_analysis()
    moved = cases.least_bytes(shape, which, jnp.bfloat16)
    flops = cases.least_flops(shape, which)
    seconds = max(issue, moved / spec.hbm_rate)
    return {
        "implementation": implementation,
        "pass": which,
        "ms": 1e3 * seconds,
        "schedule ms": 1e3 * issue,
        "of it XLA ms": 1e3 * around,
        "bytes": float(moved),
        "bytes ms": 1e3 * moved / spec.hbm_rate,
        "flops": float(flops),
        "flops ms": 1e3 * flops / spec.peak_flops,
        "roofline": max(moved / spec.hbm_rate, flops / spec.peak_flops) / seconds,
        "temporaries GB": memory.temp_size_in_bytes / 1e9,
        "compile s": time.perf_counter() - began,
        "kernels": [k._asdict() for k in kernels],
    }


def measure_clock(op: str, implementation: str, which: str, shape: Any) -> dict[str, Any]:
    """One row by the clock: median of a few runs after the first."""
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    args = OPS[op].values(shape, dtype)
    run = jax.jit(OPS[op].function_of(implementation, which, shape))
    jax.block_until_ready(run(*args))
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        jax.block_until_ready(run(*args))
        times.append(time.perf_counter() - began)
    return {"implementation": implementation, "pass": which, "ms": 1e3 * float(np.median(times))}


def table(rows: list[dict[str, Any]], columns: list[str]) -> str:
    """Markdown."""
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for row in rows:
        cells = [row.get(c, "") for c in columns]
        cells = [f"{c:.3g}" if isinstance(c, float) else str(c) for c in cells]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def report_schedule(op: str, shape: Any, chip: str) -> int:
    """Prints both tables; the exit code is 1 if our own kernel could not be measured."""
    print(f"{chip}, {shape}, bf16: by the compiler's schedule, not measured on a chip", flush=True)
    implementations = OPS[op].compiled()
    rows, kernels, failed = [], [], 0
    for implementation in implementations:
        for which in PASSES:
            command = [sys.executable, "-m", "pallas_kernels.bench", op]
            command += [f"--one={implementation}:{which}", f"--chip={chip}"]
            command += ["--shape=" + ",".join(map(str, shape))]
            print(f"compiling {implementation} {which} ...", file=sys.stderr, flush=True)
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                said = [x for x in done.stderr.splitlines() if "Error" in x] or ["no message"]
                print(f"{implementation} {which}: {said[-1][:300]}", file=sys.stderr)
                failed |= implementation == "pallas"
                continue
            row = json.loads(done.stdout.splitlines()[-1])
            rows.append(row)
            kernels += [{"implementation": implementation, **k} for k in row["kernels"]]
    columns = ["implementation", "pass", "ms", "schedule ms", "of it XLA ms", "bytes"]
    columns += ["bytes ms", "flops", "flops ms", "roofline", "temporaries GB", "compile s"]
    print(table(rows, columns))
    columns = ["implementation", "name", "step_bundles", "steps", "cycles", "matrix_share"]
    print("\n" + table(kernels, [*columns, "spills", "vmem"]))
    if "tokamax" not in implementations:
        print("\ntokamax >= 0.0.17 is not installed here: not measured")
    return int(failed)


def report_clock(op: str, shape: Any) -> None:
    """Prints the times of what runs well on this machine, and their ratios to the first."""
    backend = jax.default_backend()
    print(f"{backend} ({jax.devices()[0].device_kind}), {shape}: timed", flush=True)
    implementations = OPS[op].timed(backend)
    rows = [measure_clock(op, i, which, shape) for which in PASSES for i in implementations]
    for row in rows:
        first = next(r for r in rows if r["pass"] == row["pass"])
        row[f"times faster than {implementations[0]}"] = first["ms"] / row["ms"]
    print(table(rows, list(rows[0])))


def main(argv: list[str]) -> int:
    """One command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("op", choices=list(OPS))
    parser.add_argument("--chip", choices=list(aot.CHIPS), help="(v5p)")
    parser.add_argument("--shape", help="B,T,H,K,V or N,A,E,R,F,P")
    parser.add_argument("--here", action="store_true", help="time on this machine")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    describe_no_tpu()
    shape = OPS[args.op].DEFAULT
    try:
        if args.shape is not None:
            shape = type(shape)(*map(int, args.shape.split(",")))
        if min(shape) < 1:
            raise ValueError
    except (TypeError, ValueError):
        wanted = f"{len(shape._fields)} numbers {','.join(shape._fields)} above 0"
        parser.error(f"--shape={args.shape}: expected {wanted}")
    if wrong := OPS[args.op].refusal(shape):
        parser.error(f"--shape={args.shape}: {wrong}")
    if args.here and args.chip:
        parser.error(f"--here times this machine; --chip={args.chip} is for the schedule")
    args.chip = args.chip or "v5p"
    if args.one:
        implementation, which = args.one.split(":")
        print(json.dumps(measure_schedule(args.op, implementation, which, shape, args.chip)))
        return 0
    if args.here or jax.default_backend() != "cpu":
        need = OPS[args.op].least_bytes(shape, PASSES[1], jnp.float32)
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if jax.default_backend() == "cpu" and 2 * need > memory:  # and as much for what is made
            parser.error(
                f"--shape={args.shape}: its arrays take {need / 1e9:,.1f} GB, twice that while "
                f"it runs; this machine has {memory / 1e9:,.1f} GB"
            )
        report_clock(args.op, shape)
        return 0
    try:
        aot.mesh(args.chip)
    except aot.MissingCompiler as e:
        print(f"error: {e}; or --here to time this machine", file=sys.stderr)
        return 2
    return report_schedule(args.op, shape, args.chip)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
