"""The public functions: checks, defaults, padding, document numbers, choice of implementation.

Padding (segment 0) becomes exact zeros of q, k, v, g and beta, so a padded token neither decays nor
feeds the state and garbage there, NaN included, reaches nothing: here for ref and chunked, on the
chip for the kernels.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bounded_decay.chunked import bounded_decay_chunked
from pallas_kernels.bounded_decay.documents import number_documents
from pallas_kernels.bounded_decay.ref import (
    bounded_decay_ref,
    recurrent_step_ref,
    slot_attention_ref,
)
from pallas_kernels.bounded_decay.slot import slot_attention_chunked
from pallas_kernels.bounded_decay.tpu import bounded_decay_pallas, slot_attention_pallas
from pallas_kernels.platform import on_tpu

IMPLEMENTATIONS = ("ref", "chunked", "pallas")
G_MIN, G_TOLERANCE = -5.0, 1e-3
OPTIONAL = ("beta", "initial_state", "initial_state[0]", "initial_state[1]")


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
    [-5, 0]; the last only where g has values to look at: under jit a g below -5.5 is silently
    wrong, then NaN, and one above 0 grows without bound.

    Finite inputs are assumed outside padding: a NaN may reach other documents. With q in bf16 the
    kernels round k and v to bf16 too. 'pallas' has first derivatives only, 'chunked' no forward
    mode. XLA cannot split the kernels: on several devices call the op inside
    `jax.shard_map(..., check_vma=False)`.

    Error RMS over RMS against float64, 'chunked' and 'pallas' in f32: outputs 1e-5 and gradients
    1e-4, but 7e-5 for outputs where keys are nearly the same, nothing decays and beta is near 2,
    and 3e-4 for the gradient of g where every gate is at the bound. There gradients of o below
    1e-17 also underflow. bf16: 5e-3 and 2e-2 (6e-3 with beta up to 2 and slow decay).
    """
    op = "bounded_decay"
    implementation = _choose(op, implementation)
    B, T, H, K = _rank_4(op, "q", q)
    V = _rank_4(op, "v", v)[-1]
    _check(op, "q", q, (B, T, H, K))
    _check(op, "k", k, (B, T, H, K))
    _check(op, "v", v, (B, T, H, V))
    _check(op, "g", g, (B, T, H, K))
    _check(op, "beta", beta, (B, T, H))
    _check(op, "initial_state", initial_state, (B, H, K, V))
    _check_segment_ids(op, segment_ids, (B, T))
    _check_decay(op, g, segment_ids)
    _check_beta(op, beta, segment_ids)
    state = _state(initial_state, (B, H, K, V))
    scale = _check_scale(op, scale, K, implementation)
    if implementation == "pallas":
        document_BT = _marked_documents(segment_ids, (B, T))
        interpret = not on_tpu()
        return bounded_decay_pallas(
            q, k, v, g, beta, state, document_BT, scale, interpret=interpret
        )
    (q, k, v, g, beta), document_BT = _fold_padding((q, k, v, g, beta), segment_ids)
    run = bounded_decay_ref if implementation == "ref" else bounded_decay_chunked
    o, state = run(q, k, v, g, beta, state, document_BT, scale)
    return _only_real(o, segment_ids), state


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
    B, T, H, K = _rank_4(op, "q", q)
    V, M = _rank_4(op, "v", v)[-1], _rank_4(op, "s", s)[-1]
    if not (
        initial_state is None or (isinstance(initial_state, tuple) and len(initial_state) == 2)
    ):
        raise ValueError(f"{op}: initial_state must be a pair (key slots, value slots) or None")
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
    scale = _check_scale(op, scale, K, implementation)
    if implementation == "pallas":
        document_BT = _marked_documents(segment_ids, (B, T))
        o, states = slot_attention_pallas(
            q, k, v, s, g, states, document_BT, scale, interpret=not on_tpu()
        )
    else:
        (q, k, v, s, g), document_BT = _fold_padding((q, k, v, s, g), segment_ids)
        run = slot_attention_ref if implementation == "ref" else slot_attention_chunked
        o, states = run(q, k, v, s, g, states, document_BT, scale)
    return _only_real(o, segment_ids), states  # a zero query still averages the slots


def _only_real(o_BTHV: jax.Array, segment_ids_BT: jax.Array | None) -> jax.Array:
    """0 at padding, also to the gradient: what is done with o there, NaN included, is lost."""
    if segment_ids_BT is None:
        return o_BTHV
    return jnp.where((segment_ids_BT != 0)[:, :, None, None], o_BTHV, jnp.zeros_like(o_BTHV))


def _choose(op: str, implementation: str | None) -> str:
    if implementation not in (None, *IMPLEMENTATIONS):
        valid = ", ".join(map(repr, IMPLEMENTATIONS))
        raise ValueError(
            f"{op}: implementation={implementation!r} is unknown; valid choices: {valid}"
        )
    return implementation or ("pallas" if on_tpu() else "chunked")


