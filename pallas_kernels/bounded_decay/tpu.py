"""The recurrence on the TPU kernels: whole chunks and lanes, the kernels' layout, the gradient.

The kernels want arrays head-first. In a model XLA gives the projections that layout from the start
and the transposes here cost nothing; arrays that really lie in memory as [B, T, H, K] are copied.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.bounded_decay import kernel

CHUNK = 128  # tokens; fills the matrix unit's 128 x 128 with every product

# Heads a grid step works on at once: one head's waits are filled with another's work, until
# registers spill. Milliseconds by libtpu 0.0.42's schedule: v5p, B=1, T=8192, H=96, K=V=128, bf16
# (`python -m pallas_kernels.bench bounded_decay` with this number changed):
#     heads           4      8       16
#     forward         2.21   1.89    1.83
#     backward        2.69   2.61    2.44
#     bundles a step  6,135  11,886  22,233  (backward)
HEADS = 8  # at widths of 128 in bf16; fewer where a head takes more room
# Widths are padded to this: 64 lanes fill half a register, but padding them to 128 in HBM doubles
# the traffic (K=V=64, H=96, T=8192 on v5p: forward 7.2 against 4.0 ms, most of it XLA's copies).
LANES = 64
SLOTS = 128  # of slot attention, that make a head of their own


def bounded_decay_pallas(q, k, v, g, beta, initial_state, document, scale, *, interpret):
    """As bounded_decay_chunked, but document [B, T] is -1 - number at padding.

    Matmul operands are rounded to q's dtype (bf16: q, k, v with their decays applied, the state,
    scores, and their gradients), with f32 sums; all else is f32. Where near-identical keys that do
    not decay make large terms cancel, bf16 is not enough (128 such keys: 6e-3 of o, 6e-2 of the
    gradient of beta): the triangular inverse and what it is applied to, the running sums of g, and
    w are taken to 16 bits.
    """
    T, K, V = q.shape[1], q.shape[-1], v.shape[-1]
    inputs = tuple(_head_first(x.astype(q.dtype)) for x in (q, k, v))
    if beta is not None:
        beta = _pad(beta.astype(jnp.float32).swapaxes(1, 2)[:, :, None], 1, CHUNK)
        beta = beta.reshape(*beta.shape[:2], -1, 1, CHUNK)
    inputs = (*inputs, _head_first(g.astype(jnp.float32)), beta)
    plan = _plan(inputs, scale, interpret)
    o, S = _recurrence(inputs, _documents(document), _state_in(initial_state), plan)
    return _time_second(o, T, V).astype(v.dtype), _state_out(S, K, V)


def slot_attention_pallas(q, k, v, s, g, initial_state, document, scale, *, interpret):
    """As slot_attention_chunked, with document [B, T] as above; two passes of the recurrence.

    Slots do not mix before the softmax, so every 128 of them are a head of their own.
    """
    B, T, H, K = q.shape
    M, V = s.shape[-1], v.shape[-1]
    keys_BHMK, values_BHMV = initial_state
    blocks = -(-M // SLOTS)

    def by_block(x_BTHM):  # [B, T, H, M] -> [B, H blocks, T, 128]
        x_BTHM = jnp.pad(x_BTHM, ((0, 0), (0, 0), (0, 0), (0, blocks * SLOTS - M)))
        return _head_first(x_BTHM.reshape(B, T, H * blocks, SLOTS))

    def states_by_block(x_BHMV):  # [B, H, M, V] -> [B, H blocks, V, 128]
        x_BHMV = jnp.pad(x_BHMV, ((0, 0), (0, 0), (0, blocks * SLOTS - M), (0, 0)))
        return _state_in(x_BHMV.reshape(B, H * blocks, SLOTS, -1))

    def states_out(S, width):
        return _state_out(S, SLOTS, width).reshape(B, H, blocks * SLOTS, width)[:, :, :M]

    def repeat(x_BTHK):
        return _head_first(jnp.repeat(x_BTHK.astype(q.dtype), blocks, axis=2))

    s, g = by_block(s.astype(q.dtype)), by_block(g.astype(jnp.float32))
    q_blocks, k_blocks, v_blocks = repeat(q), repeat(k), repeat(v)
    plan, document = _plan((s, k_blocks, v_blocks), 1.0, interpret), _documents(document)
    states = states_by_block(keys_BHMK)
    scores, S_keys = _across(q_blocks, s, k_blocks, g, document, states, plan)
    scores = _time_second(scores, T, SLOTS).reshape(B, T, H, blocks * SLOTS)[..., :M]
    p_BTHM = jax.nn.softmax(scale * scores.astype(jnp.float32))
    inputs = (by_block(p_BTHM.astype(q.dtype)), s, v_blocks, g, None)
    o, S_values = _recurrence(inputs, document, states_by_block(values_BHMV), plan)
    o_BTHV = _time_second(o, T, V).reshape(B, T, H, blocks, V).astype(jnp.float32).sum(3)
    return o_BTHV.astype(v.dtype), (states_out(S_keys, K), states_out(S_values, V))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _once(run, *args):
    """What a first derivative runs, and says so when it is asked for a gradient of its own."""
    return run(*args)


def _no_second(*_):
    raise NotImplementedError(
        "bounded_decay: the kernels have first derivatives only; implementation='ref' and "
        "'chunked' have second ones"
    )


_once.defvjp(_no_second, _no_second)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _recurrence(inputs, document, state, plan):
    return kernel.forward(inputs, document, state, plan, save=False)[:2]


def _recurrence_forward(inputs, document, state, plan):
    run = functools.partial(kernel.forward, plan=plan, save=True)
    o, final, saved = _once(run, inputs, document, state)
    return (o, final), (inputs, document, saved)


def _recurrence_backward(plan, residuals, gradients):
    inputs, document, saved = residuals
    do, d_final = gradients
    run = functools.partial(kernel.backward, plan=plan)
    *d_inputs, d_state = _once(run, inputs, document, saved, do, d_final)
    return tuple(d_inputs), None, d_state


_recurrence.defvjp(_recurrence_forward, _recurrence_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _across(w, k, v, g, document, state, plan):
    """S_t w_t for every t, and the final state: the additive rule read out over the decaying side.

    The sum over t of o_t . w_t, o the ordinary read-out, is linear in q, and this is its gradient
    with respect to q. Hence the backward kernel computes it, and its own gradient takes both.
    """
    return _across_forward(w, k, v, g, document, state, plan)[0]


def _across_forward(w, k, v, g, document, state, plan):
    inputs = (k, k, v, g, None)  # any q will do
    forward = functools.partial(kernel.forward, plan=plan, save=True)
    _, final, saved = _once(forward, inputs, document, state)
    backward = functools.partial(kernel.backward, plan=plan)
    y = _once(backward, inputs, document, saved, w, jnp.zeros_like(state))[0]
    return (y, final), (w, k, v, g, document, state, saved)


def _across_backward(plan, residuals, gradients):
    w, k, v, g, document, state, saved = residuals
    dy, d_final = gradients
    inputs = (dy, k, v, g, None)
    dw = _once(functools.partial(kernel.forward, plan=plan, save=False), inputs, document, state)[0]
    backward = functools.partial(kernel.backward, plan=plan)
    _, dk, dv, dg, _, d_state = _once(backward, inputs, document, saved, w, d_final)
    return dw, dk, dv, dg, None, d_state


_across.defvjp(_across_forward, _across_backward)


def _plan(inputs, scale: float, interpret) -> kernel.Plan:
    heads, size = inputs[0].shape[1], inputs[0].dtype.itemsize
    width = max(x.shape[-1] for x in inputs[:3])
    most = max(1, HEADS * 128 * 2 // (max(128, width) * size))
    return kernel.Plan(
        scale=scale,
        chunk=CHUNK,
        heads=max(d for d in range(1, most + 1) if heads % d == 0),
        interpret=interpret,
    )


def _pad(x, rows: int, lanes: int):
    """Zeros up to multiples of `rows` and `lanes` in the last two axes."""
    rest = [(0, 0)] * (x.ndim - 2)
    return jnp.pad(x, [*rest, (0, -x.shape[-2] % rows), (0, -x.shape[-1] % lanes)])


def _head_first(x_BTHK):
    return _pad(x_BTHK.swapaxes(1, 2), CHUNK, LANES)


def _time_second(x_BHTK, T: int, K: int):
    return x_BHTK[:, :, :T, :K].swapaxes(1, 2)


def _state_in(S_BHKV):
    return _pad(S_BHKV.swapaxes(2, 3), LANES, LANES)


def _state_out(S_BHVK, K: int, V: int):
    return S_BHVK[:, :, :V, :K].swapaxes(2, 3)


def _documents(document_BT):
    """Rows (document, document before the chunk) of each chunk: int32 [B, N, 2, C].

    Tokens that fill up the last chunk count as padding of the row's last document.
    """
    B, T = document_BT.shape
    number_BT = jnp.where(document_BT < 0, -1 - document_BT, document_BT)
    fill_BT = jnp.broadcast_to(-1 - number_BT[:, -1:], (B, -T % CHUNK))
    document_BNC = jnp.concatenate([document_BT, fill_BT], 1).reshape(B, -1, CHUNK)
    last_BN1 = document_BNC[:, :-1, -1:]
    last_BN1 = jnp.where(last_BN1 < 0, -1 - last_BN1, last_BN1)
    before_BN1 = jnp.pad(last_BN1, ((0, 0), (1, 0), (0, 0)))
    before_BNC = jnp.broadcast_to(before_BN1, document_BNC.shape)
    return jnp.stack([document_BNC, before_BNC], 2).astype(jnp.int32)
