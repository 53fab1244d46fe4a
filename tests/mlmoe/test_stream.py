"""A long sequence through one incremental layer in pieces, against float64."""

import jax
import pytest

import configs
from mlmoe.config import ModelConfig, from_dict
from mlmoe.stream import Checked, check, make_layer, noise


def stream(letter: str, tokens: int, piece: int) -> list[Checked]:
    """A layer of `tiny` whose channels remember up to 100,000 tokens, at its last two positions."""
    c = configs.load("8k:tiny").model
    c.incremental.update(memory_max=1e5, slots=8)
    config = from_dict(ModelConfig, c.to_dict())
    layer = make_layer(config, letter)
    params = layer.init(jax.random.key(1))
    carried = layer.start(1)
    first = jax.tree.map(lambda x: (x.shape, x.dtype), carried)
    run = lambda x_1TD, carried: layer.extend(params, x_1TD, carried)  # noqa: E731
    found = list(check(run, carried, noise(config, tokens, piece), [tokens // 4, tokens]))
    _, carried, _ = layer.extend(params, next(noise(config, piece, piece)), carried)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), carried) == first  # constant memory
    return found


@pytest.mark.parametrize("letter", "DAS")
def test_16_384_tokens_stay_within_1e_4_of_float64(letter: str) -> None:
    found = stream(letter, 16_384, 2048)
    assert [x.end for x in found] == [4096, 16_384]
    assert all(0 < error < 1e-4 for x in found for error in x[1:])


@pytest.mark.slow
@pytest.mark.parametrize("letter", "DAS")
def test_1_048_576_tokens_stay_within_1e_4_of_float64(letter: str) -> None:
    found = stream(letter, 1_048_576, 4096)
    assert [x.end for x in found] == [262_144, 1_048_576]
    assert all(0 < error < 1e-4 for x in found for error in x[1:])
