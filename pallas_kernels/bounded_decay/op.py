"""The public functions: checks, defaults, padding, document numbers, choice of implementation.

Padding (segment 0) is folded in once, here: its q, k, v, g and beta become exact zeros, so a padded
token neither decays nor feeds the state and garbage there, NaN included, reaches nothing.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.bounded_decay.chunked import bounded_decay_chunked
from pallas_kernels.bounded_decay.documents import number_documents
from pallas_kernels.bounded_decay.ref import bounded_decay_ref, slot_attention_ref
from pallas_kernels.bounded_decay.slot import slot_attention_chunked

IMPLEMENTATIONS = ("ref", "chunked")


def bounded_decay(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array | None = None,
    *,
    initial_state: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    scale: float | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Bounded-decay recurrence, per head, in f32:

        S' = diag(exp g_t) S_{t-1}
        S_t = S' + beta_t k_t (v_t - S'^T k_t)^T     (beta None: S' + k_t v_t^T)
        o_t = scale S_t^T q_t

    q, k [B,T,H,K] and v [B,T,H,V] bf16 or f32, k of unit length for the delta rule; g [B,T,H,K] log
    decay in nats, in [-5, 0] (see gate.py; below -5 a 16-token tile overflows); beta [B,T,H] in
    [0, 2], or None for the additive rule.
    segment_ids [B,T] int: a change of id starts a new document with a zero state; 0 is padding,
    where o is 0 and the state is left alone, so a document goes on after padding inside it.
    initial_state [B,H,K,V] f32 continues the first document of the row, also when padding comes
    first. scale defaults to K**-0.5.
    implementation: 'ref' (token by token) or 'chunked'; None is 'chunked'.

    Returns o [B,T,H,V] in v's dtype, and the f32 state [B,H,K,V] after the row's last real token
    (initial_state if it has none). Gradients flow to every float input through both.
    Raises ValueError on a wrong shape or unknown implementation, NotImplementedError on 'pallas'.
    """
    implementation = _choose("bounded_decay", implementation)
    B, T, H, K = _rank_4("bounded_decay", q)
    V = v.shape[-1]
    _check("bounded_decay", "k", k, (B, T, H, K))
    _check("bounded_decay", "v", v, (B, T, H, V))
    _check("bounded_decay", "g", g, (B, T, H, K))
    _check("bounded_decay", "beta", beta, (B, T, H))
    _check("bounded_decay", "initial_state", initial_state, (B, H, K, V))
    _check("bounded_decay", "segment_ids", segment_ids, (B, T))
    (q, k, v, g, beta), document_BT = _fold_padding((q, k, v, g, beta), segment_ids)
    state = _state(initial_state, (B, H, K, V))
    run = bounded_decay_ref if implementation == "ref" else bounded_decay_chunked
    return run(q, k, v, g, beta, state, document_BT, K**-0.5 if scale is None else scale)


def slot_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    s: jax.Array,
    g: jax.Array,
    *,
    initial_state: tuple[jax.Array, jax.Array] | None = None,
    segment_ids: jax.Array | None = None,
    scale: float | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Softmax read-out over M decaying slots, per head, in f32:

        Ks = exp(g_t) Ks + s_t k_t^T;  Vs = exp(g_t) Vs + s_t v_t^T
        o_t = Vs^T softmax_M(scale Ks q_t)

    q, k [B,T,H,K]; v [B,T,H,V]; s (write strength) and g (log decay in [-5, 0]) [B,T,H,M];
    initial_state (key slots [B,H,M,K], value slots [B,H,M,V]) f32, and the final state is such a
    pair. Slots not yet written score 0 and share in the softmax. The rest as in bounded_decay.
    """
    implementation = _choose("slot_attention", implementation)
    B, T, H, K = _rank_4("slot_attention", q)
    V, M = v.shape[-1], s.shape[-1]
    keys, values = (None, None) if initial_state is None else initial_state
    _check("slot_attention", "k", k, (B, T, H, K))
    _check("slot_attention", "v", v, (B, T, H, V))
    _check("slot_attention", "s", s, (B, T, H, M))
    _check("slot_attention", "g", g, (B, T, H, M))
    _check("slot_attention", "initial_state[0]", keys, (B, H, M, K))
    _check("slot_attention", "initial_state[1]", values, (B, H, M, V))
    _check("slot_attention", "segment_ids", segment_ids, (B, T))
    (q, k, v, s, g), document_BT = _fold_padding((q, k, v, s, g), segment_ids)
    states = _state(keys, (B, H, M, K)), _state(values, (B, H, M, V))
    run = slot_attention_ref if implementation == "ref" else slot_attention_chunked
    o, states = run(q, k, v, s, g, states, document_BT, K**-0.5 if scale is None else scale)
    if segment_ids is not None:  # a zero query still averages the slots
        o = jnp.where((segment_ids != 0)[:, :, None, None], o, jnp.zeros_like(o))
    return o, states


def _choose(op: str, implementation: str | None) -> str:
    if implementation == "pallas":
        raise NotImplementedError(
            f"{op}: implementation='pallas' is not written yet; valid choices: 'ref', 'chunked'"
        )
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(
            f"{op}: implementation={implementation!r} is unknown; valid choices: 'ref', 'chunked'"
        )
    return implementation or "chunked"


def _rank_4(op: str, q: jax.Array):
    if q.ndim != 4 or 0 in q.shape:
        raise ValueError(f"{op}: q has shape {q.shape}; expected [B,T,H,K], none of them 0")
    return q.shape


def _check(op: str, name: str, x: jax.Array | None, shape: tuple[int, ...]) -> None:
    if x is not None and x.shape != shape:
        raise ValueError(f"{op}: {name} has shape {x.shape}; to go with q it must be {shape}")


def _state(initial_state, shape):
    if initial_state is None:
        return jnp.zeros(shape, jnp.float32)
    return initial_state.astype(jnp.float32)


def _fold_padding(inputs, segment_ids_BT):
    """Zero the inputs at padding; number the documents 0, 1, ... along each row (int32 [B,T])."""
    if segment_ids_BT is None:
        return inputs, jnp.zeros(inputs[0].shape[:2], jnp.int32)
    real_BT = segment_ids_BT != 0

    def fold(x):
        real = real_BT.reshape(*real_BT.shape, *(1,) * (x.ndim - 2))
        return jnp.where(real, x, jnp.zeros_like(x))

    return jax.tree.map(fold, inputs), number_documents(segment_ids_BT)
