"""Every text task against a solver that sees nothing but the prompt, and where needles lie."""

import re
from collections import Counter

import numpy as np
import pytest

from mlmoe.data.tasks import (
    DEPTH_TASKS,
    SHORTEST,
    TEXT_TASKS,
    common_words,
    evaluation_example,
    needle_single,
    passkey,
    variables,
)
from mlmoe.data.tokenizers import ByteTokenizer
from mlmoe.errors import UserError

BYTES = ByteTokenizer()


def split_all(example):
    """(what stands before, answer) as text, for each answer; the last one ends before the eos."""
    tokens, answer = example
    assert tokens.dtype == np.int32 and answer.dtype == bool and tokens.shape == answer.shape
    assert tokens[0] == BYTES.bos_id and tokens[-1] == BYTES.eos_id and tokens[1:-1].max() < 128
    starts, ends = (np.flatnonzero(np.diff(answer.astype(int)) == x) + 1 for x in (1, -1))
    assert ends[-1] == len(tokens) - 1
    for start, end in zip(starts, ends, strict=True):
        yield BYTES.decode(tokens[:start]), BYTES.decode(tokens[start:end])


def split(example):
    """The prompt and the one answer."""
    (found,) = split_all(example)
    return found


def solve_passkey(prompt):
    (key,) = set(re.findall(r"pass key is (\d+)\.", prompt))
    return key


def solve_needle(prompt):
    asked = re.search(r"What is the number of (\w+)\? It is $", prompt)[1]
    (number,) = re.findall(rf"The number of {asked} is (\d+)\.", prompt)
    return number


def solve_variables(prompt):
    asked = re.search(r"with the value (\d+): $", prompt)[1]
    source = dict(re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", prompt))

    def value(name):
        return value(source[name]) if name in source else name

    return " ".join(name for name in source if value(name) == asked)


def solve_common_words(prompt):
    text, _, _ = prompt.partition("\n")
    counts = Counter(text.split())  # in the order of the text
    most = max(counts.values())
    return " ".join(word for word in counts if counts[word] == most)


def solve_frequent_words(prompt):
    text, _, _ = prompt.partition("\n")
    ranked = Counter(text.split()).most_common()
    assert ranked[0][1] > ranked[1][1] > ranked[2][1] > ranked[3][1]
    return " ".join(word for word, _ in ranked[:3])


SOLVERS = {
    "passkey": solve_passkey,
    "needle_single": solve_needle,
    "needle_multi": solve_needle,
    "needle_queries": solve_needle,
    "digits": lambda prompt: prompt.removesuffix("\n"),
    "variables": solve_variables,
    "common_words": solve_common_words,
    "frequent_words": solve_frequent_words,
}


@pytest.mark.parametrize("name", TEXT_TASKS)
def test_the_prompt_alone_gives_the_answer(name):
    shortest = SHORTEST[name]
    lengths = [shortest, shortest + 1, shortest + 17, 300, 1000, 5000]
    for length in lengths:
        for number in range(6):
            depth = number / 5
            made = evaluation_example(name, length, seed=3, number=number, depth=depth)
            for prompt, answer in split_all(made):
                assert answer == SOLVERS[name](prompt), (length, number)
            assert length - 40 < len(made.tokens) <= length


@pytest.mark.parametrize("name", TEXT_TASKS)
def test_the_shortest_length_is_full_and_one_less_is_refused(name):
    shortest = SHORTEST[name]
    assert len(TEXT_TASKS[name](shortest, seed=0).tokens) == shortest
    with pytest.raises(UserError, match=f"{name}: a length of {shortest - 1} .*: {shortest}$"):
        TEXT_TASKS[name](shortest - 1, seed=0)


@pytest.mark.parametrize("name", TEXT_TASKS)
def test_a_seed_is_one_example_and_others_are_others(name):
    one, again, other = (TEXT_TASKS[name](400, seed=seed) for seed in (5, 5, (5, 1)))
    assert np.array_equal(one.tokens, again.tokens) and np.array_equal(one.answer, again.answer)
    assert not np.array_equal(one.tokens, other.tokens)


def test_every_number_is_asked_once():
    made = evaluation_example("needle_queries", 2000, seed=0, number=0)
    asked = [prompt.split("number of ")[-1].split("?")[0] for prompt, _ in split_all(made)]
    said = re.findall(r"The number of (\w+) is", BYTES.decode(made.tokens))
    assert sorted(asked) == sorted(said) and asked != said and len(asked) > 20
    assert made.answer.mean() > 1 / 13


@pytest.mark.parametrize("name", DEPTH_TASKS)
def test_the_needle_lies_at_its_depth(name):
    for length in (SHORTEST[name], 2000):
        places = []
        for depth in (0.0, 0.25, 0.5, 0.75, 1.0):
            prompt, answer = split(DEPTH_TASKS[name](length, seed=1, depth=depth))
            head, _, rest = prompt.partition("\n")
            body, _, _ = rest.partition("\n")
            needle = next(s for s in re.findall(r"[^.]+\.", body) if answer in s)
            start = body.index(needle)
            places.append(start / (len(body) - len(needle)))
            assert "emember" in head
        assert places[0] == 0.0 and places[-1] == 1.0 and places == sorted(set(places))
        if length == 2000:
            assert places == pytest.approx([0.0, 0.25, 0.5, 0.75, 1.0], abs=0.03)


def test_a_depth_outside_is_refused():
    for depth, near in ((-0.1, 0), (1.5, 1), (float("nan"), 0)):
        with pytest.raises(UserError, match=f"lies outside .*: {near}$"):
            passkey(1000, seed=0, depth=depth)
        with pytest.raises(UserError, match="needle_single"):
            needle_single(1000, seed=0, depth=depth)


def test_more_hops_chains_and_common_words():
    for hops, chains in ((1, 1), (4, 1), (4, 3)):
        prompt, answer = split(variables(1500, seed=2, hops=hops, chains=chains))
        assert answer == solve_variables(prompt) and len(answer.split()) == hops + 1
        assert len(set(re.findall(r"= (\d+)\.", prompt))) == chains
    prompt, answer = split(common_words(3000, seed=2, common=10, often=30, seldom=3))
    assert answer == solve_common_words(prompt) and len(answer.split()) == 10
    with pytest.raises(UserError, match="often=3 must be above seldom=3"):
        common_words(3000, seed=2, often=3, seldom=3)
    with pytest.raises(UserError, match="0 hops"):
        variables(1500, seed=2, hops=0)
