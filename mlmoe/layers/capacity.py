"""Experts with a limited number of seats: overflow goes to the next-best expert with room.

Tokens stand in a line by their place in the row (then by row), and an earlier one never gives way
to a later one: within a sequence nothing depends on what comes after, but for how much of it there
is, as the limit is a share of all tokens. Only for training: evaluation and generation have no
limit (`Routing.without_capacity`), so that no token depends on others. Everyone asks for the A
experts it likes best among those that have not refused it; an expert seats the first `limit` of the
line that asks and refuses the rest for good; the refused ask again. Without an end to the rounds
this is the same as seating the tokens one at a time (deferred acceptance, Gale and Shapley 1962,
where all experts rank alike). Who is still refused after the last round goes without.
"""

from typing import Any

import jax
import jax.numpy as jnp


def assign(
    choice_BTE: jax.Array, live_BT: jax.Array, capacity: jax.Array, active: int, rounds: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Experts [B T, A] int32 (-1: none), and how many choices were rerouted and dropped.

    No expert gets more than ceil(N A / E * capacity) of the N real tokens, and no token the same
    expert twice. `choice` is the score to rank by; `rounds` the most times the refused ask again.
    """
    B, T, E = choice_BTE.shape
    choice_NE = choice_BTE.swapaxes(0, 1).reshape(-1, E)  # the line: time first
    live_N1 = live_BT.T.reshape(-1, 1)
    # Less a few roundings: a product that is 15 must not become 15.000001, and 16 seats.
    limit = jnp.ceil(jnp.sum(live_N1) * active / E * capacity * (1.0 - 5e-7))

    def ask(refused_NE: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Whom each token asks, as [N, A] and as a mask [N, E]."""
        _, experts_NA = jax.lax.top_k(jnp.where(refused_NE, -jnp.inf, choice_NE), active)
        rows_N1 = jnp.arange(choice_NE.shape[0])[:, None]
        asked_NE = jnp.zeros_like(refused_NE).at[rows_N1, experts_NA].set(True)
        return experts_NA, asked_NE & ~refused_NE & live_N1

    def seated(asked_NE: jax.Array) -> jax.Array:
        # A scan of log depth: XLA:CPU's cumsum is quadratic.
        place_NE = jax.lax.associative_scan(jnp.add, asked_NE.astype(jnp.int32), axis=0)
        return asked_NE & (place_NE <= limit)

    def again(state: Any) -> Any:
        i, refused_NE, _ = state
        _, asked_NE = ask(refused_NE)
        turned_away_NE = asked_NE & ~seated(asked_NE)
        return i + 1, refused_NE | turned_away_NE, jnp.any(turned_away_NE)

    nobody_NE = jnp.zeros_like(choice_NE, bool)
    _, refused_NE, _ = jax.lax.while_loop(
        lambda s: (s[0] < rounds) & s[2], again, (jnp.zeros((), jnp.int32), nobody_NE, True)
    )
    experts_NA, asked_NE = ask(refused_NE)
    seated_NE = seated(asked_NE)
    has_NA = jnp.take_along_axis(seated_NE, experts_NA, axis=1)
    experts_NA = jnp.where(has_NA, experts_NA, -1)
    first_NE = ask(nobody_NE)[1]
    rerouted = jnp.sum(seated_NE & ~first_NE, dtype=jnp.int32)
    dropped = jnp.sum(live_N1, dtype=jnp.int32) * active - jnp.sum(seated_NE, dtype=jnp.int32)
    return experts_NA.reshape(T, B, active).swapaxes(0, 1).reshape(-1, active), rerouted, dropped
