"""Stage 256k: 262,144 tokens a row (8,192 at scale tiny), from the checkpoint of stage 64k.

python -m experiments.launch --config=256k:tiny --config.init_from=runs/64k-tiny

At tiny, in `experiments.curriculum` (30 steps): 1.27 bits/byte on its mixture, 3 minutes on two CPU
cores.

`architecture=staged`: the full hybrid, its attention layers with RoPE at a larger base.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(architecture: str = "fixed") -> ConfigDict:
    c = base.get_config()
    base.next_stage(c, "256k", context=262_144, batch=64, steps=4_000)
    c.data.join_files = True
    if architecture == "staged":
        c.model.layout = "interleaved_rotary"
        c.model.attention.rope_theta = 5e7
        c.model.residual.kind = "none"
    return c
