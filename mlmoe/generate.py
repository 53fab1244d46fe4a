"""A text sample, by running the whole window again for every token.

The slow definition of generation: exact for every layer kind, no caches.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mlmoe.data.batch import Batch
from mlmoe.layers.router import Routing
from mlmoe.model import Model


def sample_tokens(
    model: Model,
    params: Any,
    routing: Routing,
    prompt: np.ndarray,
    *,
    context: int,
    count: int,
    vocab: int,
    stop_id: int,
    temperature: float,
    seed: int,
) -> np.ndarray:
    """Up to `count` token ids that follow `prompt`, drawn from softmax(logits / temperature).

    Only the last `context` tokens are seen. Ids from `vocab` on exist in the model's output but not
    in the tokenizer and are never drawn. Stops after `stop_id`.
    """

    @jax.jit
    def next_token(tokens_1T: jax.Array, length: jax.Array, key: jax.Array) -> jax.Array:
        position_1T = jnp.arange(context, dtype=jnp.int32)[None]
        segment_1T = (position_1T < length).astype(jnp.int32)
        row = Batch(tokens_1T, tokens_1T, segment_1T, position_1T, segment_1T.astype(jnp.float32))
        x_1TD, head_DW, _ = model.apply(params, routing, row)
        x_D = jnp.take(x_1TD[0], length - 1, axis=0).astype(jnp.float32)
        logits_W = jnp.einsum("D,DW->W", x_D, head_DW)
        logits_W = jnp.where(jnp.arange(logits_W.shape[0]) < vocab, logits_W, -jnp.inf)
        return jax.random.categorical(key, logits_W / temperature)

    ids = [int(t) for t in prompt]
    key = jax.random.key(seed)
    for i in range(count):
        window = ids[-context:]
        tokens_1T = np.zeros((1, context), np.int32)
        tokens_1T[0, : len(window)] = window
        ids.append(int(next_token(tokens_1T, np.int32(len(window)), jax.random.fold_in(key, i))))
        if ids[-1] == stop_id:
            break
    return np.asarray(ids[len(prompt) :], np.int32)
