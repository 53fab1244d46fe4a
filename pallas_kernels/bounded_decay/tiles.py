"""What chunked.py and slot.py share: one chunk's decays, document masks, reads and state update.

A chunk of C tokens is cut in tiles of 16. exp(G_i - G_j) is split at an anchor, the running sum at
the first row of i's tile: exp(G_i - anchor) <= 1, and exp(anchor - G_j) <= 1 for j in an earlier
tile, at most exp(75) in i's own. So every tile is one matmul of finite numbers, masked afterwards.
The anchor is never later than i: a later gate cannot move an earlier output by even one bit.

A document boundary is a mask on the tile, on reading the incoming state and on writing the outgoing
one. G runs on through boundaries: restarting it would make exponents positive without bound.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bounded_decay.ref import einsum

TILE = 16  # (TILE - 1) * 5 = 75 nats; f32 and bf16 overflow above 88.7


def chunk_size(K: int) -> int:
    """Tokens per scan step for key width K: 16 times a power of two.

    16 is fastest on a CPU at every width measured (a single tile has no wasted upper half). The
    backward pass keeps K*V/C f32 of state per token: at K=V=128 and C=16 that is eight times the
    keys, so wide heads take 64, which also fills a TPU's matrix unit better.
    """
    return 64 if K >= 128 else TILE


def split_chunks(inputs, document_BT, C: int):
    """[B,T,H,...] -> [N,B,H,C,...] with inert zeros to a multiple of C; document_BT -> [N,B,C].

    Returns (inputs, document_NBC, before_NB): before is the document the incoming state is from.
    """
    pad = -document_BT.shape[1] % C

    def split(x):
        x = jnp.pad(x, ((0, 0), (0, pad), (0, 0), (0, 0)))
        B, _, H, K = x.shape
        return x.reshape(B, -1, C, H, K).transpose(1, 0, 3, 2, 4)

    document = jnp.pad(document_BT, ((0, 0), (0, pad)), mode="edge")
    document_NBC = document.reshape(document.shape[0], -1, C).swapaxes(0, 1)
    last_NB = document_NBC[:, :, -1]
    before_NB = jnp.concatenate([jnp.zeros_like(last_NB[:1]), last_NB[:-1]])
    return jax.tree.map(split, inputs), document_NBC, before_NB


def join_chunks(o_NBHCV: jax.Array, T: int) -> jax.Array:
    N, B, H, C, V = o_NBHCV.shape
    return o_NBHCV.transpose(1, 0, 3, 2, 4).reshape(B, N * C, H, V)[:, :T]


class Chunk(NamedTuple):
    """Decays and masks of one chunk. Its methods take f32 [B,H,C,width] arrays."""

    G_BHCK: jax.Array  # running sum of g, inclusive
    query_BHaiK: jax.Array  # exp(G_i - anchor_a), tile a, row i of the tile
    key_BHaCK: jax.Array  # exp(anchor_a - G_j); 0 for j in a tile after a
    earlier_BHCC: jax.Array  # [B,1,C,C]: j < i and both in one document
    reads_BHC1: jax.Array  # [B,1,C,1]: the token continues the incoming state's document
    writes_BHC1: jax.Array  # [B,1,C,1]: the token is in the document the chunk ends with

    @classmethod
    def open(cls, g_BHCK, document_BC, before_B) -> "Chunk":
        B, H, C, K = g_BHCK.shape
        lower_CC = np.tril(np.ones((C, C), np.float32))
        G_BHCK = einsum("ij,BHjK->BHiK", lower_CC, g_BHCK)
        tiles_BHaiK = G_BHCK.reshape(B, H, C // TILE, TILE, K)
        anchor_BHa1K = tiles_BHaiK[:, :, :, :1]
        reached_aC = np.arange(C) // TILE <= np.arange(C // TILE)[:, None]
        to_key_BHaCK = anchor_BHa1K - G_BHCK[:, :, None]
        to_key_BHaCK = jnp.where(reached_aC[None, None, :, :, None], to_key_BHaCK, -jnp.inf)
        same_BCC = document_BC[:, :, None] == document_BC[:, None, :]
        return cls(
            G_BHCK=G_BHCK,
            query_BHaiK=jnp.exp(tiles_BHaiK - anchor_BHa1K),
            key_BHaCK=jnp.exp(to_key_BHaCK),
            earlier_BHCC=(same_BCC & np.tril(np.ones((1, C, C), bool), -1))[:, None],
            reads_BHC1=(document_BC == before_B[:, None])[:, None, :, None],
            writes_BHC1=(document_BC == document_BC[:, -1:])[:, None, :, None],
        )

    def scores(self, x_BHCK, y_BHCK):
        """sum_K x_i y_j exp(G_i - G_j) for earlier j, else 0: [B,H,C,C]."""
        x_BHaiK = x_BHCK.reshape(self.query_BHaiK.shape) * self.query_BHaiK
        y_BHaCK = y_BHCK[:, :, None] * self.key_BHaCK
        scores_BHaiC = einsum("BHaiK,BHaCK->BHaiC", x_BHaiK, y_BHaCK)
        return self._mask(scores_BHaiC.reshape(*x_BHCK.shape[:3], -1))

    def read_state(self, x_BHCK, S_BHKV):
        """(exp(G) x) S where the token continues the incoming document, else 0: [B,H,C,V]."""
        old_BHCV = einsum("BHCK,BHKV->BHCV", jnp.exp(self.G_BHCK) * x_BHCK, S_BHKV)
        return jnp.where(self.reads_BHC1, old_BHCV, 0.0)

    def read(self, q_BHCK, k_BHCK, new_BHCV, S_BHKV):
        """S_t^T q_t for every token t of the chunk: [B,H,C,V]."""
        # A token reads its own write undecayed. Kept out of the scores, it adds no rounding to the
        # gradient of g, which at g = -5 is a hundred times smaller than that term.
        own_BHCV = jnp.sum(q_BHCK * k_BHCK, -1, keepdims=True) * new_BHCV
        earlier_BHCV = einsum("BHij,BHjV->BHiV", self.scores(q_BHCK, k_BHCK), new_BHCV)
        return self.read_state(q_BHCK, S_BHKV) + earlier_BHCV + own_BHCV

    def read_across(self, q_BHCV, k_BHCK, new_BHCV, S_BHKV):
        """S_t q_t for every token t, the read-out over the side that decays: [B,H,C,K]."""
        old_BHCK = jnp.exp(self.G_BHCK) * einsum("BHCV,BHKV->BHCK", q_BHCV, S_BHKV)
        scores_BHCC = self._mask(einsum("BHiV,BHjV->BHij", q_BHCV, new_BHCV))
        scores_BHaiC = scores_BHCC.reshape(*self.query_BHaiK.shape[:4], -1)
        k_BHaCK = k_BHCK[:, :, None] * self.key_BHaCK
        earlier_BHaiK = self.query_BHaiK * einsum("BHaiC,BHaCK->BHaiK", scores_BHaiC, k_BHaCK)
        own_BHCK = jnp.sum(q_BHCV * new_BHCV, -1, keepdims=True) * k_BHCK
        old_BHCK = jnp.where(self.reads_BHC1, old_BHCK, 0.0)
        return old_BHCK + earlier_BHaiK.reshape(k_BHCK.shape) + own_BHCK

    def end_state(self, S_BHKV, k_BHCK, new_BHCV):
        """The state after the chunk's last token: [B,H,K,V]."""
        last_BH1K = self.G_BHCK[:, :, -1:]
        k_BHCK = k_BHCK * jnp.where(self.writes_BHC1, jnp.exp(last_BH1K - self.G_BHCK), 0.0)
        kept_BH1K = jnp.where(self.reads_BHC1[:, :, -1:], jnp.exp(last_BH1K), 0.0)
        return kept_BH1K.swapaxes(2, 3) * S_BHKV + einsum("BHCK,BHCV->BHKV", k_BHCK, new_BHCV)

    def _mask(self, scores_BHCC):
        # After the matmul: the entries masked are finite but as large as exp(75).
        return jnp.where(self.earlier_BHCC, scores_BHCC, 0.0)
