"""One incremental layer over a million tokens: precision by position, memory and time per token.

    python -m experiments.stream                    a D layer of 8k:tiny, 1,048,576 tokens
    python -m experiments.stream --letter=S --tokens=65536 --config=8k:small

The layer is fresh, its input normal noise, and channels remember up to 100,000 tokens. Errors are
RMS of the difference over RMS of the float64 recurrence fed with the same q, k, v, g and beta: of
the state at a position, of the outputs since the position before. Peak memory is the process's.
Time is the layer's alone: of each piece the fastest of 3 runs, the median over the pieces since the
position before. The first piece is run again beside each, so that other work on the machine slows
both, and their ratio is what the length costs.
"""

import argparse
import resource
import sys
import time
from typing import Any

import jax
import numpy as np

import configs
from experiments.ablate.arguments import at_least
from mlmoe.config import ModelConfig, from_dict
from mlmoe.stop import run_program
from mlmoe.stream import check, make_layer, noise
from pallas_kernels.libtpu import describe_no_tpu

POSITIONS = tuple(4096 * 4**i for i in range(5))  # 4K, 16K, 64K, 256K, 1M
MEMORY_MAX = 1e5
REPEATS, WARM_UP = 3, 8  # runs of a piece; pieces before the first measured


def peak_bytes() -> int:
    """The most memory this process has had."""
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measure(config: ModelConfig, letter: str, tokens: int, piece: int) -> list[dict[str, Any]]:
    """A row a position, printed as it is reached."""
    layer = make_layer(config, letter)
    params, seconds, ratios = layer.init(jax.random.key(1)), [], []
    first_1TD = next(noise(config, tokens, piece))

    def run(x_1TD: jax.Array, carried: Any) -> tuple[float, Any]:
        began = time.perf_counter()
        out = jax.block_until_ready(layer.extend(params, x_1TD, carried))
        return (time.perf_counter() - began) / x_1TD.shape[1], out

    def timed(x_1TD: jax.Array, carried: Any) -> Any:
        here, first = [], []
        for _ in range(REPEATS):
            first.append(run(first_1TD, layer.start(1))[0])
            took, out = run(x_1TD, carried)
            here.append(took)
        seconds.append(min(here))
        ratios.append(min(here) / min(first))
        return out

    # Compiled, and the allocator at its size, before anything is measured.
    warm_up = noise(config, WARM_UP * piece + tokens % piece, piece)
    assert not list(check(timed, layer.start(1), warm_up, []))
    seconds.clear()
    ratios.clear()
    ends = [*(p for p in POSITIONS if p < tokens), tokens]
    carried, rows = layer.start(1), []
    size = sum(x.nbytes for x in jax.tree.leaves(carried))
    print(f"{letter}: {tokens:,} tokens in pieces of {piece:,}; {size:,} bytes are carried\n")
    print(
        "| position | state error | output error | peak MB | us a token | time over first piece |"
    )
    print("|---" * 6 + "|")
    for found in check(timed, carried, noise(config, tokens, piece), ends):
        row = {**found._asdict(), "peak": peak_bytes()}
        row |= {"seconds": float(np.median(seconds)), "ratio": float(np.median(ratios))}
        seconds.clear()
        ratios.clear()
        rows.append(row)
        print(
            f"| {row['end']:,} | {row['state_error']:.1e} | {row['output_error']:.1e} "
            f"| {row['peak'] / 1e6:,.0f} | {1e6 * row['seconds']:.2f} | {row['ratio']:.2f} |",
            flush=True,
        )
    return rows


def main(argv: list[str]) -> int:
    """One command line; returns the exit code."""
    describe_no_tpu()
    parser = argparse.ArgumentParser(
        prog="python -m experiments.stream",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", default="8k:tiny", help="STAGE:SCALE; sizes of the layer")
    parser.add_argument("--letter", choices="DAS", default="D")
    parser.add_argument("--tokens", type=at_least(1), default=POSITIONS[-1])
    parser.add_argument("--piece", type=at_least(1), default=4096, help="divides 4096")
    args = parser.parse_args(argv)
    if POSITIONS[0] % args.piece:
        parser.error(f"--piece={args.piece} does not divide {POSITIONS[0]}")
    c = configs.load(args.config).model
    c.incremental.memory_max = MEMORY_MAX
    rows = measure(from_dict(ModelConfig, c.to_dict()), args.letter, args.tokens, args.piece)
    first, last = rows[0], rows[-1]
    grown = (last["peak"] - first["peak"]) / max(1, last["end"] - first["end"])
    print(
        f"\n{last['end']:,} over {first['end']:,} tokens: peak memory "
        f"{last['peak'] / first['peak']:.3f} ({grown:.1f} bytes a token more), time per token "
        f"{last['ratio']:.3f}"
    )
    return 0


if __name__ == "__main__":
    run_program(main, "before the last token")
