"""Made-up words of one length, such as `bakoli`: any number of them, and no word list to ship."""

import numpy as np

_SYLLABLES = [c + v for c in "bcdfghjklmnprstv" for v in "aeiou"]  # 80


def pick_words(rng: np.random.Generator, count: int, *, syllables: int) -> list[str]:
    """`count` different words of `2 * syllables` letters, in random order."""
    base = len(_SYLLABLES)
    words = []
    for number in rng.choice(base**syllables, size=count, replace=False).tolist():
        word = ""
        for _ in range(syllables):
            number, digit = divmod(number, base)
            word += _SYLLABLES[digit]
        words.append(word)
    return words
