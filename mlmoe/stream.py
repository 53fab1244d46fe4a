"""One incremental layer over a sequence of any length, in pieces, at constant memory."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mlmoe.config import ModelConfig
from mlmoe.layers.incremental import Carried, IncrementalAttention, first_carried
from mlmoe.layers.param import Named
from mlmoe.layers.sample import COLLECTION, Sample
from mlmoe.model import compute_dtype
from mlmoe.precision import recurrence64, relative_error, zeros_like64


class StreamLayer(NamedTuple):
    """An incremental layer as functions; for rows that are one document each."""

    init: Callable[[jax.Array], Any]  # key -> params
    start: Callable[[int], Carried]  # rows -> what is carried before the first token
    extend: Callable[[Any, jax.Array, Carried], tuple[jax.Array, Carried, Sample]]


def make_layer(config: ModelConfig, letter: str) -> StreamLayer:
    """The layer of a layout letter, D, A or S. `extend` is compiled once a length of piece."""
    dtype = compute_dtype(config.dtype)
    module = IncrementalAttention(config, dtype, letter)

    def one_document(x_BTD: jax.Array) -> jax.Array:
        return jnp.ones(x_BTD.shape[:2], jnp.int32)

    def init(key: jax.Array) -> Any:
        x_BTD = jnp.zeros((1, 2, config.d_model), dtype)
        boxes = module.init(key, x_BTD, one_document(x_BTD), one_document(x_BTD))["params"]
        return jax.tree.map(lambda x: x.value, boxes, is_leaf=lambda x: isinstance(x, Named))

    def extend(params: Any, x_BTD: jax.Array, carried: Carried) -> Any:
        (y_BTD, carried), left = module.apply(
            {"params": params},
            x_BTD,
            one_document(x_BTD),
            carried,
            method="extend",
            mutable=[COLLECTION],
        )
        (sample,) = left[COLLECTION]["sample"]
        return y_BTD, carried, sample

    def start(rows: int) -> Carried:
        return first_carried(config, dtype, letter, rows)

    return StreamLayer(init, start, jax.jit(extend))


def noise(config: ModelConfig, tokens: int, piece: int, seed: int = 0) -> Iterator[jax.Array]:
    """Inputs of `tokens` tokens, [1, piece, D] at a time: normal, as the norm before a mixer."""
    dtype = compute_dtype(config.dtype)
    for i, begin in enumerate(range(0, tokens, piece)):
        key = jax.random.fold_in(jax.random.key(seed), i)
        yield jax.random.normal(key, (1, min(piece, tokens - begin), config.d_model), dtype)


class Checked(NamedTuple):
    """A stretch of the sequence up to token `end`, against float64."""

    end: int
    state_error: float  # at `end`: RMS of the error over the RMS
    output_error: float  # over the tokens since the stretch before


def check(
    run: Callable[[jax.Array, Carried], tuple[jax.Array, Carried, Sample]],
    carried: Carried,
    pieces: Iterable[jax.Array],
    ends: Iterable[int],
) -> Iterator[Checked]:
    """Runs `pieces` of one row and compares with float64, which sees the same q, k, v, g, beta.

    Yields at each of `ends`, which must be ends of pieces.
    """
    waiting, state64, at = list(ends), None, 0
    wrong, size = 0.0, 0.0  # sums of squares: what is kept does not grow with the tokens
    for x_1TD in pieces:
        _, carried, sample = run(x_1TD, carried)
        sample = jax.device_get(sample)
        state64 = zeros_like64(sample.state) if state64 is None else state64
        o_Tc, state64 = recurrence64(sample.inputs, state64)
        wrong += float(np.sum(np.square(sample.o_Tc - o_Tc)))
        size += float(np.sum(np.square(o_Tc)))
        at += x_1TD.shape[1]
        if waiting and at == waiting[0]:
            output_error = (wrong / max(size, 1e-30)) ** 0.5
            yield Checked(waiting.pop(0), relative_error(sample.state, state64), output_error)
            wrong, size = 0.0, 0.0
