"""What a kernel costs, by the TPU compiler's schedule or by the clock.

    python -m pallas_kernels.bench bounded_decay                     v5p, B=1 T=8192 H=96 K=V=128
    python -m pallas_kernels.bench bounded_decay --chip=v6e --shape=1,65536,96,128,128
    python -m pallas_kernels.bench bounded_decay --here --shape=1,4096,4,64,64     timed here

Without an accelerator each implementation is compiled ahead of time for --chip (extra `[plan]`) and
its schedule is read. That is an estimate: it leaves out stalls on memory traffic, so the byte bound
stands beside it and `ms` is the larger of the two. XLA's own estimates for what is not a kernel
(`of it XLA ms`, and all of `chunked`) are several times too high for elementwise work. With an
accelerator, or with --here, implementations are timed instead. Where tokamax >= 0.0.17 is installed
its kernel for the same recurrence is measured too.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import aot, peer, schedule
from pallas_kernels.bounded_decay import bounded_decay
from pallas_kernels.libtpu import describe_no_tpu

PASSES = ("forward", "forward+backward")
REPEATS = 5


class Shape(NamedTuple):
    B: int
    T: int
    H: int
    K: int
    V: int


def arguments(shape: Shape, dtype: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
    """(q, k, v, g, beta, do), head-first as a model's projections make them."""
    B, T, H, K, V = shape
    s = jax.ShapeDtypeStruct
    q, v = s((B, H, T, K), dtype), s((B, H, T, V), dtype)
    return q, q, v, s(q.shape, jnp.float32), s((B, H, T), jnp.float32), v


def forward_of(implementation: str) -> Callable[..., jax.Array]:
    """o from head-first (q, k, v, g, beta)."""
    if implementation == "tokamax":
        return peer.tokamax_forward

    def forward(*args: jax.Array) -> jax.Array:
        time_second = (x.swapaxes(1, 2) for x in args)
        o_BTHV, _ = bounded_decay(*time_second, implementation=implementation)
        return o_BTHV.swapaxes(1, 2)

    return forward


def function_of(implementation: str, which: str) -> Callable[..., Any]:
    """(q, k, v, g, beta, do) -> o, or (o, all five gradients)."""
    forward = forward_of(implementation)
    if which == "forward":
        return lambda *args: forward(*args[:-1])

    def both(*args: jax.Array) -> Any:
        o, pull = jax.vjp(forward, *args[:-1])
        return o, pull(args[-1])

    return both


def least_bytes(shape: Shape, which: str, dtype: Any) -> int:
    """Every input read once and every output written once."""
    size = sum(a.size * a.dtype.itemsize for a in arguments(shape, dtype))
    # Forward: do has the size of o. With the gradient: all six in, o and five gradients out.
    return size if which == "forward" else 2 * size


def least_flops(shape: Shape, which: str) -> float:
    """Matmul work of the chunked form at 64 tokens a chunk, causal products counted half:

    two reads of the state and its update 6 K V; scores of q and of k 2 C K; the inverse applied to
    values and keys C (K + V); scores times values C V. The inverse itself is not counted. The
    gradient takes two products for each of the forward pass.
    """
    B, T, H, K, V = shape
    C = 64
    token = 6 * K * V + 3 * C * K + 2 * C * V
    return B * T * H * token * (1 if which == "forward" else 3)


def measure_schedule(implementation: str, which: str, shape: Shape, chip: str) -> dict[str, Any]:
    """One row, from the compiler. Runs in a process of its own: libtpu reads its flags once."""
    with tempfile.TemporaryDirectory() as folder:
        dump, spec = Path(folder), aot.CHIPS[chip]
        aot.prepare(dump)
        f = function_of(implementation, which)
        began = time.perf_counter()
        compiled = aot.compile_for(chip, f, *arguments(shape, jnp.bfloat16))
        hlo = compiled.as_text()
        kernels = [schedule.kernel_cost(n, dump, spec) for n in schedule.kernel_names(hlo)]
        around = schedule.xla_cycles(hlo)
    issue = (sum(k.cycles for k in kernels) + around) / spec.clock
    memory = compiled.memory_analysis()
    moved = least_bytes(shape, which, jnp.bfloat16)
    flops = least_flops(shape, which)
    seconds = max(issue, moved / spec.hbm_rate)
    return {
        "implementation": implementation,
        "pass": which,
        "ms": 1e3 * seconds,
        "schedule ms": 1e3 * issue,
        "of it XLA ms": 1e3 * around / spec.clock,
        "bytes ms": 1e3 * moved / spec.hbm_rate,
        "flops ms": 1e3 * flops / spec.peak_flops,
        "roofline": max(moved / spec.hbm_rate, flops / spec.peak_flops) / seconds,
        "temporaries GB": memory.temp_size_in_bytes / 1e9,
        "compile s": time.perf_counter() - began,
        "kernels": [k._asdict() for k in kernels],
    }


