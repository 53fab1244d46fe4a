"""The two Pallas TPU kernels: the recurrence forward, and its gradient.

Grid (batch, block of heads, chunk): the first two are split over a chip's cores, chunks run in
order (the gradient's from last to first) with the state in VMEM. All arrays are head-first,
[B, H, T, ...], T a multiple of the chunk; `tpu.py` sees to that.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.bounded_decay.kernel_chunk import Inputs, backward_chunk, forward_chunk
from pallas_kernels.bounded_decay.kernel_tiles import Masks


class Plan(NamedTuple):
    """What is fixed at compile time."""

    scale: float
    chunk: int
    heads: int  # that a grid step works on at once
    interpret: bool | pltpu.InterpretParams


class Saved(NamedTuple):
    """What the forward kernel keeps for the gradient, N chunks."""

    S_BHNVK: Any  # the state that entered each chunk, in the dtype of the inputs
    X_BHNCC: Any  # (I + A)^-1 in f32; None for the additive rule


def _forward(inputs, document, S_in, o, S_out, saved, state, *, plan: Plan, dtype):
    n = pl.program_id(2)

    @pl.when(n == 0)
    def _():
        state[...] = S_in[0]

    if saved is not None:
        saved.S_BHNVK[0, :, 0] = state[...].astype(dtype)
    masks = Masks.open(document[0, 0])
    x = Inputs.open(masks, *_chunk_of(inputs))
    o_HCV, S_HVK, X_HCC = forward_chunk(x, masks, state[...], plan.scale, dtype)
    o[0] = o_HCV.astype(o.dtype)
    state[...] = S_HVK
    if saved is not None and X_HCC is not None:
        saved.X_BHNCC[0, :, 0] = X_HCC

    @pl.when(n == pl.num_programs(2) - 1)
    def _():
        S_out[0] = state[...]


def _backward(inputs, document, saved, do, dS_out, *refs, plan: Plan, dtype):
    n = pl.program_id(2)
    dq, dk, dv, dg, dbeta, dS_in, dstate = refs

    @pl.when(n == 0)
    def _():
        dstate[...] = dS_out[0]

    masks = Masks.open(document[0, 0])
    x = Inputs.open(masks, *_chunk_of(inputs))
    S_HVK = saved.S_BHNVK[0, :, 0]
    X_HCC = None if saved.X_BHNCC is None else saved.X_BHNCC[0, :, 0]
    new = backward_chunk(x, masks, S_HVK, X_HCC, do[0], dstate[...], plan.scale, dtype)
    for ref, value in ((dq, new.q_HCK), (dk, new.k_HCK), (dv, new.v_HCV), (dg, new.g_HCK)):
        ref[0] = value.astype(ref.dtype)
    if dbeta is not None:
        dbeta[0, :, 0] = new.beta_H1C
    dstate[...] = new.S_HVK

    @pl.when(n == pl.num_programs(2) - 1)
    def _():
        dS_in[0] = dstate[...]


def _chunk_of(inputs):
    q, k, v, g, beta = inputs
    return q[0], k[0], v[0], g[0], None if beta is None else beta[0, :, 0]


class _Blocks:
    """Block specs for a grid whose last axis runs over the chunks, backwards if `reverse`."""

    def __init__(self, plan: Plan, chunks: int, reverse: bool):
        self.heads, self.C = plan.heads, plan.chunk
        self.chunk = (lambda n: chunks - 1 - n) if reverse else (lambda n: n)

    def tokens(self, width: int) -> pl.BlockSpec:  # of [B, H, T, width]
        index = lambda b, h, n: (b, h, self.chunk(n), 0)  # noqa: E731
        return pl.BlockSpec((1, self.heads, self.C, width), index)

    def chunks(self, *shape: int) -> pl.BlockSpec:  # of [B, H, N, *shape]
        index = lambda b, h, n: (b, h, self.chunk(n), 0, 0)  # noqa: E731
        return pl.BlockSpec((1, self.heads, 1, *shape), index)

    def state(self, V: int, K: int) -> pl.BlockSpec:  # of [B, H, V, K]
        return pl.BlockSpec((1, self.heads, V, K), lambda b, h, n: (b, h, 0, 0))

    def documents(self) -> pl.BlockSpec:  # of [B, N, 2, C]
        return pl.BlockSpec((1, 1, 2, self.C), lambda b, h, n: (b, self.chunk(n), 0, 0))

    def inputs(self, K: int, V: int, delta: bool):
        beta = self.chunks(1, self.C) if delta else None
        return (self.tokens(K), self.tokens(K), self.tokens(V), self.tokens(K), beta)

    def saved(self, K: int, V: int, delta: bool) -> Saved:
        return Saved(self.chunks(V, K), self.chunks(self.C, self.C) if delta else None)


def _params(plan: Plan) -> pltpu.CompilerParams:
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", "parallel", "arbitrary"),
        vmem_limit_bytes=60 << 20,  # of a core's 64 MiB on v5p (v6e: 128); the default is 16
    )


def forward(inputs, document_BN2C, S_BHVK, plan: Plan, *, save: bool):
    """(o [B,H,T,V], final state [B,H,V,K] f32, Saved if `save` else None).

    inputs: q, k [B,H,T,K], v [B,H,T,V], g f32, beta [B,H,N,1,C] f32 or None; document_BN2C as
    `Masks.open` takes it.
    """
    q, _, v, _, beta = inputs
    B, H, T, K = q.shape
    V, C, N, dtype = v.shape[-1], plan.chunk, T // plan.chunk, q.dtype
    block, delta = _Blocks(plan, N, reverse=False), beta is not None
    shape = jax.ShapeDtypeStruct
    saved = Saved(
        shape((B, H, N, V, K), dtype), shape((B, H, N, C, C), jnp.float32) if delta else None
    )
    return pl.pallas_call(
        functools.partial(_forward, plan=plan, dtype=dtype),
        grid=(B, H // plan.heads, N),
        in_specs=(block.inputs(K, V, delta), block.documents(), block.state(V, K)),
        out_specs=(block.tokens(V), block.state(V, K), block.saved(K, V, delta) if save else None),
        out_shape=(
            shape((B, H, T, V), v.dtype),
            shape((B, H, V, K), jnp.float32),
            saved if save else None,
        ),
        scratch_shapes=[pltpu.VMEM((plan.heads, V, K), jnp.float32)],
        compiler_params=_params(plan),
        interpret=plan.interpret,
        name="bounded_decay_forward",
    )(inputs, document_BN2C, S_BHVK)


def backward(inputs, document_BN2C, saved: Saved, do_BHTV, dS_BHVK, plan: Plan):
    """Gradients (q, k, v, g, beta or None, initial state), laid out as in `forward`."""
    q, _, v, _, beta = inputs
    B, H, T, K = q.shape
    V, N, dtype = v.shape[-1], T // plan.chunk, q.dtype
    block = _Blocks(plan, N, reverse=True)
    specs = block.inputs(K, V, beta is not None)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (*inputs, dS_BHVK))
    return pl.pallas_call(
        functools.partial(_backward, plan=plan, dtype=dtype),
        grid=(B, H // plan.heads, N),
        in_specs=(
            specs,
            block.documents(),
            block.saved(K, V, beta is not None),
            block.tokens(V),
            block.state(V, K),
        ),
        out_specs=(*specs, block.state(V, K)),
        out_shape=shapes,
        scratch_shapes=[pltpu.VMEM((plan.heads, V, K), jnp.float32)],
        compiler_params=_params(plan),
        interpret=plan.interpret,
        name="bounded_decay_backward",
    )(inputs, document_BN2C, saved, do_BHTV, dS_BHVK)
