"""Stage 64k: 65,536 tokens a row (2,048 at scale tiny), from the checkpoint of stage 8k.

python -m experiments.launch --config=64k:tiny --config.init_from=runs/8k-tiny

At tiny, in `experiments.curriculum` (338 steps of tasks, 188 with text): 1.57 bits/byte on
its mixture, 8 minutes on two CPU cores.

`architecture=staged`: the first half of the layers becomes incremental, with the weights of the
attention layers that they replace; the other half stays attention with RoPE, at a larger base.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(architecture: str = "fixed") -> ConfigDict:
    c = base.get_config()
    base.next_stage(c, "64k", context=65_536, batch=256, steps=10_000)
    if architecture == "staged":
        c.model.layout = "half_interleaved"
        c.model.attention.rope_theta = 5e6
        c.model.residual.kind = "none"
    return c
