"""The arithmetic of `count.py` against the shapes that the model declares."""

import jax
import pytest

import configs
from configs.scales import SCALES
from mlmoe.config import ModelConfig, TrainConfig, from_dict
from mlmoe.count import cache_bytes, parameters, training_bytes
from mlmoe.model import make_model
from tests.mlmoe.test_model import residual, small


def declared(config: ModelConfig) -> int:
    shapes = jax.eval_shape(make_model(config).init, jax.random.key(0))
    return sum(x.size for x in jax.tree.leaves(shapes))


@pytest.mark.parametrize(("layout", "kind"), [("FLRB", "none"), ("DAS", "block"), ("DL", "window")])
def test_every_letter_and_residual(layout: str, kind: str) -> None:
    config = residual(small(layout, tie_head=kind == "none"), kind, 2)
    assert parameters(config).total == declared(config)


@pytest.mark.parametrize("activation", ["four", "swiglu"])
def test_every_activation(activation: str) -> None:
    c = configs.load("8k:tiny").model
    c.moe.activation = activation
    config = from_dict(ModelConfig, c.to_dict())
    assert parameters(config).total == declared(config)


@pytest.mark.parametrize("scale", SCALES)
def test_every_scale(scale: str) -> None:
    config = from_dict(TrainConfig, configs.load(f"8k:{scale}").to_dict())
    assert parameters(config.model).total == declared(config.model)
    assert training_bytes(config) > 12 * parameters(config.model).total


def test_the_full_scale_is_the_published_one() -> None:
    """2.78 T parameters, 104 B active, 3.7 % (arXiv 2607.24653)."""
    config = from_dict(TrainConfig, configs.load("8k").to_dict())
    count = parameters(config.model)
    assert count.total == pytest.approx(2.78e12, rel=1e-3)
    assert count.active == pytest.approx(104e9, rel=5e-3)
    assert count.active / count.total == pytest.approx(0.037, abs=5e-4)
    assert config.model.letters.count("L") == 24 and config.model.letters.count("D") == 69


def test_shared_latents_cut_the_cache_by_their_number() -> None:
    """In bytes: 24 latent layers of 512 + 64 bf16 numbers a token at the full scale."""
    c = configs.load("8k").model
    c.attention.kv_share = 3
    shared = from_dict(ModelConfig, c.to_dict())
    c.attention.kv_share = 1
    alone = from_dict(ModelConfig, c.to_dict())
    a, b = cache_bytes(alone, 1 << 20), cache_bytes(shared, 1 << 20)
    assert a["latent"] == 24 * (1 << 20) * 576 * 2 == 3 * b["latent"]
    assert a["state"] == b["state"] == cache_bytes(alone, 1)["state"]
    assert a["state"] == 69 * 96 * (4 * 128 * 128 + 2 * 3 * 3 * 128)
    assert parameters(shared).total < parameters(alone).total


def test_followers_are_counted() -> None:
    from tests.mlmoe.test_model import shared_latents

    config = shared_latents("DLRDLB", 2)
    assert parameters(config).total == declared(config)
