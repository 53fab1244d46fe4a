"""The public op: checks the arguments and picks the implementation."""

from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_kernels.expert_dispatch import ref, tpu
from pallas_kernels.expert_dispatch import sorted as sorted_rows
from pallas_kernels.expert_dispatch.activations import parts
from pallas_kernels.platform import on_tpu

Implementation = Literal["ref", "sorted", "pallas"]


def expert_ffn(
    x_NR: jax.Array,
    experts_NA: jax.Array,
    weights_NA: jax.Array,
    w_in_EPRF: jax.Array,
    w_out_EFR: jax.Array,
    *,
    activation: str,
    implementation: Implementation | None = None,
) -> jax.Array:
    """y_n = sum_a weights_na glu(w_in_e x_n) w_out_e with e = experts_na.

    The combination is f32, whatever the dtype; no capacity, no dropped token, no state. Gradients
    flow to x, weights, w_in and w_out. Shapes are static; every choice of experts costs the same.

    Args:
      x_NR: one row a token, f32 or bf16.
      experts_NA: int32, the A experts of each token; an index outside 0 .. E-1 (by convention -1)
        means no expert. A row without any, which is padding, gives exactly 0 and gradient 0, and
        may hold NaN in x and in its weights.
      weights_NA: float, the weight of each choice; f32 is kept as f32.
      w_in_EPRF: P input matrices an expert, ordered as in `activations.glu`; dtype of x.
      w_out_EFR: the output matrix of each expert; dtype of x.
      activation: `four` (P = 3), `capped` or `swiglu` (P = 2).
      implementation: `ref` (all experts on all tokens), `sorted` (plain jnp) or `pallas` (TPU
        kernels; elsewhere they are interpreted, slowly; inside shard_map only with
        check_vma=False); None is `pallas` on a TPU and `sorted` elsewhere.

    Returns:
      y_NR in the dtype of x.

    Raises:
      ValueError: shapes, dtypes or names that do not fit; widths too large for `pallas`.
    """
    _check(x_NR, experts_NA, weights_NA, w_in_EPRF, w_out_EFR, activation)
    args: tuple[Any, ...] = (x_NR, experts_NA, weights_NA, w_in_EPRF, w_out_EFR)
    args = (*map(jnp.asarray, args), activation)
    if implementation is None:
        implementation = "pallas" if on_tpu() else "sorted"
    match implementation:
        case "sorted":
            return sorted_rows.expert_ffn(*args)
        case "ref":
            return ref.expert_ffn(*args)
        case "pallas":
            return tpu.expert_ffn(*args, interpret=not on_tpu())
    raise ValueError(
        f"implementation is {implementation!r}; the choices are 'ref', 'sorted' and 'pallas'"
    )


def _check(x_NR, experts_NA, weights_NA, w_in_EPRF, w_out_EFR, activation) -> None:
    """ValueError unless the arguments fit together, naming the one that does not."""
    arrays = (x_NR, experts_NA, weights_NA, w_in_EPRF, w_out_EFR)
    ranks = {"x": 2, "experts": 2, "weights": 2, "w_in": 4, "w_out": 3}
    for (name, rank), array in zip(ranks.items(), arrays, strict=True):
        if not hasattr(array, "ndim"):
            raise ValueError(f"{name} is a {type(array).__name__}, expected an array")
        if array.ndim != rank:
            raise ValueError(f"{name} must have rank {rank}, got shape {array.shape}")
    (N, R), A, (E, P, _, F) = x_NR.shape, experts_NA.shape[1], w_in_EPRF.shape
    if parts(activation) != P:
        raise ValueError(
            f"activation {activation!r} needs {parts(activation)} projections, "
            f"w_in {w_in_EPRF.shape} has {P} (axis 1)"
        )
    shapes = {
        "experts": (experts_NA, (N, A)),
        "weights": (weights_NA, (N, A)),
        "w_in": (w_in_EPRF, (E, P, R, F)),
        "w_out": (w_out_EFR, (E, F, R)),
    }
    for name, (array, shape) in shapes.items():
        if array.shape != shape:
            raise ValueError(
                f"{name} has shape {array.shape}, expected {shape} "
                f"from x {x_NR.shape}, experts {experts_NA.shape} and w_in {w_in_EPRF.shape}"
            )
    if min(N, A, E, R, F) == 0:
        raise ValueError(f"no size may be 0: N, A, E, R, F are {(N, A, E, R, F)}")
    _check_dtypes(x_NR, experts_NA, weights_NA, w_in_EPRF, w_out_EFR)


def _check_dtypes(x_NR, experts_NA, weights_NA, w_in_EPRF, w_out_EFR) -> None:
    if x_NR.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"x is {x_NR.dtype}, expected float32 or bfloat16")
    for name, array in {"w_in": w_in_EPRF, "w_out": w_out_EFR}.items():
        if array.dtype != x_NR.dtype:
            raise ValueError(f"{name} is {array.dtype}, expected the dtype of x, {x_NR.dtype}")
    if experts_NA.dtype != jnp.int32:
        raise ValueError(f"experts is {experts_NA.dtype}, expected int32")
    if not jnp.issubdtype(weights_NA.dtype, jnp.floating):
        raise ValueError(f"weights is {weights_NA.dtype}, expected a float dtype")
