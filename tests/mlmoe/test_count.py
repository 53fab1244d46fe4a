"""The arithmetic of `count.py` against the shapes that the model declares."""

import jax
import pytest

import configs
from configs.scales import SCALES
from mlmoe.config import ModelConfig, TrainConfig, from_dict
from mlmoe.count import parameters, training_bytes
from mlmoe.model import make_model
from tests.mlmoe.test_model import residual, small


def declared(config: ModelConfig) -> int:
    shapes = jax.eval_shape(make_model(config).init, jax.random.key(0))
    return sum(x.size for x in jax.tree.leaves(shapes))


@pytest.mark.parametrize(("layout", "kind"), [("FLR", "none"), ("DAS", "block"), ("DL", "window")])
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
