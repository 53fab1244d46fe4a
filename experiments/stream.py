"""One incremental layer over a million tokens: precision by position, memory and time per token.

    python -m experiments.stream                    a D layer of 8k:tiny, 1,048,576 tokens
    python -m experiments.stream --letter=S --tokens=65536 --config=8k:small

The layer is fresh, its input normal noise, and channels remember up to 100,000 tokens. Errors are
RMS of the difference over RMS of the float64 recurrence fed with the same q, k, v, g and beta: of
the state at a position, of the outputs since the position before. Peak memory is the process's;
time is the layer's alone, the median over the pieces since the position before, each run 3 times.
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
from mlmoe.stream import check, make_layer, noise

POSITIONS = tuple(4096 * 4**i for i in range(5))  # 4K, 16K, 64K, 256K, 1M
MEMORY_MAX = 1e5
REPEATS = 3


def peak_bytes() -> int:
    """The most memory this process has had."""
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measure(config: ModelConfig, letter: str, tokens: int, piece: int) -> list[dict[str, Any]]:
    """A row a position, printed as it is reached."""
    layer = make_layer(config, letter)
    params, seconds = layer.init(jax.random.key(1)), []
    for size in {min(piece, tokens), tokens % piece or piece}:  # compiled before anything is timed
        x_1TD = next(noise(config, size, size))
        jax.block_until_ready(layer.extend(params, x_1TD, layer.start(1)))

    def timed(x_1TD: jax.Array, carried: Any) -> Any:
        took = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            out = jax.block_until_ready(layer.extend(params, x_1TD, carried))
            took.append((time.perf_counter() - began) / x_1TD.shape[1])
        seconds.append(float(np.median(took)))
        return out

    ends = [*(p for p in POSITIONS if p < tokens), tokens]
    carried, rows = layer.start(1), []
    size = sum(x.nbytes for x in jax.tree.leaves(carried))
    print(f"{letter}: {tokens:,} tokens in pieces of {piece:,}; {size:,} bytes are carried\n")
    print("| position | state error | output error | peak MB | us a token |\n" + "|---" * 5 + "|")
    for found in check(timed, carried, noise(config, tokens, piece), ends):
        row = {**found._asdict(), "peak": peak_bytes(), "seconds": float(np.median(seconds))}
        seconds.clear()
        rows.append(row)
        print(
            f"| {row['end']:,} | {row['state_error']:.1e} | {row['output_error']:.1e} "
            f"| {row['peak'] / 1e6:,.0f} | {1e6 * row['seconds']:.2f} |",
            flush=True,
        )
    return rows


def main(argv: list[str] | None = None) -> None:
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
        f"{last['seconds'] / first['seconds']:.3f}"
    )


if __name__ == "__main__":
    main()
