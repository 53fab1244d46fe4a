"""Exact synthetic tasks, made offline from a seed: what training draws from and evaluation asks.

    example = evaluation_example("passkey", 1024, seed=0, number=3, depth=0.5)

Every example fits in `length` tokens, the byte tokenizer's bos and eos around it. No example of
training is ever one of evaluation, whatever the seeds: a hash of its tokens says on which side it
falls, and whoever draws it for the other side draws again.
"""

from collections.abc import Callable

import numpy as np

from mlmoe.data.documents import stable_hash
from mlmoe.data.tasks import symbols
from mlmoe.data.tasks.counting import (
    FREQUENT_WORDS_SHORTEST,
    common_words,
    frequent_words,
    shortest_common_words,
    shortest_variables,
    variables,
)
from mlmoe.data.tasks.example import Example, Seed, check_length, with_ends
from mlmoe.data.tasks.needles import (
    DIGITS_SHORTEST,
    NEEDLE_MULTI_SHORTEST,
    NEEDLE_QUERIES_SHORTEST,
    NEEDLE_SINGLE_SHORTEST,
    PASSKEY_SHORTEST,
    digits,
    needle_multi,
    needle_queries,
    needle_single,
    passkey,
)
from mlmoe.errors import UserError, one_of

DEPTH_TASKS: dict[str, Callable[..., Example]] = {
    "passkey": passkey,
    "needle_single": needle_single,
    "needle_multi": needle_multi,
}
TEXT_TASKS: dict[str, Callable[..., Example]] = {
    **DEPTH_TASKS,
    "needle_queries": needle_queries,
    "digits": digits,
    "variables": variables,
    "common_words": common_words,
    "frequent_words": frequent_words,
}
TOKEN_TASKS: dict[str, Callable[..., Example]] = {
    "mqar": symbols.mqar,
    "copy": symbols.copy,
    "palindrome": symbols.palindrome,
    "stack": symbols.stack,
    "parity": symbols.parity,
    "modular": symbols.modular,
}
TASKS = {**TEXT_TASKS, **TOKEN_TASKS}

_ENDS = 2  # bos and eos, which token tasks are given here
SHORTEST = {  # tokens of the shortest example, with bos and eos
    "passkey": PASSKEY_SHORTEST,
    "needle_single": NEEDLE_SINGLE_SHORTEST,
    "needle_multi": NEEDLE_MULTI_SHORTEST,
    "needle_queries": NEEDLE_QUERIES_SHORTEST,
    "digits": DIGITS_SHORTEST,
    "variables": shortest_variables(),
    "common_words": shortest_common_words(),
    "frequent_words": FREQUENT_WORDS_SHORTEST,
    "mqar": symbols.MQAR_SHORTEST + _ENDS,
    "copy": symbols.COPY_SHORTEST + _ENDS,
    "palindrome": symbols.PALINDROME_SHORTEST + _ENDS,
    "stack": symbols.STACK_SHORTEST + _ENDS,
    "parity": symbols.PARITY_SHORTEST + _ENDS,
    "modular": symbols.MODULAR_SHORTEST + _ENDS,
}

_TRAIN, _EVALUATE = 0, 1
_TRIES = 1000  # one in four is for evaluation: 1000 misses in a row come of a lack of examples


def check_task(name: str, length: int) -> None:
    """Raises UserError for an unknown task, or a length too short for it."""
    one_of("task", name, tuple(TASKS))
    check_length(name, length, SHORTEST[name])


def training_example(name: str, length: int, *, number: int, depth: float) -> Example:
    """Example `number` of all that training draws from; `depth` where the task has one."""
    return _draw(name, length, (_TRAIN, number), depth, _TRAIN)


def evaluation_example(
    name: str, length: int, *, seed: int, number: int, depth: float = 0.5
) -> Example:
    """Example `number` of the evaluation with this seed; `depth` where the task has one."""
    return _draw(name, length, (_EVALUATE, seed, number), depth, _EVALUATE)


def _draw(name: str, length: int, seed: tuple[int, ...], depth: float, side: int) -> Example:
    check_task(name, length)
    for attempt in range(_TRIES):
        example = _make(name, length, (*seed, attempt), depth)
        if _side(example) == side:
            return example
    # So few examples exist at this length that all fall on one side.
    raise UserError(f"{name}: too few examples of {length} tokens; take a larger length")


def _make(name: str, length: int, seed: Seed, depth: float) -> Example:
    if name in DEPTH_TASKS:
        return DEPTH_TASKS[name](length, seed=seed, depth=depth)
    if name in TEXT_TASKS:
        return TEXT_TASKS[name](length, seed=seed)
    return with_ends(TOKEN_TASKS[name](length - _ENDS, seed=seed))


def _side(example: Example) -> int:
    """One example in four is for evaluation."""
    data = np.ascontiguousarray(example.tokens, "<i4").tobytes()
    return _EVALUATE if stable_hash(data) % 4 == 0 else _TRAIN
