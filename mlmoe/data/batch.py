"""What the data pipeline hands to the model."""

from typing import Any, NamedTuple

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
