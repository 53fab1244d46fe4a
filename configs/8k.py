"""Stage 8k: base language modelling, 8,192 tokens a row (256 at scale tiny).

python -m experiments.launch --config=8k:tiny
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    c = base.get_config()
    c.stage = "8k"
    return c
