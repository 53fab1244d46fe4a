"""What a task makes, and what all tasks share: ends, checks, and noise to hide things in."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mlmoe.data.tokenizers import ByteTokenizer
from mlmoe.errors import UserError

Seed = int | Sequence[int]

# Nothing in these says anything about a number, a variable or a word that a task asks for.
NOISE = (
    "Rain falls on the hills.",
    "A boat drifts by.",
    "The road is long.",
    "Birds sing.",
    "We walk on and on.",
)
NOISE_CYCLE = sum(len(sentence) + 1 for sentence in NOISE)  # with a space after each


class Example(NamedTuple):
    """A prompt with its answer in place: `answer` marks the tokens that must be predicted."""

    tokens: np.ndarray  # [n] int32
    answer: np.ndarray  # [n] bool


def text_example(prompt: str, answer: str) -> Example:
    """[bos] prompt answer [eos] in the ids of the byte tokenizer; the eos is not asked for."""
    return parts_example([(prompt, answer)])


def parts_example(parts: Sequence[tuple[str, str]]) -> Example:
    """[bos] prompt answer prompt answer ... [eos]."""
    text = "".join(prompt + answer for prompt, answer in parts)
    marks = [np.arange(len(p) + len(a)) >= len(p) for p, a in parts]
    ids = np.frombuffer(text.encode("ascii"), np.uint8).astype(np.int32)
    return with_ends(Example(ids, np.concatenate(marks)))


def with_ends(example: Example) -> Example:
    """The example between the byte tokenizer's bos and eos, as the pipeline writes a document."""
    bos, eos = ByteTokenizer.bos_id, ByteTokenizer.eos_id
    tokens = np.concatenate([[bos], example.tokens, [eos]]).astype(np.int32)
    return Example(tokens, np.concatenate([[False], example.answer, [False]]))


def check_length(task: str, length: int, shortest: int) -> None:
    """Raises UserError for a length that cannot hold an example."""
    if length < shortest:
        message = f"{task}: a length of {length} is too short for an example"
        raise UserError(f"{message}; nearest valid: {shortest}")


def check_depth(task: str, depth: float) -> None:
    """Raises UserError for a depth outside [0, 1]; NaN too."""
    if not 0.0 <= depth <= 1.0:
        near = 1 if depth > 1.0 else 0
        raise UserError(f"{task}: a depth of {depth} lies outside [0, 1]; nearest valid: {near}")


def check_vocab(task: str, vocab: int, least: int) -> None:
    """Raises UserError for a vocabulary without room for the symbols of a task."""
    if vocab < least:
        message = f"{task}: a vocabulary of {vocab} is too small"
        raise UserError(f"{message}; nearest valid: {least}")


def noise(room: int) -> list[str]:
    """As many sentences, in a fixed cycle, as fit in `room` bytes with a space after each."""
    found = list(NOISE) * (room // NOISE_CYCLE)
    left = room % NOISE_CYCLE
    for sentence in NOISE:
        left -= len(sentence) + 1
        if left < 0:
            break
        found.append(sentence)
    return found
