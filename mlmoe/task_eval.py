"""Long-context evaluation: accuracy on the synthetic tasks, and held-out loss by position.

An example is right when each of its answer tokens is the most likely one after all the tokens
before it, those of the answer too. That is exactly when greedy decoding writes the answer, as up to
the first mistake both see the same. Experts have no capacity, and no array is [T, W]: logits exist
for some answers, or some tokens, of each row at a time.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mlmoe.build import compiler_options, put
from mlmoe.data.batch import Batch
from mlmoe.data.heldout import cut
from mlmoe.data.packing import Row, to_batch
from mlmoe.data.pipeline import encode_document
from mlmoe.data.sources import Corpus
from mlmoe.data.tasks import Example
from mlmoe.data.tokenizers import Tokenizer
from mlmoe.layers.router import Routing
from mlmoe.loss import logits, token_logits
from mlmoe.model import Model
from mlmoe.sharding import sharding

ANSWERS = 128  # of a row that are looked at together
TOKENS = 1024  # of a row whose loss is taken together
BATCH_TOKENS = 8192  # of a device at a time, unless one row is longer
DOCUMENTS = 20_000  # held-out documents of a source that are searched for long ones
PIECES = 4  # most of one document


class Score(NamedTuple):
    """Counts over examples; `answers` are single tokens."""

    examples: int
    right: int
    answers: int
    answers_right: int

    @property
    def accuracy(self) -> float:
        return self.right / self.examples

    @property
    def error(self) -> float:
        """Standard error of the accuracy: sqrt(p (1 - p) / n) with p = (right + 1/2) / (n + 1).

        The plain share for p would claim an error of 0 where all examples, or none, are right.
        """
        p = (self.right + 0.5) / (self.examples + 1)
        return math.sqrt(p * (1 - p) / self.examples)


def make_answer_step(model: Model, vocab: int) -> Callable[..., jax.Array]:
    """(params, routing, batch, at_BA) -> the four counts of Score, int32.

    `at_BA` lists each row's answers: positions of the inputs they follow, then -1. Ids from `vocab`
    on exist in the model's output but not in the tokenizer and are never the most likely.
    """

    def step(params: Any, routing: Routing, batch: Batch, at_BA: jax.Array) -> jax.Array:
        x_BTD, head_DW, _ = model.apply(params, routing.without_capacity(), batch)
        known_W = jnp.arange(head_DW.shape[1]) < vocab
        n_B = jnp.sum(at_BA >= 0, axis=1, dtype=jnp.int32)

        def look(i: jax.Array, wrong_B: jax.Array) -> jax.Array:
            at_BC = jax.lax.dynamic_slice_in_dim(at_BA, i * ANSWERS, ANSWERS, axis=1)
            index_BC = jnp.maximum(at_BC, 0)
            x_BCD = jnp.take_along_axis(x_BTD, index_BC[..., None], axis=1)
            logits_BCW = jnp.where(known_W[None, None], logits(x_BCD, head_DW), -jnp.inf)
            wanted_BC = jnp.take_along_axis(batch.targets_BT, index_BC, axis=1)
            missed_BC = (jnp.argmax(logits_BCW, axis=-1) != wanted_BC) & (at_BC >= 0)
            return wrong_B + jnp.sum(missed_BC, axis=1, dtype=jnp.int32)

        steps = -(-jnp.max(n_B) // ANSWERS)
        wrong_B = jax.lax.fori_loop(0, steps, look, jnp.zeros_like(n_B))
        right_B = (n_B > 0) & (wrong_B == 0)
        counts = (n_B > 0, right_B, n_B, n_B - wrong_B)
        return jnp.stack([jnp.sum(x, dtype=jnp.int32) for x in counts])

    return step


def make_position_step(model: Model, vocab_chunk: int) -> Callable[..., jax.Array]:
    """(params, routing, batch) -> nats of each target, [B, T] f32; -1 where there is none."""

    def step(params: Any, routing: Routing, batch: Batch) -> jax.Array:
        x_BTD, head_DW, _ = model.apply(params, routing.without_capacity(), batch)
        B, T = batch.targets_BT.shape
        size = min(T, TOKENS)

        def blocks(x: jax.Array) -> jax.Array:
            x = jnp.pad(x, ((0, 0), (0, -T % size)) + ((0, 0),) * (x.ndim - 2))
            return jnp.moveaxis(x.reshape(B, -1, size, *x.shape[2:]), 1, 0)

        def nats(block: tuple[jax.Array, jax.Array]) -> jax.Array:
            lse_BC, target_BC, _ = token_logits(block[0], head_DW, block[1], vocab_chunk)
            return lse_BC - target_BC

        nats_NBC = jax.lax.map(nats, (blocks(x_BTD), blocks(batch.targets_BT)))
        nats_BT = jnp.moveaxis(nats_NBC, 0, 1).reshape(B, -1)[:, :T]
        return jnp.where(batch.weights_BT > 0, nats_BT, -1.0)

    return step


def rows_at(length: int, most: int, mesh: jax.sharding.Mesh) -> int:
    """Rows of a batch: about BATCH_TOKENS a device, no more than `most` need, one at least."""
    devices = mesh.devices.size
    return devices * max(1, min(BATCH_TOKENS // length, -(-most // devices)))


def answer_batch(examples: Sequence[Example], rows: int, length: int) -> tuple[Batch, np.ndarray]:
    """Examples as `rows` padded rows of `length` inputs, and where their answers are."""
    at_BA = np.full((rows, -(-length // ANSWERS) * ANSWERS), -1, np.int32)
    for at_A, example in zip(at_BA, examples, strict=False):
        at = np.flatnonzero(example.answer) - 1
        at_A[: len(at)] = at
    return _batch([example.tokens for example in examples], rows, length), at_BA


def _batch(texts: Sequence[np.ndarray], rows: int, length: int) -> Batch:
    """Each text a row of its own, in a batch of `rows`."""
    tokens = np.zeros((rows, length + 1), np.int32)
    segments = np.zeros_like(tokens)
    for i, text in enumerate(texts):
        tokens[i, : len(text)], segments[i, : len(text)] = text, 1
    return to_batch([Row(t, s) for t, s in zip(tokens, segments, strict=True)])


class Evaluator:
    """A trained model on a mesh. Compiling is a call of its own: the caller can say that it waits.

    `rows` of a batch must be a multiple of the devices, as those of `rows_at` are.
    """

    def __init__(self, model: Model, params: Any, routing: Routing, mesh: jax.sharding.Mesh):
        self.model, self.weights, self.mesh = model, (params, routing), mesh

    def compile_answers(self, rows: int, length: int, vocab: int) -> Callable[..., jax.Array]:
        """The answer step for batches of this shape."""
        return self._compile(make_answer_step(self.model, vocab), answer_batch([], rows, length))

    def compile_positions(self, rows: int, length: int, chunk: int) -> Callable[..., jax.Array]:
        """The position step for batches of this shape."""
        return self._compile(make_position_step(self.model, chunk), (_batch([], rows, length),))

    def _compile(self, step: Callable[..., jax.Array], inputs: Any) -> Callable[..., jax.Array]:
        jitted = jax.jit(step, out_shardings=sharding(self.mesh))
        with jax.set_mesh(self.mesh):
            lowered = jitted.lower(*self.weights, *self._put(inputs))
            return lowered.compile(compiler_options())

    def _put(self, inputs: Any) -> Any:
        """This process' share of the rows, which every process makes, on its devices."""
        turn, turns = jax.process_index(), jax.process_count()
        mine = jax.tree.map(lambda x: np.array_split(x, turns)[turn], inputs)
        return put(mine, self.mesh)

    def score(
        self,
        step: Callable[..., jax.Array],
        examples: Iterable[Example],
        rows: int,
        length: int,
        check: Callable[[], None],
    ) -> Score:
        """Counts over all examples; `check` is called before each batch and may raise to stop."""
        total = np.zeros(4, np.int64)
        for group in _groups(examples, rows):
            check()
            total += np.asarray(step(*self.weights, *self._put(answer_batch(group, rows, length))))
        return Score(*total.tolist())

    def loss_by_position(
        self,
        step: Callable[..., jax.Array],
        texts: Sequence[np.ndarray],
        rows: int,
        check: Callable[[], None],
    ) -> "PositionLoss":
        """Held-out loss of `texts`, all of `length` + 1 tokens, as a function of the position."""
        length = len(texts[0]) - 1
        edges = position_edges(length)
        means = []
        for group in _groups(texts, rows):
            check()
            nats = np.asarray(step(*self.weights, *self._put((_batch(group, rows, length),))))
            nats = nats[nats[:, 0] != -1].astype(np.float64)  # without the rows that fill up
            sums = np.add.reduceat(nats, edges[:-1], axis=1)
            means.append(sums / np.diff(edges))
        each = np.concatenate(means)
        n = len(each)
        error = (
            each.std(axis=0, ddof=1) / math.sqrt(n) if n > 1 else np.full(len(edges) - 1, np.nan)
        )
        return PositionLoss(edges, each.mean(axis=0), error, n)


