"""What `bench` measures of bounded_decay: head-first arrays, as a model's projections make them.

Implementations by the schedule: ours, `chunked` (all of it XLA, whose estimates for elementwise
work are several times too high) and, where tokamax >= 0.0.17 is installed, its kernel for the same
recurrence.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bounded_decay import bounded_decay, peer


class Shape(NamedTuple):
    B: int
    T: int
    H: int
    K: int
    V: int


DEFAULT = Shape(B=1, T=8192, H=96, K=128, V=128)


def refusal(shape: Shape) -> str:
    """Every shape is a case."""
    return ""


def compiled() -> list[str]:
    """Implementations to compile for a TPU."""
    return ["pallas", "chunked", *(["tokamax"] if peer.tokamax_found() else [])]


def timed(backend: str) -> list[str]:
    """Implementations that run well on `backend`; the others are compared with the first."""
    return ["ref", "chunked", *(["pallas"] if backend == "tpu" else [])]


def arguments(shape: Shape, dtype: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
    """(q, k, v, g, beta, do)."""
    B, T, H, K, V = shape
    s = jax.ShapeDtypeStruct
    q, v = s((B, H, T, K), dtype), s((B, H, T, V), dtype)
    return q, q, v, s(q.shape, jnp.float32), s((B, H, T), jnp.float32), v


def values(shape: Shape, dtype: Any) -> list[jax.Array]:
    """Something to run on: unit q and k, gates within their bound."""
    rng = np.random.default_rng(0)
    kinds = arguments(shape, dtype)
    q, k, v, g, beta, do = (rng.normal(size=a.shape) for a in kinds)
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    g, beta = -5 / (1 + np.exp(3 - g)), 1 / (1 + np.exp(-beta))
    pairs = zip((q, k, v, g, beta, do), kinds, strict=True)
    return [jnp.asarray(x, a.dtype) for x, a in pairs]


def forward_of(implementation: str) -> Callable[..., jax.Array]:
    """o from head-first (q, k, v, g, beta)."""
    if implementation == "tokamax":
        return peer.tokamax_forward

    def forward(*args: jax.Array) -> jax.Array:
        time_second = (x.swapaxes(1, 2) for x in args)
        o_BTHV, _ = bounded_decay(*time_second, implementation=implementation)
        return o_BTHV.swapaxes(1, 2)

    return forward


def function_of(implementation: str, which: str, shape: Shape | None = None) -> Callable[..., Any]:
    """(q, k, v, g, beta, do) -> o, or (o, all five gradients)."""
    forward = forward_of(implementation)
    if which == "forward":
        return lambda *args: forward(*args[:-1])

    def both(*args: jax.Array) -> Any:
        o, pull = jax.vjp(forward, *args[:-1])
        return o, pull(args[-1])

    return both


def visits(implementation: str, kernel: str, shape: Shape) -> int:
    """Every grid is known when it is compiled."""
    return 1


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