def measure_clock(implementation: str, which: str, shape: Shape) -> dict[str, Any]:
    """One row by the clock: median of a few runs after the first."""
    rng = np.random.default_rng(0)
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    q, k, v, g, beta, do = (rng.normal(size=a.shape) for a in arguments(shape, dtype))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    g, beta = -5 / (1 + np.exp(3 - g)), 1 / (1 + np.exp(-beta))
    args = [jnp.asarray(x, dtype) for x in (q, k, v, do)]
    args = [*args[:3], jnp.asarray(g, jnp.float32), jnp.asarray(beta, jnp.float32), args[3]]
    run = jax.jit(function_of(implementation, which))
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


def report_schedule(shape: Shape, chip: str) -> int:
    """Prints both tables; the exit code is 1 if our own kernel could not be measured."""
    print(f"{chip}, {shape}, bf16: by the compiler's schedule, not measured on a chip", flush=True)
    implementations = ("pallas", "chunked", *(["tokamax"] if peer.tokamax_found() else []))
    rows, kernels, failed = [], [], 0
    for implementation in implementations:
        for which in PASSES:
            command = [sys.executable, "-m", "pallas_kernels.bench", "bounded_decay"]
            command += [f"--one={implementation}:{which}", f"--chip={chip}"]
            command += ["--shape=" + ",".join(map(str, shape))]
            print(f"compiling {implementation} {which} ...", file=sys.stderr, flush=True)
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                said = [x for x in done.stderr.splitlines() if x.strip()] or ["no message"]
                print(f"{implementation} {which}: {said[-1][:300]}", file=sys.stderr)
                failed |= implementation == "pallas"
                continue
            row = json.loads(done.stdout.splitlines()[-1])
            rows.append(row)
            kernels += [{"implementation": implementation, **k} for k in row["kernels"]]
    columns = ["implementation", "pass", "ms", "schedule ms", "of it XLA ms", "bytes ms"]
    print(table(rows, [*columns, "flops ms", "roofline", "temporaries GB", "compile s"]))
    columns = ["implementation", "name", "step_bundles", "steps", "cycles", "matrix_share"]
    print("\n" + table(kernels, [*columns, "spills", "vmem"]))
    if "tokamax" not in implementations:
        print("\ntokamax >= 0.0.17 is not installed here: no peer measured")
    return int(failed)


def report_clock(shape: Shape) -> None:
    """Prints the times of what runs well on this machine, and their ratios to `ref`."""
    backend = jax.default_backend()
    print(f"{backend} ({jax.devices()[0].device_kind}), {shape}: timed", flush=True)
    implementations = ("ref", "chunked", *(["pallas"] if backend == "tpu" else []))
    rows = [measure_clock(i, which, shape) for which in PASSES for i in implementations]
    for row in rows:
        ref = next(r for r in rows if r["pass"] == row["pass"] and r["implementation"] == "ref")
        row["times faster than ref"] = ref["ms"] / row["ms"]
    print(table(rows, ["implementation", "pass", "ms", "times faster than ref"]))


def main(argv: list[str]) -> int:
    """One command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("op", choices=["bounded_decay"])
    parser.add_argument("--chip", choices=list(aot.CHIPS), default="v5p")
    parser.add_argument("--shape", default="1,8192,96,128,128", help="B,T,H,K,V")
    parser.add_argument("--here", action="store_true", help="time on this machine")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    describe_no_tpu()
    try:
        shape = Shape(*map(int, args.shape.split(",")))
        if min(shape) < 1:
            raise ValueError
    except (TypeError, ValueError):
        parser.error(f"--shape={args.shape}: expected five numbers B,T,H,K,V above 0")
    if args.one:
        implementation, which = args.one.split(":")
        print(json.dumps(measure_schedule(implementation, which, shape, args.chip)))
        return 0
    if args.here or jax.default_backend() != "cpu":
        report_clock(shape)
        return 0
    try:
        aot.mesh(args.chip)
    except aot.MissingCompiler as e:
        print(f"error: {e}; or --here to time this machine", file=sys.stderr)
        return 2
    return report_schedule(shape, args.chip)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
