"""Latent attention against its float64 reference, and what packed softmax attention must do."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import configs
from mlmoe.config import AttentionConfig, ModelConfig, from_dict
from mlmoe.layers import attention
from mlmoe.layers.attention import FullAttention, LatentAttention, attend
from tests.golden import load


def model_config(**changes: object) -> ModelConfig:
    c = configs.load("8k:tiny").model
    c.update(changes)
    return from_dict(ModelConfig, c.to_dict())


@pytest.mark.parametrize("letter", ["L", "R"])
def test_latent_attention_meets_the_reference(letter: str) -> None:
    ref = load("gated_mla")
    H, N, P, V = (int(ref[n]) for n in ("heads", "nope", "rope", "v"))
    D, Q = ref["w_dq"].shape
    R = ref["kv_norm"].shape[0]
    a = AttentionConfig(H, 2, Q, R, N, P, V, float(ref["theta"]), 1)
    config = model_config(d_model=D)
    config = ModelConfig(**{**vars(config), "attention": a, "d_model": D})
    params = {
        "w_dq": ref["w_dq"],
        "w_uq": ref["w_uq"].reshape(Q, H, N + P),
        "w_dkv": ref["w_dkv"],
        "w_ukv": ref["w_ukv"].reshape(R, H, N + V),
        "w_gate": ref["w_gate"].reshape(D, H, V),
        "w_o": ref["w_o"].reshape(H, V, D),
        "q_norm": {"gain": ref["q_norm"]},
        "kv_norm": {"gain": ref["kv_norm"]},
    }
    x_BTD = ref["x"][None]
    T = x_BTD.shape[1]
    module = LatentAttention(config, jnp.dtype("float32"), letter)
    inputs = (x_BTD, jnp.ones((1, T), int), jnp.arange(T)[None])
    y_BTD, latent = module.apply({"params": params}, *inputs)
    want = ref["y_rope" if letter == "R" else "y_nope"]
    assert relative_rms(y_BTD[0], want) < 1e-5
    followers = {k: v for k, v in params.items() if k not in ("w_dkv", "kv_norm")}
    shared, _ = module.apply({"params": followers}, *inputs, latent)
    np.testing.assert_array_equal(shared, y_BTD)  # its own latent, handed to it


def relative_rms(x: jax.Array, want: np.ndarray) -> float:
    return float(np.sqrt(np.mean((np.asarray(x) - want) ** 2) / np.mean(want**2)))


def qkv(T: int, seed: int = 0) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(seed), 3)
    return tuple(jax.random.normal(k, (2, T, 2, 4)) for k in keys)


@pytest.mark.parametrize("T", [1, 15, 63])
def test_attend_is_softmax_over_earlier_tokens_of_the_document(T: int) -> None:
    q, k, v = qkv(T)
    document_BT = jnp.stack([jnp.ones(T, int), 1 + (jnp.arange(T) >= T // 3)])
    o = attend(q, k, v, document_BT)
    for b in range(2):
        for t in range(T):
            seen = [s for s in range(t + 1) if document_BT[b, s] == document_BT[b, t]]
            seen = np.array(seen)
            score_SH = np.einsum("HK,SHK->SH", q[b, t], k[b][seen]) / 2.0
            p_SH = np.exp(score_SH) / np.exp(score_SH).sum(0)
            want = np.einsum("SH,SHK->HK", p_SH, v[b][seen])
            np.testing.assert_allclose(o[b, t], want, rtol=1e-4, atol=1e-5)


def test_alibi_takes_a_slope_times_the_distance() -> None:
    """Within the document, whatever its place in the row."""
    q, k, v = qkv(31)
    document_BT = jnp.stack([jnp.ones(31, int), 1 + (jnp.arange(31) >= 11)])
    slope_H = attention.alibi_slopes(2)
    np.testing.assert_allclose(slope_H, [2.0**-4, 2.0**-8])
    o = attend(q, k, v, document_BT, slope_H)
    for b, t, first in ((0, 30, 0), (1, 10, 0), (1, 25, 11)):
        far_SH = (t - np.arange(first, t + 1))[:, None] * np.asarray(slope_H)[None]
        score_SH = np.einsum("HK,SHK->SH", q[b, t], k[b, first : t + 1]) / 2.0 - far_SH
        p_SH = np.exp(score_SH) / np.exp(score_SH).sum(0)
        want = np.einsum("SH,SHK->HK", p_SH, v[b, first : t + 1])
        np.testing.assert_allclose(o[b, t], want, rtol=1e-4, atol=1e-5)


def test_blocks_of_queries_and_keys_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv(70)
    document_BT = jnp.stack([jnp.ones(70, int), jnp.where(jnp.arange(70) < 60, 3, 0)])

    def loss(q, k, v):  # type: ignore[no-untyped-def]
        return jnp.sum(jnp.sin(attend(q, k, v, document_BT, attention.alibi_slopes(2))))

    whole = jax.value_and_grad(loss, (0, 1, 2))(q, k, v)
    monkeypatch.setattr(attention, "QUERY_BLOCK", 16)
    for most in (10**6, 16):  # keys all at once, and in blocks that do not divide them
        monkeypatch.setattr(attention, "KEYS_AT_ONCE", most)
        monkeypatch.setattr(attention, "KEY_BLOCK", 24)
        chex.assert_trees_all_close(
            jax.value_and_grad(loss, (0, 1, 2))(q, k, v), whole, rtol=2e-5, atol=1e-6
        )


def test_padding_gives_zero_and_gets_no_gradient() -> None:
    q, k, v = qkv(9)
    document_BT = jnp.stack([jnp.zeros(9, int), jnp.where(jnp.arange(9) < 5, 1, 0)])
    np.testing.assert_array_equal(attend(q, k, v, document_BT)[0], 0.0)
    np.testing.assert_array_equal(attend(q, k, v, document_BT)[1, 5:], 0.0)
    dk, dv = jax.grad(lambda k, v: jnp.sum(attend(q, k, v, document_BT)), (0, 1))(k, v)
    np.testing.assert_array_equal(dk[0], 0.0)
    np.testing.assert_array_equal(dv[1, 5:], 0.0)


@pytest.mark.parametrize("kind", ["F", "R"])
def test_rope_depends_on_distance_alone(kind: str) -> None:
    config = model_config()
    f32 = jnp.dtype("float32")
    module = FullAttention(config, f32) if kind == "F" else LatentAttention(config, f32, "R")
    x_BTD = jax.random.normal(jax.random.key(1), (1, 12, config.d_model))
    document_BT, at = jnp.ones((1, 12), int), jnp.arange(12)[None]
    params = module.init(jax.random.key(0), x_BTD, document_BT, at)

    def apply(at: jax.Array) -> jax.Array:
        y = module.apply(params, x_BTD, document_BT, at)
        return y if kind == "F" else y[0]

    y = apply(at)
    np.testing.assert_allclose(apply(at + 1000), y, atol=2e-4)
    assert float(jnp.abs(apply(at * 3) - y).max()) > 1e-3
