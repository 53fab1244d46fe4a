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


def split_targets(batch: Batch, bos_id: int, eos_id: int) -> int:
    """Targets in pieces of documents that other rows have the rest of; numpy arrays, on the host.

    A piece starts at position 0 or with the row; a whole document starts with bos and ends with
    eos.
    """
    starts_BT = batch.positions_BT == 0
    starts_BT[:, 0] = True
    piece = np.cumsum(starts_BT.ravel()) - 1
    counted = batch.weights_BT.ravel() > 0
    begins = (batch.tokens_BT == bos_id) & starts_BT
    ends = counted & (batch.targets_BT.ravel() == eos_id)
    whole = (np.bincount(piece, begins.ravel()) > 0) & (np.bincount(piece, ends) > 0)
    return int(np.sum(counted & ~whole[piece]))
