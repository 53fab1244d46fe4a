"""Inputs, a float64 token-by-token oracle with documents, and the error measure of these tests."""

import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.bounded_decay import tpu

GOLDEN = pathlib.Path(__file__).parents[2] / "golden"
NAMES = ("q", "k", "v", "g", "beta", "initial_state")


def _error(got, want):
    """Error RMS over reference RMS."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    return float(np.sqrt(np.mean((got - want) ** 2)) / max(np.sqrt(np.mean(want**2)), 1e-30))


def _make(B, T, H=2, K=8, V=12, seed=0):
    """Float64 q, k (unit length), v, g (mixed decays down to -5), beta, initial_state."""
    rng = np.random.default_rng(seed)
    q, k = rng.normal(size=(2, B, T, H, K))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v, g = rng.normal(size=(B, T, H, V)), -5 * rng.uniform(size=(B, T, H, K)) ** 4
    arrays = q, k, v, g, rng.uniform(size=(B, T, H)), rng.normal(size=(B, H, K, V))
    return dict(zip(NAMES, arrays, strict=True))


def _oracle(q, k, v, g, beta, initial_state, segment_ids):
    """The delta rule in float64, one row, token and head at a time. beta None: additive."""
    o, state = np.zeros(v.shape), np.array(initial_state, np.float64)
    for b, t, h in np.ndindex(v.shape[:3]):
        if segment_ids[b, t] == 0:
            continue
        before = segment_ids[b, :t][segment_ids[b, :t] != 0]
        fresh = before.size > 0 and before[-1] != segment_ids[b, t]
        S = np.exp(g[b, t, h])[:, None] * (0 if fresh else state[b, h])
        u = v[b, t, h] if beta is None else beta[b, t, h] * (v[b, t, h] - k[b, t, h] @ S)
        state[b, h] = S + np.outer(k[b, t, h], u)
        o[b, t, h] = q.shape[-1] ** -0.5 * q[b, t, h] @ state[b, h]
    return o, state


@pytest.fixture
def short_chunks(monkeypatch):
    """Kernels of 32 tokens and 8 lanes instead of 128: what is interpreted compiles much faster."""
    monkeypatch.setattr(tpu, "CHUNK", 32)
    monkeypatch.setattr(tpu, "LANES", 8)
    monkeypatch.setattr(tpu, "SLOTS", 8)


@pytest.fixture
def narrow(monkeypatch):
    """Widths as they are, not padded to the lanes of a TPU: less to interpret."""
    monkeypatch.setattr(tpu, "LANES", 8)


@pytest.fixture
def error():
    return _error


@pytest.fixture
def make():
    return _make


@pytest.fixture
def oracle():
    return _oracle


@pytest.fixture
def f32():
    return lambda arrays: {n: jnp.asarray(x, jnp.float32) for n, x in arrays.items()}


@pytest.fixture
def golden():
    return lambda name: dict(np.load(GOLDEN / f"{name}.npz"))
