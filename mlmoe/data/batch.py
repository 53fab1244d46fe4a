"""What the data pipeline hands to the model."""

from typing import Any, NamedTuple

import numpy as np

Array = Any  # numpy on the host, jax.Array on devices, jax.ShapeDtypeStruct before there is either


class Batch(NamedTuple):
    """One batch of packed rows. B rows, T tokens each; every field is [B, T].

    A row is cut from `T + 1` packed tokens, so each of the T inputs has a target.
    """

    tokens_BT: Array  # int32 inputs
    targets_BT: Array  # int32, the token after each input
    segment_ids_BT: Array  # int32; 0 is padding, a change of id starts a new document
    positions_BT: Array  # int32, counted from the start of the document (or of its piece)
    weights_BT: Array  # f32; 0 where the target is padding or belongs to another document


def cut_share(batch: Batch, bos_id: int) -> float:
    """Share of the targets whose document began in another row; of numpy arrays, on the host.

    A piece of a document starts at position 0, the first one with bos.
    """
    index_T = np.arange(batch.tokens_BT.shape[1])
    start_BT = np.maximum.accumulate(np.where(batch.positions_BT == 0, index_T, 0), axis=1)
    first_BT = np.take_along_axis(batch.tokens_BT, start_BT, axis=1)
    targets = float(batch.weights_BT.sum())
    return float(np.sum(batch.weights_BT * (first_BT != bos_id))) / max(1.0, targets)
