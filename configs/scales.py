"""Sizes of the model. A scale changes a full-scale stage config in place."""

from ml_collections import ConfigDict

# Every length of the curriculum is this much shorter at scale `tiny`.
TINY_CONTEXT = 32


def full(c: ConfigDict) -> None:
    """2p8t: 2.78 T parameters, 104 B active; what `configs/base.py` says."""
    c.scale = "2p8t"


def _shrink(c: ConfigDict, rows: int, steps: float, saves: int) -> None:
    """`rows` times fewer rows a step, this share of the steps, and `saves` checkpoints in all."""
    c.batch = max(1, c.batch // rows)
    c.steps = round(c.steps * steps)
    c.eval_every = c.save_every = c.state_check_every = max(1, c.steps // saves)
    c.optim.warmup = c.steps // 30


def small(c: ConfigDict) -> None:
    """A hundred million parameters: one accelerator, or a patient CPU with 16 GB."""
    c.scale = "small"
    c.context //= 4
    _shrink(c, rows=128, steps=1 / 20, saves=10)
    m = c.model
    m.update(layers=12, vocab=512, vocab_chunk=512, d_model=512, remat="dots")
    m.attention.update(heads=8, head_dim=64, q_rank=256, kv_rank=128, nope_dim=48, rope_dim=16)
    m.attention.update(v_dim=64)
    m.incremental.update(heads=8, key_dim=64, value_dim=64, slots=64, gate_rank=64)
    m.moe.update(dense_hidden=1536, experts=64, active=4, latent=256, hidden=192)
    m.moe.update(shared_hidden=512)
    m.residual.update(size=4)


def tiny(c: ConfigDict) -> None:
    """Learns on two CPU cores in minutes, with every mechanism of the full scale in it."""
    c.scale = "tiny"
    c.context //= TINY_CONTEXT
    _shrink(c, rows=256, steps=3 / 200, saves=3)
    c.eval_bytes = 1 << 16
    m = c.model
    m.update(layers=2, vocab=264, vocab_chunk=264, d_model=128, remat="none")
    m.attention.update(heads=2, head_dim=64, q_rank=64, kv_rank=64, nope_dim=48, rope_dim=16)
    m.attention.update(v_dim=64, kv_share=1)
    m.incremental.update(heads=2, key_dim=32, value_dim=64, slots=32, gate_rank=32)
    m.incremental.update(memory_max=1e4)
    m.moe.update(dense_hidden=384, experts=16, active=2, latent=64, hidden=96, shared_hidden=128)
    m.residual.update(size=1)
    c.optim.update(lr=5 * c.optim.lr, adam_lr=5 * c.optim.adam_lr)


SCALES = {"tiny": tiny, "small": small, "2p8t": full}
