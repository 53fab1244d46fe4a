"""What the routed experts of one layer send between chips, read off the compiled program; no TPU.

    python -m experiments.traffic                          8k:2p8t over 64 chips, both transports
    python -m experiments.traffic --topology=v5p:2x2x2 --expert=8 --tokens=256 --transport=ragged

Bytes are those of the arrays that each collective makes, a token of the chip. For ragged-all-to-all
that is the buffer; what is sent of it depends on the routing: the rows printed at the end, counted
for uniform routing, times the bytes of a row. Prints temporaries too; 1 to 2 minutes at full size.
"""

import argparse
import math
from functools import partial
from typing import Any

import configs
from mlmoe.config import MoEConfig, TrainConfig, from_dict
from mlmoe.stop import run_program
from pallas_kernels import aot


def compiled(moe: MoEConfig, topology: str, shards: int, tokens: int, transport: str) -> Any:
    """The program of forward and backward of `expert_parallel_ffn`, `tokens` rows a chip."""
    import jax
    import jax.numpy as jnp

    from mlmoe.layers.expert_parallel import expert_parallel_ffn
    from mlmoe.sharding import EXPERT, make_mesh, per_shard, sharding
    from pallas_kernels.expert_dispatch.activations import parts

    mesh = make_mesh(aot.devices("v5p", topology), shards)
    N, A, E, R, F = mesh.size * tokens, moe.active, moe.experts, moe.latent, moe.hidden
    ffn = partial(
        expert_parallel_ffn,
        activation=moe.activation,
        axis=EXPERT,
        transport=transport,
        buffer=moe.buffer,
    )

    def gradient(experts_NA, dy_NR, z_NR, weights_NA, *matrices):  # type: ignore[no-untyped-def]
        def f(z_NR, weights_NA, *matrices):  # type: ignore[no-untyped-def]
            return per_shard(ffn, (z_NR, experts_NA, weights_NA), (), matrices)

        y_NR, pull, dropped = jax.vjp(f, z_NR, weights_NA, *matrices, has_aux=True)
        return y_NR, dropped, pull(dy_NR)

    def described(shape: tuple[int, ...], dtype: Any, axis: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding(mesh, axis))

    args = (
        described((N, A), jnp.int32, "batch"),
        described((N, R), jnp.bfloat16, "batch"),
        described((N, R), jnp.bfloat16, "batch"),
        described((N, A), jnp.float32, "batch"),
        described((E, parts(moe.activation), R, F), jnp.bfloat16, "expert"),
        described((E, F, R), jnp.bfloat16, "expert"),
    )
    with jax.set_mesh(mesh):
        return jax.jit(gradient).trace(*args).lower(lowering_platforms=("tpu",)).compile()


def rows_a_token(experts: int, active: int, shards: int) -> float:
    """Mean number of shards that hold one of `active` distinct experts, all equally likely."""
    none = math.comb(experts - experts // shards, active) / math.comb(experts, active)
    return shards * (1.0 - none)


def main(argv: list[str]) -> int:
    """One command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", default="8k:2p8t", help="STAGE:SCALE")
    parser.add_argument("--topology", default="v5p:4x4x4")
    parser.add_argument("--expert", type=int, default=64, help="chips that the experts lie on")
    parser.add_argument("--tokens", type=int, default=1024, help="a chip")
    parser.add_argument("--buffer", type=float, default=1.25, help="as model.moe.buffer")
    parser.add_argument("--transport", choices=["ragged", "gather"], default=None, help="not both")
    args = parser.parse_args(argv)
    c = configs.load(args.config)
    c.model.moe.buffer = args.buffer
    moe = from_dict(TrainConfig, c.to_dict()).model.moe
    for transport in [args.transport] if args.transport else ["ragged", "gather"]:
        program = compiled(moe, args.topology, args.expert, args.tokens, transport)
        print(
            f"{transport}: temporaries {program.memory_analysis().temp_size_in_bytes / 1e9:.2f} GB"
        )
        for made in aot.collectives(program.as_text()):
            shape = f"{made.dtype}[{','.join(map(str, made.shape))}]"
            print(f"  {made.name:20} {shape:24} {made.bytes / args.tokens:12,.0f} bytes a token")
    rows = rows_a_token(moe.experts, moe.active, args.expert)
    print(f"rows a token with uniform routing: {rows:.2f} of {moe.active} choices (counted)")
    return 0


if __name__ == "__main__":
    run_program(main, "before the end of the report")
