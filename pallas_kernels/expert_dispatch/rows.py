"""Expert order in whole tiles: each expert's rows begin at a tile of `tm` rows.

A tile then has one expert, so a kernel visits it once. What an expert leaves of its last tile costs
work: half a tile on average, 128 rows on 1,170 at full scale. In one dense order a tile on a border
is worked on once for each of its experts, which is a whole tile an expert.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.expert_dispatch.kernel import Visits
from pallas_kernels.expert_dispatch.sorted import expert_order


class Rows(NamedTuple):
    """M = T tm rows; T tiles are enough for every routing, and the first few of them are used."""

    pair_M: jax.Array  # of the N A pairs the one in row m; any one where nobody owns the row
    place_NA: jax.Array  # the row of each pair; any row where the pair has no expert
    real_NA: jax.Array  # whether it has one
    visits: Visits  # each tile in use once; at least one visit, since a grid may not be empty
    visits_of_all: Visits  # the same and one visit, of no rows, for each expert that has none


def rows_in_tiles(experts_NA: jax.Array, experts: int, tm: int) -> Rows:
    """Where each pair goes. experts_NA int32; an expert outside 0 .. experts-1 is none."""
    order = expert_order(experts_NA, experts)
    pairs = experts_NA.size
    T = min(pairs, (pairs + experts * (tm - 1)) // tm)
    tiles_E = -(-order.counts_E // tm)
    first_E = jnp.cumsum(tiles_E) - tiles_E
    # Row m of the dense order, if it is of expert e, is row m + shift_e of this one.
    shift_E = tm * first_E - (jnp.cumsum(order.counts_E) - order.counts_E)

    def visits(seats_E, places, least):
        # One visit a seat, `places` at most. A seat beyond an expert's tiles has no rows.
        end_E = jnp.cumsum(seats_E)
        v_V = jnp.arange(places, dtype=jnp.int32)
        expert_V = jnp.sum(v_V[:, None] >= end_E[None, :], axis=1, dtype=jnp.int32)
        expert_V = expert_V.clip(max=experts - 1)
        seat_V = v_V - (end_E - seats_E)[expert_V]
        rows_V = (order.counts_E[expert_V] - tm * seat_V).clip(0, tm)
        tile_V = (first_E[expert_V] + seat_V).clip(max=T - 1)
        return Visits(expert_V, tile_V, rows_V, jnp.maximum(end_E[-1], least))

    used = visits(tiles_E, T, 1)
    shift_T = shift_E[used.expert_V]
    dense_TC = tm * jnp.arange(T)[:, None] + jnp.arange(tm)[None, :] - shift_T[:, None]
    place_NA = order.place_NA + shift_E[experts_NA.clip(0, experts - 1)]
    return Rows(
        order.pair_M[dense_TC.reshape(-1).clip(0, pairs - 1)],
        jnp.where(order.real_NA, place_NA, 0),
        order.real_NA,
        used,
        visits(jnp.maximum(tiles_E, 1), T + experts, 0),
    )
