"""An attention layer's weights as the first ones of an incremental layer.

Scores keep their bilinear form: with q = x W_q and k = x W_k of one head, q . k = x (W_q W_k^T) x.
A head whose keys are wider than the incremental layer's gets the best approximation of W_q W_k^T of
the smaller rank, from its singular values; a narrower one keeps fresh columns beside its own.
Values, output gate and output projection are carried. A latent layer's low-rank projections are
multiplied out first; what its norms divide by depends on the token and is left out. The incremental
layer normalises q and k itself, so only their directions count; they get the size of fresh ones.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from mlmoe.config import ModelConfig

_SCORES = "the best approximation of its scores q . k"
_LATENT = {
    "w_q": _SCORES,
    "w_k": _SCORES,
    "w_v": "its low-rank projections multiplied out",
    "w_gate": "as it is",
    "w_o": "as it is",
}
# What of an incremental layer comes from the attention layer before it, by letter, and how.
CONVERTED = {
    "F": {"w_q": _SCORES, "w_k": _SCORES, "w_v": "as it is", "w_o": "as it is"},
    **dict.fromkeys("LRB", _LATENT),
}


def attention_to_incremental(
    old: ModelConfig,
    new: ModelConfig,
    layer: int,
    source: Mapping[str, Any],
    made: Mapping[str, Any],
) -> dict[str, Any]:
    """The converted tensors of one layer by name; `made` are the fresh ones of the new model."""
    at = f"layer {layer}/mixer/"
    if old.letters[layer] == "F":
        q, k, v = (source[f"{at}{n}"] for n in ("w_q", "w_k", "w_v"))
        kept = ["w_o"]
    else:
        q, k, v = _multiplied_out(old, layer, source)
        kept = ["w_gate", "w_o"]
    fresh_q, fresh_k = made[f"{at}w_q"], made[f"{at}w_k"]
    q, k = _to_width(q, k, fresh_q.shape[-1])
    out = {"w_q": _like(q, fresh_q), "w_k": _like(k, fresh_k), "w_v": v}
    return {f"{at}{n}": x for n, x in out.items()} | {f"{at}{n}": source[f"{at}{n}"] for n in kept}


def _multiplied_out(
    old: ModelConfig, layer: int, source: Mapping[str, Any]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Full projections W_q, W_k [D, H, N+P] and W_v [D, H, V] of a latent layer."""
    a, at = old.attention, f"layer {layer}/mixer/"
    leader = max(n for n in range(layer + 1) if f"layer {n}/mixer/w_dkv" in source)
    w_dkv, gain_R = (source[f"layer {leader}/mixer/{n}"] for n in ("w_dkv", "kv_norm/gain"))
    q_gain_Q, w_uq = source[f"{at}q_norm/gain"], source[f"{at}w_uq"]
    w_q = jnp.einsum("DQ,Q,QHK->DHK", source[f"{at}w_dq"], q_gain_Q, w_uq)
    w_kv = jnp.einsum("DR,R,RHK->DHK", w_dkv[:, : a.kv_rank], gain_R, source[f"{at}w_ukv"])
    w_k, w_v = jnp.split(w_kv, [a.nope_dim], axis=-1)
    shared_DHP = jnp.broadcast_to(
        w_dkv[:, None, a.kv_rank :], (*w_k.shape[:2], w_dkv.shape[1] - a.kv_rank)
    )
    return w_q, jnp.concatenate([w_k, shared_DHP], axis=-1), w_v


def _to_width(q_DHK: jax.Array, k_DHK: jax.Array, width: int) -> tuple[jax.Array, jax.Array]:
    """q and k with at most `width` columns a head and nearly the same q k^T.

    W_q W_k^T = Q_q (R_q R_k^T) Q_k^T, so its singular vectors are those of a K x K matrix.
    """
    if q_DHK.shape[-1] <= width:
        return q_DHK, k_DHK
    qs, rs = zip(*(jnp.linalg.qr(jnp.moveaxis(x, 1, 0)) for x in (q_DHK, k_DHK)), strict=True)
    u_HKK, s_HK, vt_HKK = jnp.linalg.svd(jnp.einsum("HIK,HJK->HIJ", *rs))
    root_HK = jnp.sqrt(s_HK[:, :width])
    q = jnp.einsum("HDI,HIK,HK->DHK", qs[0], u_HKK[..., :width], root_HK)
    k = jnp.einsum("HDI,HKI,HK->DHK", qs[1], vt_HKK[:, :width], root_HK)
    return q, k


def _like(x_DHK: jax.Array, fresh_DHK: jax.Array) -> jax.Array:
    """x at the size of fresh weights, head by head, with fresh columns where x has none."""
    size = lambda w: jnp.sqrt(jnp.mean(jnp.square(w), axis=(0, 2), keepdims=True))  # noqa: E731
    x_DHK = x_DHK * size(fresh_DHK) / jnp.maximum(size(x_DHK), 1e-20)
    return jnp.concatenate([x_DHK, fresh_DHK[..., x_DHK.shape[-1] :]], axis=-1)
