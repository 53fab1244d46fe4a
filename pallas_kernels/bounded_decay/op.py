"""The public functions: checks, defaults, padding, document numbers, choice of implementation.

Padding (segment 0) becomes exact zeros of q, k, v, g and beta, so a padded token neither decays nor
feeds the state and garbage there, NaN included, reaches nothing: here for ref and chunked, on the
chip for the kernels.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.bounded_decay.chunked import bounded_decay_chunked
from pallas_kernels.bounded_decay.documents import number_documents
from pallas_kernels.bounded_decay.ref import bounded_decay_ref, slot_attention_ref
from pallas_kernels.bounded_decay.slot import slot_attention_chunked
from pallas_kernels.bounded_decay.tpu import bounded_decay_pallas, slot_attention_pallas
from pallas_kernels.platform import on_tpu

IMPLEMENTATIONS = ("ref", "chunked", "pallas")
G_MIN, G_TOLERANCE = -5.0, 1e-3


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
    implementation: 'ref' (token by token), 'chunked' (plain jnp) or 'pallas' (TPU kernels;
    elsewhere they are interpreted, slowly); None is 'pallas' on a TPU and 'chunked' elsewhere.

    Returns o [B,T,H,V] in v's dtype, and the f32 state [B,H,K,V] after the row's last real token
    (initial_state if it has none). Gradients flow to every float input through both.
    Raises ValueError on a wrong shape or dtype, an unknown implementation, and g outside
    [-5, 0]; the last only outside jit, where g has values to look at.
    """
    op = "bounded_decay"
    implementation = _choose(op, implementation)
    B, T, H, K = _rank_4(op, q)
    V = v.shape[-1]
    _check(op, "q", q, (B, T, H, K))
    _check(op, "k", k, (B, T, H, K))
    _check(op, "v", v, (B, T, H, V))
    _check(op, "g", g, (B, T, H, K))
    _check(op, "beta", beta, (B, T, H))
    _check(op, "initial_state", initial_state, (B, H, K, V))
    _check_segment_ids(op, segment_ids, (B, T))
    _check_decay(op, g, segment_ids)
    state = _state(initial_state, (B, H, K, V))
    scale = K**-0.5 if scale is None else scale
    if implementation == "pallas":
        document_BT = _marked_documents(segment_ids, (B, T))
        interpret = not on_tpu()
        return bounded_decay_pallas(
            q, k, v, g, beta, state, document_BT, scale, interpret=interpret
        )
    (q, k, v, g, beta), document_BT = _fold_padding((q, k, v, g, beta), segment_ids)
    run = bounded_decay_ref if implementation == "ref" else bounded_decay_chunked
    return run(q, k, v, g, beta, state, document_BT, scale)


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
    op = "slot_attention"
    implementation = _choose(op, implementation)
    B, T, H, K = _rank_4(op, q)
    V, M = v.shape[-1], s.shape[-1]
    keys, values = (None, None) if initial_state is None else initial_state
    _check(op, "q", q, (B, T, H, K))
    _check(op, "k", k, (B, T, H, K))
    _check(op, "v", v, (B, T, H, V))
    _check(op, "s", s, (B, T, H, M))
    _check(op, "g", g, (B, T, H, M))
    _check(op, "initial_state[0]", keys, (B, H, M, K))
    _check(op, "initial_state[1]", values, (B, H, M, V))
    _check_segment_ids(op, segment_ids, (B, T))
    _check_decay(op, g, segment_ids)
    states = _state(keys, (B, H, M, K)), _state(values, (B, H, M, V))
    scale = K**-0.5 if scale is None else scale
    if implementation == "pallas":
        document_BT = _marked_documents(segment_ids, (B, T))
        o, states = slot_attention_pallas(
            q, k, v, s, g, states, document_BT, scale, interpret=not on_tpu()
        )
    else:
        (q, k, v, s, g), document_BT = _fold_padding((q, k, v, s, g), segment_ids)
        run = slot_attention_ref if implementation == "ref" else slot_attention_chunked
        o, states = run(q, k, v, s, g, states, document_BT, scale)
    if segment_ids is not None:  # a zero query still averages the slots
        o = jnp.where((segment_ids != 0)[:, :, None, None], o, jnp.zeros_like(o))
    return o, states


def _choose(op: str, implementation: str | None) -> str:
    if implementation not in (None, *IMPLEMENTATIONS):
        valid = ", ".join(map(repr, IMPLEMENTATIONS))
        raise ValueError(
            f"{op}: implementation={implementation!r} is unknown; valid choices: {valid}"
        )
    return implementation or ("pallas" if on_tpu() else "chunked")


def _rank_4(op: str, q: jax.Array):
    if q.ndim != 4 or 0 in q.shape:
        raise ValueError(f"{op}: q has shape {q.shape}; expected [B,T,H,K], none of them 0")
    return q.shape


def _check(op: str, name: str, x: jax.Array | None, shape: tuple[int, ...]) -> None:
    if x is None:
        return
    if x.shape != shape:
        raise ValueError(f"{op}: {name} has shape {x.shape}; to go with q it must be {shape}")
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"{op}: {name} is {x.dtype}; it must be float32 or bfloat16")


def _check_segment_ids(op: str, segment_ids: jax.Array | None, shape: tuple[int, ...]) -> None:
    if segment_ids is None:
        return
    if segment_ids.shape != shape:
        raise ValueError(f"{op}: segment_ids has shape {segment_ids.shape}; it must be {shape}")
    if segment_ids.dtype != jnp.int32:
        raise ValueError(f"{op}: segment_ids is {segment_ids.dtype}; it must be int32")


def _check_decay(op: str, g: jax.Array, segment_ids: jax.Array | None) -> None:
    """Looks at the values of g where there are any: not under jit, grad or vmap."""
    if isinstance(g, jax.core.Tracer) or isinstance(segment_ids, jax.core.Tracer):
        return
    real = True if segment_ids is None else (segment_ids != 0)[:, :, None, None]
    outside = jnp.where(real, jnp.maximum(g, G_MIN - g), 0.0)  # NaN stays
    worst = float(jnp.max(outside.astype(jnp.float32)))
    if not worst <= G_TOLERANCE:
        low, high = float(jnp.min(g)), float(jnp.max(g))
        raise ValueError(
            f"{op}: g spans [{low:.6g}, {high:.6g}]; a log decay must lie in [{G_MIN}, 0] "
            "(bounded_log_decay makes one); below that a 16-token tile overflows"
        )


def _state(initial_state, shape):
    if initial_state is None:
        return jnp.zeros(shape, jnp.float32)
    return initial_state.astype(jnp.float32)


def _marked_documents(segment_ids, shape):
    """Document numbers [B, T], as -1 - number at padding."""
    if segment_ids is None:
        return jnp.zeros(shape, jnp.int32)
    number_BT = number_documents(segment_ids)
    return jnp.where(segment_ids != 0, number_BT, -1 - number_BT)


def _fold_padding(inputs, segment_ids_BT):
    """Zero the inputs at padding; number the documents 0, 1, ... along each row (int32 [B,T])."""
    if segment_ids_BT is None:
        return inputs, jnp.zeros(inputs[0].shape[:2], jnp.int32)
    real_BT = segment_ids_BT != 0

    def fold(x):
        real = real_BT.reshape(*real_BT.shape, *(1,) * (x.ndim - 2))
        return jnp.where(real, x, jnp.zeros_like(x))

    return jax.tree.map(fold, inputs), number_documents(segment_ids_BT)