def recurrent_step(
    state: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array | None = None,
    scale: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """One token of `bounded_decay`, for decoding: (o [B,H,V] in v's dtype, state [B,H,K,V] f32).

    state [B,H,K,V] f32; q, k, g [B,H,K] (g in [-5, 0], log decay); v [B,H,V]; beta [B,H], None for
    the additive rule; scale defaults to K**-0.5. Raises ValueError as bounded_decay does.
    """
    op = "recurrent_step"
    B, H, K = _shape(op, "q", q, "[B,H,width]")
    _shape(op, "v", v, "[B,H,width]")
    _check(op, "q", q, (B, H, K))
    _check(op, "k", k, (B, H, K))
    _check(op, "v", v, (B, H, v.shape[-1]))
    _check(op, "g", g, (B, H, K))
    _check(op, "beta", beta, (B, H))
    _check(op, "state", state, (B, H, K, v.shape[-1]))
    _check_decay(op, g, None)
    _check_beta(op, beta, None)
    scale = _check_scale(op, scale, K, "ref")
    return recurrent_step_ref(state, q, k, v, g, beta, scale)


def _rank_4(op: str, name: str, x: jax.Array) -> tuple[int, ...]:
    return _shape(op, name, x, "[B,T,H,width]")


def _shape(op: str, name: str, x: jax.Array, wanted: str) -> tuple[int, ...]:
    shape = getattr(x, "shape", None)
    if shape is None or len(shape) != wanted.count(",") + 1 or 0 in shape:
        raise ValueError(f"{op}: {name} {_found(x)}; expected {wanted}, none of them 0")
    return shape


def _found(x: Any) -> str:
    """What stands in an array's place, without the numbers in it."""
    shape = getattr(x, "shape", None)
    if shape is not None:
        return f"has shape {shape}"
    return "is missing" if x is None else f"is a {type(x).__name__}, not an array"


def _check(op: str, name: str, x: jax.Array | None, shape: tuple[int, ...]) -> None:
    if x is None and name in OPTIONAL:
        return
    if x is None or getattr(x, "shape", None) != shape:
        raise ValueError(f"{op}: {name} {_found(x)}; to go with q it must have shape {shape}")
    state = "state" in name
    allowed = (jnp.float32,) if state else (jnp.float32, jnp.bfloat16)
    if x.dtype not in allowed:
        wanted = "float32" if state else "float32 or bfloat16"
        raise ValueError(f"{op}: {name} is {x.dtype}; it must be {wanted}")


def _check_segment_ids(op: str, segment_ids: jax.Array | None, shape: tuple[int, ...]) -> None:
    if segment_ids is None:
        return
    if getattr(segment_ids, "shape", None) != shape:
        raise ValueError(f"{op}: segment_ids {_found(segment_ids)}; it must have shape {shape}")
    if segment_ids.dtype != jnp.int32:
        raise ValueError(f"{op}: segment_ids is {segment_ids.dtype}; it must be int32")


def _values(x: jax.Array, segment_ids: jax.Array | None) -> np.ndarray:
    """What x holds outside padding; nothing where it cannot be looked at, as inside a trace."""
    for array in (x, segment_ids):
        if isinstance(array, jax.core.Tracer) or not getattr(array, "is_fully_addressable", True):
            return np.zeros(0, np.float32)
    values = np.asarray(x, np.float32)
    return values if segment_ids is None else values[np.asarray(segment_ids) != 0]


def _check_decay(op: str, g: jax.Array, segment_ids: jax.Array | None) -> None:
    """Looks at the values of g where there are any here."""
    values = _values(g, segment_ids)
    if not values.size:
        return
    low, high = float(np.min(values)), float(np.max(values))  # NaN if there is one
    if not (low >= G_MIN - G_TOLERANCE and high <= G_TOLERANCE):
        where = "" if segment_ids is None else " outside padding"
        raise ValueError(
            f"{op}: g spans [{low:.6g}, {high:.6g}]{where}; a log decay must lie in "
            f"[{G_MIN}, 0], give or take {G_TOLERANCE} (bounded_log_decay makes one): below it a "
            "16-token tile overflows, above it the state grows without bound"
        )


def _check_beta(op: str, beta: jax.Array | None, segment_ids: jax.Array | None) -> None:
    """Like _check_decay: above 2 the delta rule's I - beta k k^T grows the state."""
    values = np.zeros(0) if beta is None else _values(beta, segment_ids)
    if values.size and not (values.min() >= -G_TOLERANCE and values.max() <= 2 + G_TOLERANCE):
        where = "" if segment_ids is None else " outside padding"
        raise ValueError(
            f"{op}: beta spans [{values.min():.6g}, {values.max():.6g}]{where}; it must lie in "
            "[0, 2]"
        )


def _check_scale(op: str, scale: Any, K: int, implementation: str) -> Any:
    if scale is None:
        return K**-0.5
    if getattr(scale, "shape", ()) != ():
        raise ValueError(f"{op}: scale has shape {scale.shape}; it must be one number")
    if isinstance(scale, jax.core.Tracer) and implementation != "pallas":
        return scale
    if isinstance(scale, jax.core.Tracer):
        raise ValueError(f"{op}: scale is traced; the kernels need a number known when compiling")
    number = isinstance(scale, int | float) or hasattr(scale, "shape")
    largest = float(np.finfo(np.float32).max)
    if isinstance(scale, bool) or not number or not abs(scale) <= largest:
        raise ValueError(f"{op}: scale={scale!r}; it must be a finite number, such as {K**-0.5}")
    return float(scale)


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
        # Zeros that are split over devices as the inputs are; XLA computes nothing of it.
        none_BT = jnp.isnan(jnp.sum(inputs[0], (2, 3))) & False
        return inputs, none_BT.astype(jnp.int32)
    real_BT = segment_ids_BT != 0

    def fold(x):
        real = real_BT.reshape(*real_BT.shape, *(1,) * (x.ndim - 2))
        return jnp.where(real, x, jnp.zeros_like(x))

    return jax.tree.map(fold, inputs), number_documents(segment_ids_BT)
