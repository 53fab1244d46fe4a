"""What `bench` measures of expert_dispatch: one chip's share of the routed experts of a layer.

The default is 16,384 rows on 14 of 896 experts at full scale: under expert parallelism each
(token, expert) pair arrives as a row of its own, so A = 1. P = 3 is the activation `four`, P = 2
`capped`. How many steps a kernel takes depends on the routing; the schedule is counted for experts
with equally many rows. Beside ours: `sorted` on XLA's own ragged_dot, on jax's megablox, and on
tokamax where it is installed.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.expert_dispatch import blocks, expert_ffn, peers
from pallas_kernels.expert_dispatch.sorted import expert_ffn as expert_ffn_sorted


class Shape(NamedTuple):
    N: int
    A: int
    E: int
    R: int
    F: int
    P: int


DEFAULT = Shape(N=16384, A=1, E=14, R=3584, F=3072, P=3)
ACTIVATIONS = {2: "capped", 3: "four"}
XLA_ROWS = 128  # of a tile of XLA's ragged_dot: its step multiplies 128 x K x 384


def refusal(shape: Shape) -> str:
    """Why there is no such case; '' where there is."""
    if shape.P not in ACTIVATIONS:
        return f"P is {shape.P}, must be 3 (activation 'four') or 2 ('capped')"
    return f"A is {shape.A}, at most E = {shape.E}" if shape.A > shape.E else ""


def compiled() -> list[str]:
    """Implementations to compile for a TPU."""
    return ["pallas", "megablox", "sorted", *(["tokamax"] if peers.tokamax_found() else [])]


def timed(backend: str) -> list[str]:
    """Implementations that run well on `backend`; the others are compared with the first."""
    return ["ref", "sorted", *(["pallas", "megablox"] if backend == "tpu" else [])]


def arguments(shape: Shape, dtype: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
    """(x, weights, w_in, w_out, experts, dy)."""
    N, A, E, R, F, P = shape
    s = jax.ShapeDtypeStruct
    x, weights, experts = s((N, R), dtype), s((N, A), jnp.float32), s((N, A), jnp.int32)
    return x, weights, s((E, P, R, F), dtype), s((E, F, R), dtype), experts, x


def values(shape: Shape, dtype: Any) -> list[jax.Array]:
    """Something to run on: distinct experts for each token, all equally popular."""
    rng = np.random.default_rng(0)
    kinds = arguments(shape, dtype)
    experts_NA = rng.random((shape.N, shape.E)).argsort(axis=1)[:, : shape.A]
    normal = [jnp.asarray(rng.normal(size=a.shape) / a.shape[-1] ** 0.5, a.dtype) for a in kinds]
    return [*normal[:4], jnp.asarray(experts_NA, jnp.int32), normal[5]]


def function_of(implementation: Any, which: str, shape: Shape) -> Callable[..., Any]:
    """(x, weights, w_in, w_out, experts, dy) -> y, or (y, all four gradients)."""
    activation = ACTIVATIONS[shape.P]
    products = {"megablox": peers.Megablox, "tokamax": peers.Tokamax}.get(implementation)

    def forward(*args: jax.Array) -> jax.Array:
        x, weights, w_in, w_out, experts = args
        if products:
            return expert_ffn_sorted(x, experts, weights, w_in, w_out, activation, products)
        args = x, experts, weights, w_in, w_out
        return expert_ffn(*args, activation=activation, implementation=implementation)

    def both(*args: jax.Array) -> Any:
        *floats, experts, dy = args
        y, pull = jax.vjp(lambda *floats: forward(*floats, experts), *floats)
        return y, pull(dy)

    return both if which == "forward+backward" else lambda *args: forward(*args[:-1])


def visits(implementation: str, kernel: str, shape: Shape) -> int:
    """Tiles of rows that `kernel` works on, if all experts have equally many rows."""
    pairs, E = shape.N * shape.A, shape.E
    stop_E = np.arange(1, E + 1) * pairs // E
    start_E = np.concatenate([[0], stop_E[:-1]])
    if implementation == "pallas":
        tm = blocks.tile_rows(pairs, E, jnp.bfloat16)
        return int(np.sum(-(-(stop_E - start_E) // tm)))
    tm = {"megablox": peers.Megablox.GMM_ROWS, "tokamax": peers.Tokamax.ROWS}.get(
        implementation, XLA_ROWS
    )
    if implementation == "megablox" and "tgmm" in kernel:
        tm = peers.Megablox.TGMM_ROWS
    # In one dense order a tile on a border is worked on for each of its experts.
    tiles = int(np.sum(-(-stop_E // tm) - start_E // tm))
    if implementation == "tokamax":  # all of its loops are one, on one core
        tiles *= -(-shape.R // peers.Tokamax.WIDTH) * -(-shape.F // peers.Tokamax.WIDTH)
    return tiles


def least_bytes(shape: Shape, which: str, dtype: Any) -> int:
    """Every input read once and every output written once."""
    *floats, experts, dy = (a.size * a.dtype.itemsize for a in arguments(shape, dtype))
    forward = sum(floats) + experts + dy  # y has the size of dy
    return forward if which == "forward" else forward + sum(floats) + dy


def least_flops(shape: Shape, which: str) -> float:
    """P + 1 products a pair; the gradient takes two for each. Computing z again does not count."""
    N, A, _, R, F, P = shape
    return 2 * N * A * R * F * (P + 1) * (1 if which == "forward" else 3)
