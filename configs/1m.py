"""Stage 1m: 1,048,576 tokens a row (32,768 at scale tiny), from the checkpoint of stage 256k.

python -m experiments.launch --config=1m:tiny --config.init_from=runs/256k-tiny

At tiny, in `experiments.curriculum` (6 steps): all pass keys to 32,768 tokens, 4 minutes on two CPU
cores.

`architecture=staged`: attention without positions but in every third attention layer, latents
shared by three of them, the softmax over depth switched on, and a sharper router.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(architecture: str = "fixed") -> ConfigDict:
    c = base.get_config()
    base.next_stage(c, "1m", context=1_048_576, batch=16, steps=2_000)
    c.data.join_files = True
    if architecture == "staged":
        c.model.layout = "interleaved_third_rotary"
        c.model.attention.update(rope_theta=1e8, kv_share=3)
        c.model.moe.temperature_final = 0.8
    return c
