"""Training and evaluation never share an example; each is a function of its number."""

import numpy as np
import pytest

from mlmoe.data.tasks import (
    SHORTEST,
    TASKS,
    _draw,
    evaluation_example,
    training_example,
)
from mlmoe.errors import UserError


def key(example):
    return example.tokens.tobytes()


@pytest.mark.parametrize("name", TASKS)
def test_no_example_is_on_both_sides(name):
    """At the shortest length, where few examples exist, and in the same space of seeds."""
    length = SHORTEST[name]
    sides = [{key(_draw(name, length, (7, n), 0.0, side)) for n in range(200)} for side in (0, 1)]
    assert not sides[0] & sides[1] and len(sides[0]) > 20 and len(sides[1]) > 10
    training = {key(training_example(name, length, number=n, depth=0.5)) for n in range(200)}
    asked = {key(evaluation_example(name, length, seed=0, number=n)) for n in range(50)}
    assert not training & asked


@pytest.mark.parametrize("name", TASKS)
def test_examples_are_functions_of_their_number_and_fit(name):
    for length in (SHORTEST[name], 400):
        one, again = (evaluation_example(name, length, seed=1, number=2) for _ in range(2))
        assert key(one) == key(again) and np.array_equal(one.answer, again.answer)
        assert key(one) != key(evaluation_example(name, length, seed=2, number=2))
        assert key(one) != key(training_example(name, length, number=2, depth=0.5))
        assert len(one.tokens) <= length and one.answer.any() and not one.answer[0]
        assert (one.tokens[0], one.tokens[-1]) == (256, 257) and one.tokens[1:-1].max() < 256


def test_unknown_tasks_and_short_lengths_are_refused():
    with pytest.raises(UserError, match=r"task='needle'.*'needle_multi'"):
        evaluation_example("needle", 400, seed=0, number=0)
    with pytest.raises(UserError, match=r"parity: a length of 11 .*: 12$"):
        evaluation_example("parity", 11, seed=0, number=0)
