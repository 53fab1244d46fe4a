"""The LatentMoE layer against its float64 reference."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from mlmoe.config import ModelConfig
from mlmoe.layers.latent_moe import LatentMoE
from tests.golden import load
from tests.mlmoe.layers.test_attention import model_config, relative_rms
from tests.mlmoe.layers.test_router import moe_config, routing_of


def reference_layer(**changes: Any) -> tuple[LatentMoE, dict, dict]:
    ref = load("latent_moe")
    D, E = ref["w_router"].shape
    R, F, A = ref["latent_norm"].shape[0], ref["s_gate"].shape[1], int(ref["top_k"])
    moe = moe_config(experts=E, active=A, latent=R, hidden=F, shared_hidden=F, **changes)
    config = ModelConfig(**{**vars(model_config()), "d_model": D, "moe": moe})
    params = {
        "w_router": ref["w_router"],
        "w_down": ref["w_down_latent"],
        "w_up": ref["w_up_latent"],
        "w_in": np.stack([ref["e_gate"], ref["e_up"]], axis=1),
        "w_out": ref["e_down"],
        "latent_norm": {"gain": ref["latent_norm"]},
        "shared": {"w_in": np.stack([ref["s_gate"], ref["s_up"]]), "w_out": ref["s_down"]},
    }
    return LatentMoE(config, jnp.dtype("float32")), params, ref


def test_layer_meets_the_reference() -> None:
    layer, params, ref = reference_layer()
    x_BTD = ref["x"][None]
    y, stats = layer.apply(
        {"params": params}, x_BTD, jnp.ones(x_BTD.shape[:2], int), routing_of(ref["bias"])
    )
    assert relative_rms(y[0], ref["y"]) < 1e-5
    np.testing.assert_array_equal(
        stats.load_E[0], np.bincount(ref["experts"].ravel(), minlength=16)
    )


def test_padding_takes_no_expert_and_changes_no_other_token() -> None:
    layer, params, ref = reference_layer()
    x_BTD = ref["x"][None]
    document_BT = jnp.where(jnp.arange(x_BTD.shape[1]) < 10, 1, 0)[None]
    noise = x_BTD + jnp.where(document_BT[..., None] > 0, 0.0, 100.0)
    y, stats = layer.apply({"params": params}, noise, document_BT, routing_of(ref["bias"]))
    assert relative_rms(y[0, :10], ref["y"][:10]) < 1e-5
    assert int(stats.load_E.sum()) == 10 * int(ref["top_k"])
