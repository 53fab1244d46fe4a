"""Text tasks that ask for what was said once: pass key, needles in noise or needles, all digits.

`depth` says where in the text it lies: 0 at the start, 1 at the end, right before the question.
"""

import numpy as np

from mlmoe.data.tasks.example import (
    NOISE_CYCLE,
    Example,
    Seed,
    check_depth,
    check_length,
    noise,
    parts_example,
    text_example,
)
from mlmoe.data.tasks.words import pick_words

_PASSKEY_HEAD = "Remember the pass key.\n"
_PASSKEY_ASK = "\nWhat is the pass key? The pass key is "
_NUMBERS_HEAD = "Remember the numbers.\n"
_ENDS = 2  # bos and eos


def _pass_key_is(key: int) -> str:
    return f"The pass key is {key}."


def _number_is(word: str, number: int) -> str:
    return f"The number of {word} is {number}."


def _ask_number(word: str) -> str:
    return f"\nWhat is the number of {word}? It is "


_NEEDLE = len(_number_is("bakoli", 1_234_567))
_NUMBERS_FIXED = len(_NUMBERS_HEAD) + len(_ask_number("bakoli")) + 7 + _ENDS
_PASSKEY_FIXED = len(_PASSKEY_HEAD) + len(_pass_key_is(12_345)) + len(_PASSKEY_ASK) + 5 + _ENDS

_QUERY = len(_ask_number("bakoli")) + 7
_QUERIES_FIXED = len(_NUMBERS_HEAD) + _ENDS - 1  # a space fewer than there are statements

# One cycle of noise, or five needles: enough for depths of 0, 1/4, ... 1 to differ.
PASSKEY_SHORTEST = _PASSKEY_FIXED + NOISE_CYCLE
NEEDLE_SINGLE_SHORTEST = _NUMBERS_FIXED + _NEEDLE + NOISE_CYCLE
NEEDLE_QUERIES_SHORTEST = _QUERIES_FIXED + _NEEDLE + 1 + _QUERY
DIGITS_SHORTEST = _ENDS + 1 + 2 * 5  # so few exist of shorter ones that most would be known
NEEDLE_MULTI_SHORTEST = _NUMBERS_FIXED + 5 * (_NEEDLE + 1) - 1


def passkey(length: int, *, seed: Seed, depth: float = 0.5) -> Example:
    """A five-digit pass key in noise that repeats; at most `length` tokens."""
    check_length("passkey", length, PASSKEY_SHORTEST)
    check_depth("passkey", depth)
    key = int(np.random.default_rng(seed).integers(10_000, 100_000))
    body = _hide(_pass_key_is(key), noise(length - _PASSKEY_FIXED), depth)
    return text_example(_PASSKEY_HEAD + body + _PASSKEY_ASK, str(key))


def needle_single(length: int, *, seed: Seed, depth: float = 0.5) -> Example:
    """The seven-digit number of one word, in noise that repeats; at most `length` tokens."""
    check_length("needle_single", length, NEEDLE_SINGLE_SHORTEST)
    check_depth("needle_single", depth)
    rng = np.random.default_rng(seed)
    (word,), number = pick_words(rng, 1, syllables=3), int(rng.integers(10**6, 10**7))
    body = _hide(_number_is(word, number), noise(length - _NUMBERS_FIXED - _NEEDLE), depth)
    return text_example(_NUMBERS_HEAD + body + _ask_number(word), str(number))


def needle_multi(length: int, *, seed: Seed, depth: float = 0.5) -> Example:
    """Nothing but numbers of different words, one of them asked for; at most `length` tokens."""
    check_length("needle_multi", length, NEEDLE_MULTI_SHORTEST)
    check_depth("needle_multi", depth)
    rng = np.random.default_rng(seed)
    count = (length - _NUMBERS_FIXED + 1) // (_NEEDLE + 1)
    words = pick_words(rng, count, syllables=3)
    numbers = rng.integers(10**6, 10**7, size=count).tolist()
    asked = round(depth * (count - 1))
    body = " ".join(_number_is(w, n) for w, n in zip(words, numbers, strict=True))
    return text_example(_NUMBERS_HEAD + body + _ask_number(words[asked]), str(numbers[asked]))


def needle_queries(length: int, *, seed: Seed) -> Example:
    """Numbers of different words, then each of them asked, in any order; at most `length` tokens.

    RULER's multi-query needle (arXiv 2404.06654): one token in twelve is part of an answer.
    """
    check_length("needle_queries", length, NEEDLE_QUERIES_SHORTEST)
    rng = np.random.default_rng(seed)
    count, left = divmod(length - _QUERIES_FIXED, _NEEDLE + 1 + _QUERY)
    words = pick_words(rng, count, syllables=3)
    numbers = rng.integers(10**6, 10**7, size=count).tolist()
    said = [_number_is(w, n) for w, n in zip(words, numbers, strict=True)]
    parts = [(_NUMBERS_HEAD + " ".join([*noise(left), *said]), "")]
    parts += [(_ask_number(words[i]), str(numbers[i])) for i in rng.permutation(count)]
    return parts_example(parts)


def digits(length: int, *, seed: Seed) -> Example:
    """Random digits, and after a line's end the same again; at most `length` tokens.

    As dense as `copy`, but with ten symbols, so that what follows a symbol, or two, is said of
    several places: only a longer past tells which. Numbers with repeated digits need that.
    """
    check_length("digits", length, DIGITS_SHORTEST)
    count = (length - _ENDS - 1) // 2
    text = "".join(map(str, np.random.default_rng(seed).integers(0, 10, size=count).tolist()))
    return text_example(text + "\n", text)


def _hide(needle: str, sentences: list[str], depth: float) -> str:
    at = round(depth * len(sentences))
    return " ".join([*sentences[:at], needle, *sentences[at:]])
