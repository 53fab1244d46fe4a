"""Token tasks over a small vocabulary: recall, reversal, stacks, and the state of an automaton.

They return bare symbols 0, 1, 2, ..., without bos and eos. What a symbol means is said at each.
"""

import numpy as np

from mlmoe.data.tasks.example import Example, Seed, check_length, check_vocab
from mlmoe.errors import require

MQAR_SHORTEST = 4
COPY_SHORTEST = 3
PALINDROME_SHORTEST = 3
STACK_SHORTEST = 6
PARITY_SHORTEST = 10
MODULAR_SHORTEST = 9


def mqar(
    length: int,
    *,
    seed: Seed,
    vocab: int = 256,
    pairs: int = 0,
    power: float = 0.01,
    random_filler: bool = False,
) -> Example:
    """Multi-query associative recall (arXiv 2312.04927): pairs k v, then each k once more.

    Keys are 1 .. vocab/2 - 1, values vocab/2 .. vocab - 1, and 0 (or any symbol, with
    `random_filler`) fills up to exactly `length`. Key i is asked at the g_i-th place for two tokens
    after the pairs, g drawn without replacement in proportion to g^(power - 1): mostly soon, a
    heavy tail far away. Here the value stands after the key that asks, as next-token prediction
    needs. `pairs=0` takes length / 16, at most as many as there are keys.
    """
    check_vocab("mqar", vocab, 4)
    keys = vocab // 2 - 1
    pairs = pairs or max(1, min(length // 16, keys))
    require(1 <= pairs <= keys, f"mqar: {pairs} pairs of {keys} keys; valid: 1 to {keys}")
    check_length("mqar", length, MQAR_SHORTEST * pairs)
    rng = np.random.default_rng(seed)
    key_P = 1 + rng.choice(keys, size=pairs, replace=False)
    value_P = rng.integers(vocab // 2, vocab, size=pairs)
    places = (length - 2 * pairs) // 2
    weight_G = np.arange(1, places + 1) ** (power - 1.0)
    gap_P = rng.choice(places, size=pairs, replace=False, p=weight_G / weight_G.sum())
    tokens = rng.integers(0, vocab, size=length) if random_filler else np.zeros(length, np.int64)
    tokens[0 : 2 * pairs : 2], tokens[1 : 2 * pairs : 2] = key_P, value_P
    at_P = 2 * pairs + 2 * gap_P
    tokens[at_P], tokens[at_P + 1] = key_P, value_P
    return _marked(tokens, at_P + 1)


def copy(length: int, *, seed: Seed, vocab: int = 256) -> Example:
    """Random symbols 1 .. vocab - 1, a 0, and the same symbols again; an odd number of tokens.

    The densest thing there is to learn looking back from: half of the tokens are answers.
    """
    check_vocab("copy", vocab, 3)
    check_length("copy", length, COPY_SHORTEST)
    return _said_twice(length, seed, vocab, order=1)


def palindrome(length: int, *, seed: Seed, vocab: int = 256) -> Example:
    """Random symbols 1 .. vocab - 1, a 0, and the symbols backwards; an odd number of tokens."""
    check_vocab("palindrome", vocab, 3)
    check_length("palindrome", length, PALINDROME_SHORTEST)
    return _said_twice(length, seed, vocab, order=-1)


def _said_twice(length: int, seed: Seed, vocab: int, order: int) -> Example:
    """Symbols, a 0, and the symbols in this order, which are asked for."""
    half = (length - 1) // 2
    symbols = np.random.default_rng(seed).integers(1, vocab, size=half)
    tokens = np.concatenate([symbols, [0], symbols[::order]])
    return _marked(tokens, np.arange(half + 1, 2 * half + 1))


def stack(length: int, *, seed: Seed, vocab: int = 256, stacks: int = 64) -> Example:
    """Operations of three tokens on many stacks: 0 s x pushes x on stack s, 1 s x pops it.

    Stacks are 2 .. stacks + 1, elements the symbols above; every x that is popped is asked for.
    The last operation is a pop; length / 3 operations, rounded down.
    """
    require(stacks >= 1, f"stack: stacks={stacks} must be at least 1")
    check_vocab("stack", vocab, stacks + 4)
    check_length("stack", length, STACK_SHORTEST)
    rng = np.random.default_rng(seed)
    count = length // 3
    want_pop = rng.random(count) < 0.5
    pushed = rng.integers([2, 2 + stacks], [2 + stacks, vocab], size=(count, 2)).tolist()
    turn = rng.random(count).tolist()
    content: dict[int, list[int]] = {}  # stack -> elements; none is empty
    filled: list[int] = []  # its keys
    held, tokens, asked = 0, [], []
    for i in range(count):
        last = i == count - 1
        spare = held - 1 if i == count - 2 else held  # the last pop must find something
        if last or (want_pop[i] and spare > 0):
            at = int(turn[i] * len(filled))
            s = filled[at]
            x = content[s].pop()
            if not content[s]:
                del content[s]
                filled[at] = filled[-1]
                filled.pop()
            tokens += [1, s, x]
            asked.append(3 * i + 2)
            held -= 1
        else:
            s, x = pushed[i]
            if s not in content:
                content[s] = []
                filled.append(s)
            content[s].append(x)
            tokens += [0, s, x]
            held += 1
    return _marked(np.array(tokens), np.array(asked))


def parity(length: int, *, seed: Seed) -> Example:
    """Random bits, a 2, and their sum modulo 2: a guess is right half the time."""
    check_length("parity", length, PARITY_SHORTEST)
    bits = np.random.default_rng(seed).integers(0, 2, size=length - 2)
    tokens = np.concatenate([bits, [2, bits.sum() % 2]])
    return _marked(tokens, np.array([length - 1]))


def modular(length: int, *, seed: Seed, modulus: int = 5) -> Example:
    """An expression over 0 .. modulus - 1 with its value modulo `modulus`; an odd number of tokens.

    From `modulus` on the symbols are + - * and =. Times binds before plus and minus; no brackets.
    """
    require(modulus >= 2, f"modular: modulus={modulus} must be at least 2")
    check_length("modular", length, MODULAR_SHORTEST)
    rng = np.random.default_rng(seed)
    count = (length - 1) // 2  # numbers, before = and the value
    numbers = rng.integers(0, modulus, size=count)
    operators = rng.integers(0, 3, size=count - 1)
    tokens = np.empty(2 * count + 1, np.int64)
    tokens[0:-1:2], tokens[1:-2:2], tokens[-2] = numbers, modulus + operators, modulus + 3
    total, term = 0, int(numbers[0])
    for operator, number in zip(operators.tolist(), numbers[1:].tolist(), strict=True):
        if operator == 2:
            term = term * number % modulus
        else:
            total, term = total + term, number if operator == 0 else -number
    tokens[-1] = (total + term) % modulus
    return _marked(tokens, np.array([2 * count]))


def _marked(tokens: np.ndarray, at: np.ndarray) -> Example:
    answer = np.zeros(len(tokens), bool)
    answer[at] = True
    return Example(tokens.astype(np.int32), answer)
