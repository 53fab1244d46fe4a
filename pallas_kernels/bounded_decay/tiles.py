"""What chunked.py and slot.py share: one chunk's decays, document masks, reads and state update.

A chunk of C tokens is cut in tiles of 16. With P the running sum of g inside a tile, from 0 again
at each document, exp(G_i - G_j) is a product of factors that each need one token only:

    own tile       exp(P_i) * exp(-P_j)
    earlier tiles  exp(P_i) * exp(sum of the tiles between and of j's from j on)

exp(-P_j) reaches exp(80) and exp(P_i) falls to exp(-80); every other factor is at most 1. So each
tile is one matmul of finite numbers, masked afterwards. The sums end before a later g and begin
after another document's: neither moves what an earlier token or another document computes, not by
one bit.

Query factors carry 2^54 and key factors 2^-54, which changes nothing where nothing underflows.
Without them exp(-80) times the gradient of a mean loss, 1e-8 say, is below f32's 1e-38, is flushed
to zero, and takes the gradients of k and g with it.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bounded_decay.ref import einsum

TILE = 16  # TILE * 5 = 80 nats; f32 and bf16 overflow above 88.7
QUERY_SCALE, KEY_SCALE = 2.0**54, 2.0**-54  # the square root of exp(80), about, and exact


def chunk_size(K: int) -> int:
    """Tokens per scan step for key width K: 16 times a power of two.

    16 is fastest on a CPU at every width measured (a single tile has no wasted upper half). The
    backward pass keeps K*V/C f32 of state per token: at K=V=128 and C=16 that is eight times the
    keys, so wide heads take 64, which also fills a TPU's matrix unit better.
    """
    return 64 if K >= 128 else TILE


def split_chunks(inputs, document_BT, C: int, group: int = 1):
    """[B,T,H,...] -> [groups,group,B,H,C,...] with inert zeros to whole groups of chunks.

    Returns (inputs, document [groups,group,B,C], before [groups,group,B]): before is the document
    that the incoming state is from.
    """
    pad = -document_BT.shape[1] % (C * group)

    def split(x):
        x = jnp.pad(x, ((0, 0), (0, pad), (0, 0), (0, 0)))
        B, _, H, K = x.shape
        return x.reshape(B, -1, group, C, H, K).transpose(1, 2, 0, 4, 3, 5)

    last_BT = jnp.broadcast_to(document_BT[:, -1:], (document_BT.shape[0], pad))
    document = jnp.concatenate([document_BT, last_BT], 1)
    document_NBC = document.reshape(document.shape[0], -1, C).swapaxes(0, 1)
    last_NB = document_NBC[:, :, -1]
    before_NB = jnp.concatenate([jnp.zeros_like(last_NB[:1]), last_NB[:-1]])
    grouped = [x.reshape(-1, group, *x.shape[1:]) for x in (document_NBC, before_NB)]
    return jax.tree.map(split, inputs), *grouped


def join_chunks(o_GNBHCV: jax.Array, T: int) -> jax.Array:
    """The outputs of groups of chunks as [B,T,H,V]."""
    G, N, B, H, C, V = o_GNBHCV.shape
    return o_GNBHCV.transpose(2, 0, 1, 4, 3, 5).reshape(B, G * N * C, H, V)[:, :T]


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def scaled_exp(x: jax.Array, scale: float) -> jax.Array:
    """exp(x) * scale, whose derivative is itself: scale times a small cotangent would underflow."""
    return jnp.exp(x) * scale


@scaled_exp.defjvp
def _scaled_exp_jvp(scale, primals, tangents):
    y = scaled_exp(primals[0], scale)
    return y, y * tangents[0]


def _not_above_0(x: jax.Array) -> jax.Array:
    """x where it is at most 0, else 0: above it is only what a mask drops (other documents).

    Not `minimum`: at 0, the tile's last token, its gradient would be one half.
    """
    return jnp.where(x > 0, 0.0, x)


class Chunk(NamedTuple):
    """Decays and masks of one chunk. Its methods take f32 [B,H,C,width] arrays."""

    query_BHaiK: jax.Array  # exp(P_i) * QUERY_SCALE, tile a, row i of the tile
    key_BHaCK: jax.Array  # exp(G at the start of tile a - G_j) * KEY_SCALE; 0 in a tile after a
    start_BHCK: jax.Array  # exp(G_i): the decay since the chunk began
    rest_BHCK: jax.Array  # exp(G_C - G_j): until the chunk ends
    whole_BH1K: jax.Array  # exp(G_C)
    earlier_BHCC: jax.Array  # [B,1,C,C]: j < i and both in one document
    reads_BHC1: jax.Array  # [B,1,C,1]: the token continues the incoming state's document
    writes_BHC1: jax.Array  # [B,1,C,1]: the token is in the document the chunk ends with
    same_BCC: jax.Array  # i and j are in one document

    @classmethod
    def open(cls, g_BHCK, document_BC, before_B) -> "Chunk":
        B, H, C, K = g_BHCK.shape
        tiles = C // TILE
        same_BCC = document_BC[:, :, None] == document_BC[:, None, :]
        tile_C = np.arange(C) // TILE
        in_tile_CC = np.tril(tile_C[:, None] == tile_C[None, :])
        P_BHCK = einsum("Bij,BHjK->BHiK", (same_BCC & in_tile_CC[None]).astype(jnp.float32), g_BHCK)
        P_BHaiK = P_BHCK.reshape(B, H, tiles, TILE, K)
        # A whole tile's decay is its last P, where the tile is in one document; where it is not,
        # every use of it is masked.
        tile_BHaK = P_BHaiK[:, :, :, -1]
        before_ab = np.tri(tiles, tiles, -1, dtype=np.float32)  # tiles b before a
        since_BHaK = einsum("ab,BHbK->BHaK", before_ab, tile_BHaK)
        until_BHaK = einsum("ab,BHbK->BHaK", np.ascontiguousarray(before_ab.T), tile_BHaK)
        # Tile c lies from b on and before a. Differences of running sums would round differently
        # when another document changes.
        between_abc = before_ab[:, None, :] * np.tri(tiles, dtype=np.float32).T[None]
        between_BHabK = einsum("abc,BHcK->BHabK", between_abc, tile_BHaK)
        to_key_BHabiK = between_BHabK[:, :, :, :, None] - P_BHaiK[:, :, None]
        a, b = np.indices((tiles, tiles))[..., None, None]
        to_key_BHabiK = jnp.where((b < a)[None, None], _not_above_0(to_key_BHabiK), to_key_BHabiK)
        to_key_BHabiK = jnp.where((b > a)[None, None], -jnp.inf, to_key_BHabiK)
        to_end_BHaiK = tile_BHaK[:, :, :, None] - P_BHaiK + until_BHaK[:, :, :, None]
        return cls(
            query_BHaiK=scaled_exp(P_BHaiK, QUERY_SCALE),
            key_BHaCK=scaled_exp(to_key_BHabiK, KEY_SCALE).reshape(B, H, tiles, C, K),
            start_BHCK=jnp.exp(P_BHaiK + since_BHaK[:, :, :, None]).reshape(B, H, C, K),
            rest_BHCK=jnp.exp(_not_above_0(to_end_BHaiK)).reshape(B, H, C, K),
            whole_BH1K=jnp.exp(since_BHaK[:, :, -1:] + tile_BHaK[:, :, -1:]),
            earlier_BHCC=(same_BCC & np.tril(np.ones((1, C, C), bool), -1))[:, None],
            reads_BHC1=(document_BC == before_B[:, None])[:, None, :, None],
            writes_BHC1=(document_BC == document_BC[:, -1:])[:, None, :, None],
            same_BCC=same_BCC,
        )

    def scores(self, rows_BHCK, y_BHCK):
        """sum_K x_i y_j exp(G_i - G_j) for earlier j, else 0, of each x in `rows`: [B,H,C,C]."""
        scores_BHaiC = einsum("BHaiK,BHaCK->BHaiC", self.queries(rows_BHCK), self.keys(y_BHCK))
        return self.earlier(self.split_rows(scores_BHaiC, len(rows_BHCK)))

    def scores_gradient(self, rows_BHCK, y_BHCK, dscores_BHCC):
        """The gradients of `rows` (a list) and of y from those of `scores`."""
        B, H, C, K = y_BHCK.shape
        dscores = [x.reshape(B, H, C // TILE, TILE, C) for x in self.earlier(dscores_BHCC)]
        dscores_BHaiC = jnp.concatenate(dscores, 3)
        drows_BHaiK = einsum("BHaiC,BHaCK->BHaiK", dscores_BHaiC, self.keys(y_BHCK))
        dy_BHaCK = einsum("BHaiC,BHaiK->BHaCK", dscores_BHaiC, self.queries(rows_BHCK))
        query_BHCK = self.query_BHaiK.reshape(B, H, C, K)
        drows = [query_BHCK * x for x in self.split_rows(drows_BHaiK, len(rows_BHCK))]
        return drows, jnp.sum(self.key_BHaCK * dy_BHaCK, 2)

    def queries(self, rows_BHCK):
        """Each x in `rows` times exp(P), one above the other in each tile: [B,H,a,i,K]."""
        shape = self.query_BHaiK.shape
        return jnp.concatenate([x.reshape(shape) * self.query_BHaiK for x in rows_BHCK], 3)

    def keys(self, y_BHCK):
        """y as each tile's queries see it: [B,H,a,C,K]."""
        return y_BHCK[:, :, None] * self.key_BHaCK

    def split_rows(self, x_BHaiK, n: int):
        """The n arrays [B,H,C,width] whose rows are one above the other in each tile."""
        B, H, a, _, K = x_BHaiK.shape
        return [x.reshape(B, H, a * TILE, K) for x in jnp.split(x_BHaiK, n, axis=3)]

    def earlier(self, scores_BHCC):
        """Each of the arrays with 0 where j is not earlier than i in one document."""
        # After the matmul: the entries masked are finite but as large as exp(75).
        return [jnp.where(self.earlier_BHCC, x, 0.0) for x in scores_BHCC]

    def from_state(self, x_BHCK):
        """exp(G) x where the token continues the incoming document, else 0: [B,H,C,K].

        Its own transpose, as is to_state."""
        return jnp.where(self.reads_BHC1, self.start_BHCK * x_BHCK, 0.0)

    def to_state(self, k_BHCK):
        """exp(G_C - G) k where the token is in the outgoing document, else 0: [B,H,C,K]."""
        return jnp.where(self.writes_BHC1, k_BHCK * self.rest_BHCK, 0.0)

    def kept_BHK1(self):
        """exp(G_C), what is left of the incoming state; 0 where a document has begun since."""
        kept_BH1K = jnp.where(self.reads_BHC1[:, :, -1:], self.whole_BH1K, 0.0)
        return kept_BH1K.swapaxes(2, 3)

    def read(self, q_BHCK, k_BHCK, new_BHCV, S_BHKV):
        """S_t^T q_t for every token t of the chunk: [B,H,C,V]."""
        own_BHCV = jnp.sum(q_BHCK * k_BHCK, -1, keepdims=True) * new_BHCV
        earlier_BHCV = einsum("BHij,BHjV->BHiV", *self.scores([q_BHCK], k_BHCK), new_BHCV)
        old_BHCV = einsum("BHCK,BHKV->BHCV", self.from_state(q_BHCK), S_BHKV)
        return old_BHCV + earlier_BHCV + own_BHCV

    def read_across(self, q_BHCV, k_BHCK, new_BHCV, S_BHKV):
        """S_t q_t for every token t, the read-out over the side that decays: [B,H,C,K]."""
        old_BHCK = self.start_BHCK * einsum("BHCV,BHKV->BHCK", q_BHCV, S_BHKV)
        (scores_BHCC,) = self.earlier([einsum("BHiV,BHjV->BHij", q_BHCV, new_BHCV)])
        scores_BHaiC = scores_BHCC.reshape(*self.query_BHaiK.shape[:4], -1)
        seen_BHaiK = einsum("BHaiC,BHaCK->BHaiK", scores_BHaiC, self.keys(k_BHCK))
        earlier_BHaiK = self.query_BHaiK * seen_BHaiK
        own_BHCK = jnp.sum(q_BHCV * new_BHCV, -1, keepdims=True) * k_BHCK
        old_BHCK = jnp.where(self.reads_BHC1, old_BHCK, 0.0)
        return old_BHCK + earlier_BHaiK.reshape(k_BHCK.shape) + own_BHCK

    def end_state(self, S_BHKV, k_BHCK, new_BHCV):
        """The state after the chunk's last token: [B,H,K,V]."""
        written_BHKV = einsum("BHCK,BHCV->BHKV", self.to_state(k_BHCK), new_BHCV)
        return self.kept_BHK1() * S_BHKV + written_BHKV
