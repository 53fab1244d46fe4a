"""Every token task against a solver that sees only the tokens before the answer."""

import numpy as np
import pytest

from mlmoe.data.tasks import TOKEN_TASKS, symbols
from mlmoe.errors import UserError

SHORTEST = {"mqar": 4, "copy": 3, "palindrome": 3, "stack": 6, "parity": 10, "modular": 9}


def solve_mqar(before):
    """The value that followed the key that asks, at the first time that key came."""
    return before[before.index(before[-1]) + 1]


def solve_copy(before):
    return before[len(before) - before.index(0) - 1]


def solve_palindrome(before):
    middle = before.index(0)
    return before[2 * middle - len(before)]


def solve_stack(before):
    *operations, (code, asked) = [before[i : i + 3] for i in range(0, len(before), 3)]
    assert code == 1
    stacks = {}
    for code, s, x in operations:
        if code == 0:
            stacks.setdefault(s, []).append(x)
        else:
            assert stacks[s].pop() == x
    return stacks[asked].pop()


def solve_parity(before):
    assert before[-1] == 2
    return before[:-1].count(1) % 2


def solve_modular(before):
    assert before[-1] == 8
    text = "".join(str(t) if t < 5 else "+-*"[t - 5] for t in before[:-1])
    return eval(text) % 5


SOLVERS = {
    "mqar": solve_mqar,
    "copy": solve_copy,
    "palindrome": solve_palindrome,
    "stack": solve_stack,
    "parity": solve_parity,
    "modular": solve_modular,
}


def check(name, example):
    tokens, answer = example
    assert tokens.dtype == np.int32 and answer.dtype == bool and tokens.shape == answer.shape
    listed, places = tokens.tolist(), np.flatnonzero(answer)
    assert len(places)
    for at in places:
        assert listed[at] == SOLVERS[name](listed[:at]), (name, at)


@pytest.mark.parametrize("name", TOKEN_TASKS)
def test_the_tokens_before_it_give_each_answer(name):
    for length in (SHORTEST[name], SHORTEST[name] + 1, SHORTEST[name] + 5, 64, 257):
        for seed in range(8):
            example = TOKEN_TASKS[name](length, seed=seed)
            check(name, example)
            assert length - 3 < len(example.tokens) <= length
            assert example.tokens.min() >= 0 and example.tokens.max() < 256


@pytest.mark.parametrize("name", TOKEN_TASKS)
def test_too_short_is_refused_and_a_seed_is_one_example(name):
    least = SHORTEST[name]
    with pytest.raises(UserError, match=f"{name}: a length of {least - 1} .*: {least}$"):
        TOKEN_TASKS[name](least - 1, seed=0)
    one, again, other = (TOKEN_TASKS[name](100, seed=seed).tokens for seed in (4, 4, 5))
    assert np.array_equal(one, again) and not np.array_equal(one, other)


def test_mqar_is_zoologys_layout():
    for length, pairs, vocab in ((64, 4, 256), (64, 16, 64), (1024, 256, 8192)):
        example = symbols.mqar(length, seed=1, vocab=vocab, pairs=pairs)
        check("mqar", example)
        tokens = example.tokens
        keys, values = tokens[0 : 2 * pairs : 2], tokens[1 : 2 * pairs : 2]
        assert len(set(keys)) == pairs and keys.min() >= 1 and keys.max() < vocab // 2
        assert vocab // 2 <= values.min() and values.max() < vocab
        asked = tokens[np.flatnonzero(example.answer) - 1]
        assert sorted(asked) == sorted(keys) and len(tokens) == length
        assert np.count_nonzero(tokens) == 4 * pairs
    filled = symbols.mqar(512, seed=1, pairs=8, random_filler=True)
    check("mqar", filled)
    assert np.count_nonzero(filled.tokens) > 400


def test_gaps_of_mqar_follow_the_power_law():
    """With one pair, P(gap = g) is in proportion to g^-0.99."""
    first = [
        int(np.flatnonzero(symbols.mqar(66, seed=s, pairs=1).answer)[0] - 3) // 2 + 1
        for s in range(3000)
    ]
    weight = np.arange(1, 33) ** -0.99
    expected = weight / weight.sum()
    for gap in (1, 2, 4):
        p = expected[gap - 1]
        assert abs(np.mean(np.array(first) == gap) - p) < 5 * np.sqrt(p * (1 - p) / 3000)


def test_sizes_that_cannot_be_are_refused():
    with pytest.raises(UserError, match="128 pairs of 127 keys"):
        symbols.mqar(4096, seed=0, pairs=128)
    with pytest.raises(UserError, match=r"mqar: a length of 30 .*: 32$"):
        symbols.mqar(30, seed=0, pairs=8)
    with pytest.raises(UserError, match=r"palindrome: a vocabulary of 2 .*: 3$"):
        symbols.palindrome(30, seed=0, vocab=2)
    with pytest.raises(UserError, match=r"stack: a vocabulary of 64 .*: 68$"):
        symbols.stack(30, seed=0, vocab=64)
    with pytest.raises(UserError, match="modulus=1"):
        symbols.modular(30, seed=0, modulus=1)


def test_small_vocabularies():
    for seed in range(20):
        check("stack", symbols.stack(90, seed=seed, vocab=6, stacks=2))
        check("palindrome", symbols.palindrome(31, seed=seed, vocab=3))
        check("mqar", symbols.mqar(64, seed=seed, vocab=16))


def test_stack_asks_of_many_stacks_at_once():
    example = symbols.stack(3000, seed=0)
    tokens = example.tokens.reshape(-1, 3)
    assert len(set(tokens[:, 1])) == 64 and 0.4 < np.mean(tokens[:, 0]) <= 0.5
