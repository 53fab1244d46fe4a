"""Text tasks whose answer lies in many places: chains of variables, and counts of words."""

import string

import numpy as np

from mlmoe.data.tasks.example import Example, Seed, check_length, noise, text_example
from mlmoe.data.tasks.words import pick_words
from mlmoe.errors import require

_ENDS = 2  # bos and eos
_HOPS, _CHAINS = 2, 2
_COMMON, _OFTEN, _SELDOM = 3, 6, 2
_TOP, _EXPONENT = 3, 2.0
_ASK_COMMON = "\nThe words that come most often, in the order of the text: "
_ASK_FREQUENT = "\nThe most frequent words, the first first: "


def _ask_value(value: int) -> str:
    return f"\nVariables with the value {value}: "


def shortest_variables(hops: int = _HOPS, chains: int = _CHAINS) -> int:
    """Tokens of an example without noise."""
    text = chains * (len("VAR ABC = 12345. ") + hops * len("VAR ABC = VAR DEF. ")) - 1
    return text + len(_ask_value(12_345)) + 4 * (hops + 1) - 1 + _ENDS


def variables(length: int, *, seed: Seed, hops: int = _HOPS, chains: int = _CHAINS) -> Example:
    """Chains A = 12345, B = A, C = B, ... mixed with each other and with noise.

    Asks for all `hops` + 1 variables of one chain, in their order; at most `length` tokens.
    """
    require(hops >= 1, f"variables: {hops} hops are too few; nearest valid: 1")
    require(1 <= chains <= 1000, f"variables: {chains} chains; valid: 1 to 1000")
    check_length("variables", length, shortest_variables(hops, chains))
    rng = np.random.default_rng(seed)
    names_CN = _names(rng, chains * (hops + 1)).reshape(chains, hops + 1).tolist()
    values = (10_000 + rng.choice(90_000, size=chains, replace=False)).tolist()
    said = [0] * chains
    statements = []
    for chain in rng.permutation(np.repeat(np.arange(chains), hops + 1)).tolist():
        n = said[chain]
        source = f"VAR {names_CN[chain][n - 1]}" if n else str(values[chain])
        statements.append(f"VAR {names_CN[chain][n]} = {source}.")
        said[chain] += 1
    filler = noise(length - shortest_variables(hops, chains))
    at = np.sort(rng.integers(0, len(filler) + 1, size=len(statements)))
    mixed = np.insert(np.array(filler, object), at, statements)
    asked = int(rng.integers(chains))
    return text_example(" ".join(mixed) + _ask_value(values[asked]), " ".join(names_CN[asked]))


def _names(rng: np.random.Generator, count: int) -> np.ndarray:
    """Different names of three capital letters."""
    letters = np.array(list(string.ascii_uppercase))
    require(count <= 26**3, f"variables: {count} names are too many; nearest valid: {26**3}")
    numbers = rng.choice(26**3, size=count, replace=False)
    parts = [letters[numbers // 26**i % 26] for i in range(3)]
    return np.char.add(np.char.add(parts[0], parts[1]), parts[2])


def shortest_common_words(common: int = _COMMON, often: int = _OFTEN, seldom: int = _SELDOM) -> int:
    """Tokens of an example with one uncommon word."""
    return 7 * (common * often + seldom + common) - 2 + len(_ASK_COMMON) + _ENDS


def common_words(
    length: int, *, seed: Seed, common: int = _COMMON, often: int = _OFTEN, seldom: int = _SELDOM
) -> Example:
    """A shuffled list: `common` words come `often` times, as many as fit come `seldom` times.

    Asks for the common ones in the order they first come; at most `length` tokens.
    """
    require(common >= 1, f"common_words: common={common} must be at least 1")
    require(1 <= seldom < often, f"common_words: often={often} must be above seldom={seldom} >= 1")
    least = shortest_common_words(common, often, seldom)
    check_length("common_words", length, least)
    rng = np.random.default_rng(seed)
    uncommon = 1 + (length - least) // (7 * seldom)
    words = pick_words(rng, common + uncommon, syllables=3)
    text = [word for i, word in enumerate(words) for _ in range(often if i < common else seldom)]
    rng.shuffle(text)
    answer = sorted(words[:common], key=text.index)
    return text_example(" ".join(text) + _ASK_COMMON, " ".join(answer))


_FREQUENT_LEAST = 30  # words: the third comes twice, the fourth once
FREQUENT_WORDS_SHORTEST = 5 * (_FREQUENT_LEAST + _TOP) - 2 + len(_ASK_FREQUENT) + _ENDS


def frequent_words(length: int, *, seed: Seed) -> Example:
    """A shuffled list in which the k-th word comes in proportion to k^-2.

    Asks for the three most frequent, by falling count; at most `length` tokens.
    """
    check_length("frequent_words", length, FREQUENT_WORDS_SHORTEST)
    rng = np.random.default_rng(seed)
    count = _FREQUENT_LEAST + (length - FREQUENT_WORDS_SHORTEST) // 5
    times = _zipf(count)
    words = pick_words(rng, len(times), syllables=2)
    text = [word for word, n in zip(words, times, strict=True) for _ in range(n)]
    rng.shuffle(text)
    return text_example(" ".join(text) + _ASK_FREQUENT, " ".join(words[:_TOP]))


def _zipf(count: int) -> list[int]:
    """How often each word comes, falling; `count` in all, what rounding leaves in single words."""
    zeta = np.pi**2 / 6  # sum of k^-2
    times = np.floor(count / zeta * np.arange(1, count + 1) ** -_EXPONENT).astype(int)
    times = times[times > 0].tolist()
    assert times[0] > times[1] > times[2] > times[3], "the answer is not unique"
    return times + [1] * (count - sum(times))
