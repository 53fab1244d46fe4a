"""The train step of the main job, compiled by the real TPU compiler: our kernels, what is sent."""

import dataclasses
import importlib.util
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import configs
from mlmoe.build import abstract_batch, abstract_state, make_program
from mlmoe.config import TrainConfig, from_dict
from mlmoe.layers.balance import first_routing
from mlmoe.layers.latent_moe import LatentMoE
from mlmoe.layers.param import Named
from mlmoe.sharding import make_mesh, sharding
from pallas_kernels import aot, schedule
from tests.mlmoe.layers.test_attention import model_config

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="needs libtpu, which has wheels for Linux only (extra [plan])",
)


def test_the_train_step_compiles_for_v5p_with_our_kernels():
    c = configs.load("8k:tiny")
    c.context, c.model.dtype = 64, "bfloat16"
    config = from_dict(TrainConfig, c.to_dict())
    mesh, program = make_mesh(aot.devices("v5p")[:1]), make_program(config)
    args, whole = (abstract_state(program, mesh), abstract_batch(config, mesh)), sharding(mesh)
    step = jax.jit(program.train_step, donate_argnums=0, out_shardings=(whole, whole))
    with jax.set_mesh(mesh):
        compiled = step.trace(*args).lower(lowering_platforms=("tpu",)).compile()
    names = schedule.kernel_names(compiled.as_text())
    assert sum(n.startswith("bounded_decay_forward") for n in names) == 1
    assert sum(n.startswith("bounded_decay_backward") for n in names) == 1
    assert {"glu", "glu_grad", "product", "outer"} <= {
        found.group(1) for n in names if (found := re.search(r"expert_([a-z]+(_grad)?)", n))
    }


@pytest.mark.parametrize("buffer", [0.0, 1.5])
def test_tokens_go_to_experts_on_other_chips_at_latent_width(buffer: float) -> None:
    """8 chips as (2, 4): forward and backward of a LatentMoE, with respect to x and the experts."""
    D, E, R, F = 640, 8, 256, 384
    plain = model_config()
    moe = dataclasses.replace(
        plain.moe, experts=E, active=3, latent=R, hidden=F, shared_hidden=F, buffer=buffer
    )
    layer = LatentMoE(dataclasses.replace(plain, d_model=D, moe=moe), jnp.dtype("bfloat16"))
    mesh = make_mesh(aot.devices("v5p", "v5p:2x2x2"), expert=4)

    def described(shape: tuple[int, ...], dtype: Any, *axes: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding(mesh, *axes))

    routing = jax.tree.map(lambda x: x[0], first_routing(moe, 1))
    row = jax.ShapeDtypeStruct((1, 2, D), jnp.bfloat16), jnp.ones((1, 2), jnp.int32), routing
    boxes = jax.eval_shape(layer.init, jax.random.key(0), *row)["params"]
    params = jax.tree.map(
        lambda box: described(box.value.shape, jnp.float32, *box.names),
        boxes,
        is_leaf=lambda x: isinstance(x, Named),
    )
    experts = {name: params.pop(name) for name in ("w_in", "w_out")}
    x_BTD = described((8, 32, D), jnp.bfloat16, "batch", "time", "embed")
    document_BT = described((8, 32), jnp.int32, "batch", "time")

    def loss(x_BTD, experts, params, document_BT, routing):  # type: ignore[no-untyped-def]
        y, stats = layer.apply({"params": params | experts}, x_BTD, document_BT, routing)
        return jnp.sum(y.astype(jnp.float32) ** 2), stats

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
    routing = jax.tree.map(lambda x: described(x.shape, x.dtype), routing)
    args = (x_BTD, experts, params, document_BT, routing)
    with jax.set_mesh(mesh):
        text = gradient.trace(*args).lower(lowering_platforms=("tpu",)).compile().as_text()
    found = aot.collectives(text)
    sent = [c.shape for c in found if c.name == "ragged-all-to-all"]
    # Rows, and in the 128 words of a tile the ids and weights of their choices.
    assert {math.prod(shape[1:]) for shape in sent} == {R, 128}
    assert not [c for c in found if D in c.shape]
    # The gradients of the experts are added up over the chips that hold the same ones, no others.
    sums = [c for c in found if c.shape[1:] in ((2, R, F), (F, R))]
    assert [c.shape[0] for c in sums] == [E // 4, E // 4]
    same = r"\{0,4\},\{1,5\},\{2,6\},\{3,7\}|\{'data'\}"
    assert all(re.search(same, c.line) for c in sums)
