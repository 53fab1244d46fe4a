"""Parameters and memory of a config by arithmetic, before JAX is even imported.

`tests/mlmoe/test_count.py` holds these sums to the shapes that the model really declares.
"""

import math
from typing import NamedTuple

from mlmoe.config import ModelConfig, TrainConfig
from mlmoe.layout import LATENT

PROJECTIONS = {"capped": 2, "swiglu": 2, "four": 3}  # input matrices of a gated MLP


class Parameters(NamedTuple):
    """`active` are those a token meets: its experts only, and one row of the embedding."""

    total: int
    active: int


def _mixer(c: ModelConfig, letter: str, follows: bool) -> int:
    a, i, D = c.attention, c.incremental, c.d_model
    if letter == "F":
        return 4 * D * a.heads * a.head_dim
    if letter in LATENT:
        q = D * a.q_rank + a.q_rank + a.q_rank * a.heads * (a.nope_dim + a.rope_dim)
        kv = a.kv_rank * a.heads * (a.nope_dim + a.v_dim)
        kv += 0 if follows else D * (a.kv_rank + a.rope_dim) + a.kv_rank
        return q + kv + 2 * D * a.heads * a.v_dim
    H, K, V = i.heads, i.key_dim, i.value_dim
    width = i.slots if letter == "S" else K
    decay = D * i.gate_rank + i.gate_rank * H * width + H + H * width
    beta = D * H if letter == "D" else 0
    return 2 * D * H * K + 3 * D * H * V + i.conv_width * H * (2 * K + V) + V + decay + beta


def _channel(c: ModelConfig, dense: bool) -> Parameters:
    m, D, P = c.moe, c.d_model, PROJECTIONS[c.moe.activation] + 1
    if dense:
        return Parameters(*2 * (P * D * m.dense_hidden,))
    expert = P * m.latent * m.hidden
    around = D * m.experts + 2 * D * m.latent + m.latent + P * D * m.shared_hidden
    around += m.temperature_learned
    return Parameters(around + m.experts * expert, around + m.active * expert)


def _residual(c: ModelConfig) -> int:
    """Of one layer: two depth reads (w and gain each), or one projection for each window place."""
    return {"none": 0, "block": 4 * c.d_model, "window": c.residual.size * c.d_model**2}[
        c.residual.kind
    ]


def parameters(c: ModelConfig) -> Parameters:
    """Total and active parameters of a model."""
    table = c.vocab * c.d_model
    final = c.d_model * (3 if c.residual.kind == "block" else 1)
    total = final + table * (1 if c.tie_head else 2)
    active = final + table + c.d_model
    for n, letter in enumerate(c.letters):
        layer = _mixer(c, letter, c.follows[n]) + _residual(c) + 2 * c.d_model
        channel = _channel(c, n < c.moe.dense_layers)
        total, active = total + layer + channel.total, active + layer + channel.active
    return Parameters(total, active)


def cache_bytes(c: ModelConfig, tokens: int, width: int = 2) -> dict[str, int]:
    """Bytes that decoding keeps of one sequence of `tokens`, of `width` bytes a number.

    `latent` and `full` (keys and values of layers F) grow with the tokens; `state` does not: f32
    matrices of the incremental layers and the last inputs of their convolutions.
    """
    a, i = c.attention, c.incremental
    caches = sum(x in LATENT and not f for x, f in zip(c.letters, c.follows, strict=True))
    state = {"D": i.key_dim * i.value_dim, "S": i.slots * (i.key_dim + i.value_dim)}
    state["A"] = state["D"]
    conv = (i.conv_width - 1) * (2 * i.key_dim + i.value_dim)
    return {
        "latent": caches * tokens * (a.kv_rank + a.rope_dim) * width,
        "full": c.letters.count("F") * tokens * 2 * a.heads * a.head_dim * width,
        "state": sum(i.heads * (4 * state[x] + width * conv) for x in c.letters if x in state),
    }


def training_bytes(config: TrainConfig) -> int:
    """A lower bound of the memory a step needs over all devices.

    f32 parameters, gradients and optimizer moments (at least one a parameter), and the layer inputs
    and one chunk of logits of a micro-batch. What XLA needs on top is only known to its compiler.
    """
    c = config.model
    state = 4 * parameters(c).total * (3 if config.optim.name == "muon" else 4)
    tokens = math.ceil(config.batch / config.accumulate) * config.context
    logits = 2 * 4 * tokens * min(c.vocab, c.vocab_chunk)  # and their gradient
    return state + 4 * tokens * c.d_model * c.layers + logits
