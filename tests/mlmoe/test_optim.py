"""Which parameters are matrices, which decay, and the shape of the schedule."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import configs
from mlmoe import optim
from mlmoe.config import OptimConfig, from_dict
from mlmoe.model import make_model
from tests.mlmoe.test_model import small


def optim_config(**changes: object) -> OptimConfig:
    c = configs.load("8k:tiny").optim
    c.update(changes)
    return from_dict(OptimConfig, c.to_dict())


def named_axes() -> dict[str, tuple[str, ...]]:
    axes = make_model(small("DLAS")).axes
    flat = jax.tree_util.tree_leaves_with_path(axes, is_leaf=lambda x: isinstance(x, tuple))
    return {jax.tree_util.keystr(path): a for path, a in flat}


def test_what_decays_and_what_muon_takes() -> None:
    plain = ("gain", "a_log", "bias", "conv", "'w']")
    for name, axes in named_axes().items():
        assert optim.decays(axes) != any(p in name for p in plain), name
        is_matrix = optim.muon_axes(axes) is not None
        expected = optim.decays(axes) and not any(
            n in name for n in ("embedding", "head", "w_router", "w_beta")
        )
        assert is_matrix == expected, name


def test_muon_treats_heads_and_experts_as_separate_matrices() -> None:
    params = {"w": jax.random.normal(jax.random.key(0), (3, 16, 4, 8))}
    axes = {"w": ("layer", "embed", "heads", "key")}
    tx = optim.make(optim_config(weight_decay=0.0), axes)
    update, _ = tx.update(params, tx.init(params), params)
    one = {"w": params["w"][1, :, 2]}
    tx_one = optim.make(optim_config(weight_decay=0.0), {"w": ("embed", "key")})
    update_one, _ = tx_one.update(one, tx_one.init(one), one)
    np.testing.assert_allclose(update["w"][1, :, 2], update_one["w"], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_gates_and_norms_do_not_decay(name: str) -> None:
    params = {"a_log": jnp.ones(4), "w": jnp.ones((4, 4))}
    axes = {"a_log": ("gate",), "w": ("embed", "key")}
    tx = optim.make(optim_config(name=name, weight_decay=0.5), axes)
    zero = jax.tree.map(jnp.zeros_like, params)
    update, _ = tx.update(zero, tx.init(params), params)
    new = optax.apply_updates(params, update)
    np.testing.assert_array_equal(new["a_log"], 1.0)
    assert float(new["w"].max()) < 1.0


def test_schedules() -> None:
    at = lambda c, t: float(optim.schedule(c, 100, jnp.asarray(t)))  # noqa: E731
    cosine = optim_config(warmup=10, final_lr=0.1)
    assert at(cosine, 0) == pytest.approx(1 / 11, rel=0.05)
    assert at(cosine, 10) == pytest.approx(1.0)
    assert at(cosine, 55) == pytest.approx(0.55)
    assert at(cosine, 100) == pytest.approx(0.1)
    wsd = optim_config(warmup=10, schedule="wsd", decay=0.2, final_lr=0.0)
    assert at(wsd, 50) == at(wsd, 80) == 1.0
    assert at(wsd, 90) == pytest.approx(0.5) and at(wsd, 100) == 0.0