class PositionLoss(NamedTuple):
    """Mean nats a token at positions edges[i] .. edges[i + 1] - 1, and their standard error."""

    edges: np.ndarray
    nats: np.ndarray
    error: np.ndarray  # over rows; NaN for a single one
    rows: int


def position_edges(length: int) -> np.ndarray:
    """0, 8, 11, 16, 23, 32, ...: two buckets an octave, up to `length`."""
    octaves = math.log2(max(length, 8))
    inner = np.round(2 ** np.arange(3, octaves, 0.5)).astype(int)
    return np.array([0, *inner[inner < length].tolist(), length])


def long_pieces(
    corpus: Corpus, tokenizer: Tokenizer, length: int, most: int
) -> tuple[list[np.ndarray], int]:
    """Pieces of `length` + 1 tokens of held-out documents, and the longest document's tokens.

    Only whole pieces: every position is then an average over the same texts. Documents are in
    random order, sources in turn; the search ends after `most` pieces.
    """
    pieces: list[np.ndarray] = []
    longest = 0
    sources = [itertools.islice(part.heldout, DOCUMENTS) for part in corpus.parts]
    for document in itertools.chain.from_iterable(itertools.zip_longest(*sources)):
        if document is None:
            continue
        tokens = encode_document(tokenizer, document)
        longest = max(longest, len(tokens))
        whole = [piece for piece in cut(tokens, length + 1) if len(piece) == length + 1]
        pieces += whole[:PIECES]
        if len(pieces) >= most:
            break
    return pieces[:most], longest


def _groups(items: Iterable[Any], size: int) -> Iterable[list[Any]]:
    remaining = iter(items)
    while group := list(itertools.islice(remaining, size)):
        yield group
