"""The definitions: bounded-decay recurrence and slot attention, token by token in f32.

Per head, state S [K,V], decay first, read after the write:

    S' = diag(exp g_t) S_{t-1}
    S_t = S' + k_t v_t^T                               additive
    S_t = S' + beta_t k_t (v_t - S'^T k_t)^T           delta: the update sees the decayed state
    o_t = scale * S_t^T q_t

op.py calls these with padding folded in (q = k = v = g = beta = 0 leaves the state alone and gives
o = 0) and with documents numbered; recurrent_step is public, for decoding.
"""

import functools

import jax
import jax.numpy as jnp

# Without HIGHEST a TPU or GPU rounds f32 operands to bf16 or tf32 inside a matmul.
einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def recurrent_step_ref(
    state: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array | None = None,
    scale: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """One token of the recurrence above; `op.recurrent_step` checks the arguments."""
    K = q.shape[-1]
    scale = K**-0.5 if scale is None else scale
    q_BHK, k_BHK, u_BHV, g_BHK = (x.astype(jnp.float32) for x in (q, k, v, g))
    S_BHKV = jnp.exp(g_BHK)[..., None] * state
    if beta is not None:
        old_BHV = einsum("BHKV,BHK->BHV", S_BHKV, k_BHK)
        u_BHV = beta.astype(jnp.float32)[..., None] * (u_BHV - old_BHV)
    S_BHKV = S_BHKV + k_BHK[..., None] * u_BHV[..., None, :]
    o_BHV = scale * einsum("BHKV,BHK->BHV", S_BHKV, q_BHK)
    return o_BHV.astype(v.dtype), S_BHKV


def slot_step(states, q, k, v, s, g, scale):
    """One token of slot attention; states (keys [B,H,M,K], values [B,H,M,V]) f32.

    Ks = exp(g) Ks + s k^T;  Vs = exp(g) Vs + s v^T;  o = Vs^T softmax_M(scale * Ks q).
    """
    k_slots_BHMK, v_slots_BHMV = states
    decay_BHM, s_BHM = jnp.exp(g.astype(jnp.float32)), s.astype(jnp.float32)

    def write(slots, x):
        new = s_BHM[..., None] * x.astype(jnp.float32)[..., None, :]
        return decay_BHM[..., None] * slots + new

    k_slots_BHMK, v_slots_BHMV = write(k_slots_BHMK, k), write(v_slots_BHMV, v)
    logits_BHM = scale * einsum("BHMK,BHK->BHM", k_slots_BHMK, q.astype(jnp.float32))
    o_BHV = einsum("BHMV,BHM->BHV", v_slots_BHMV, jax.nn.softmax(logits_BHM))
    return o_BHV.astype(v.dtype), (k_slots_BHMK, v_slots_BHMV)


def bounded_decay_ref(q, k, v, g, beta, initial_state, document, scale):
    """o [B,T,H,V] and the final state [B,H,K,V]; the arguments of chunked.bounded_decay_chunked."""

    def step(S, x):
        q, k, v, g, beta = x
        return recurrent_step_ref(S, q, k, v, g, beta, scale)

    return _scan_tokens(step, initial_state, (q, k, v, g, beta), document)


def slot_attention_ref(q, k, v, s, g, initial_state, document, scale):
    """o [B,T,H,V] and the final (key slots, value slots); the arguments of slot.py."""

    def step(states, x):
        q, k, v, s, g = x
        return slot_step(states, q, k, v, s, g, scale)

    return _scan_tokens(step, initial_state, (q, k, v, s, g), document)


def _scan_tokens(step, initial_state, inputs, document_BT):
    """Run step over time, with every state zeroed where the document number changes."""

    def body(carry, x):
        states, previous_B = carry
        token, document_B = x
        kept = (document_B == previous_B)[:, None, None, None]
        states = jax.tree.map(lambda S: jnp.where(kept, S, 0.0), states)
        o_BHV, states = step(states, token)
        return (states, document_B), o_BHV

    xs = jax.tree.map(lambda x: x.swapaxes(0, 1), (inputs, document_BT))
    carry = (initial_state, jnp.zeros_like(document_BT[:, 0]))
    (states, _), o_TBHV = jax.lax.scan(body, carry, xs)
    return o_TBHV.swapaxes(0, 1), states
