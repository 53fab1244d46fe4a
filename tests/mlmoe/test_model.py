"""The whole model: every letter and residual, causality, packing, remat, scan, and its sharding."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import configs
from mlmoe.config import ModelConfig, from_dict
from mlmoe.data.batch import Batch
from mlmoe.layers.balance import first_routing
from mlmoe.layers.layer import LayerSpec
from mlmoe.loss import cross_entropy
from mlmoe.model import Segment, blocks, make_model, segments


def small(layout: str = "DL", **changes: Any) -> ModelConfig:
    """A model of a few thousand parameters with every mechanism of `tiny`."""
    c = configs.load("8k:tiny").model
    c.update(layout=layout, layers=len(layout), vocab=40, vocab_chunk=40, d_model=16)
    c.attention.update(heads=2, head_dim=8, q_rank=8, kv_rank=8, nope_dim=6, rope_dim=2, v_dim=8)
    c.incremental.update(heads=2, key_dim=8, value_dim=8, slots=6, gate_rank=4)
    c.moe.update(dense_hidden=24, experts=6, active=2, latent=8, hidden=12, shared_hidden=16)
    c.update(changes)
    return from_dict(ModelConfig, c.to_dict())


def residual(config: ModelConfig, kind: str, size: int) -> ModelConfig:
    changed = dataclasses.replace(config.residual, kind=kind, size=size)
    return dataclasses.replace(config, residual=changed)


def batch(segments: list[list[int]], seed: int = 0) -> Batch:
    segment_BT = np.asarray(segments, np.int32)
    tokens = np.random.default_rng(seed).integers(
        0, 40, size=(2, *segment_BT.shape), dtype=np.int32
    )
    new = np.diff(segment_BT, axis=1, prepend=-1) != 0
    start = np.maximum.accumulate(np.where(new, np.arange(segment_BT.shape[1]), 0), axis=1)
    position_BT = (np.arange(segment_BT.shape[1]) - start).astype(np.int32)
    weights = (segment_BT > 0).astype(np.float32)
    return Batch(tokens[0], tokens[1], segment_BT, position_BT, weights)


def loss_and_grad(config: ModelConfig, data: Batch, params: Any = None) -> tuple[Any, Any]:
    model = make_model(config)
    params = model.init(jax.random.key(0)) if params is None else params
    routing = first_routing(config.moe, config.moe_layers)

    def loss(params):  # type: ignore[no-untyped-def]
        x, head, stats = model.apply(params, routing, data)
        sums = cross_entropy(x, head, data.targets_BT, data.weights_BT, config.vocab_chunk)
        return sums.nats, stats

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)


def close(a: Any, b: Any, rtol: float) -> None:
    """Every leaf agrees to rtol of its own largest value."""

    def check(x: jax.Array, y: jax.Array) -> None:
        scale = float(jnp.abs(y).max()) + 1e-6
        np.testing.assert_allclose(x, y, atol=rtol * scale, rtol=0)

    jax.tree.map(check, a, b)


def close_to_1e_5(a: Any, b: Any) -> None:
    close(a, b, 1e-5)


ROW = [[1] * 12 + [2] * 17 + [0] * 4]


@pytest.mark.parametrize(
    ("layout", "kind"),
    [("FLRBDAS", "none"), ("SS", "none"), ("DL", "block"), ("DL", "window")],
)
def test_every_letter_and_residual_learns_everywhere(layout: str, kind: str) -> None:
    config, experts = residual(small(layout), kind, 1), len(layout) - 1
    (loss, stats), grads = loss_and_grad(config, batch(ROW))
    assert np.isfinite(float(loss))
    assert stats.load_E.shape == (experts, 1, 6) and int(stats.load_E.sum()) == 29 * 2 * experts
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        name = jax.tree_util.keystr(path)
        assert np.isfinite(np.asarray(grad)).all(), name
        # A read of one source has nothing to weigh, and before the first layer there is no output.
        idle = "read" in name if kind == "block" else "D0']['window" in name
        if not idle:
            assert float(jnp.abs(grad).max()) > 0.0, f"{name} gets no gradient"


@pytest.mark.parametrize(
    "layout", ["DL", *(pytest.param(x, marks=pytest.mark.slow) for x in ("SF", "AR"))]
)
def test_packed_equals_separate(layout: str) -> None:
    config = small(layout)
    packed = batch(ROW)
    cut = [Batch(*(x[:, a:b] for x in packed)) for a, b in ((0, 12), (12, 29))]
    model = make_model(config)
    params, apply = jax.jit(model.init)(jax.random.key(0)), jax.jit(model.apply)
    routing = first_routing(config.moe, config.moe_layers)
    hidden = apply(params, routing, packed)[0][:, :29]
    alone = jnp.concatenate([apply(params, routing, b)[0] for b in cut], axis=1)
    close(hidden, alone, 1e-5)


@pytest.mark.parametrize(("layout", "dense_layers"), [("FL", 2), ("DAL", 1)])
def test_changing_one_document_moves_nothing_of_another(layout: str, dense_layers: int) -> None:
    config = small(layout)
    config = dataclasses.replace(
        config, moe=dataclasses.replace(config.moe, dense_layers=dense_layers)
    )
    data = batch(ROW)
    changed = data._replace(tokens_BT=data.tokens_BT.copy())
    changed.tokens_BT[0, 11] += 1
    model = make_model(config)
    params = model.init(jax.random.key(0))
    apply = jax.jit(model.apply)
    routing = first_routing(config.moe, config.moe_layers)
    a, b = apply(params, routing, data)[0], apply(params, routing, changed)[0]
    # Bit for bit, except where sums run on through a boundary (the decay's running sum) or experts
    # see the tokens of all documents in one matmul, whose rounding depends on a row's place in it.
    same = np.testing.assert_array_equal if layout == "FL" else close_to_1e_5
    same(a[0, :11], b[0, :11])
    same(a[0, 12:29], b[0, 12:29])
    assert float(jnp.abs(a[0, 11] - b[0, 11]).max()) > 0.0


@pytest.mark.parametrize("remat", ["full", pytest.param("dots", marks=pytest.mark.slow)])
def test_remat_changes_neither_values_nor_counts(remat: str) -> None:
    config = residual(small("DD"), "none", 1)
    config = dataclasses.replace(config, moe=dataclasses.replace(config.moe, dense_layers=0))
    want, want_grads = loss_and_grad(config, batch(ROW))
    got, grads = loss_and_grad(dataclasses.replace(config, remat=remat), batch(ROW))
    for counted, once in zip(got[1], want[1], strict=True):
        tolerance = 0 if counted.dtype == jnp.int32 else 1e-5
        np.testing.assert_allclose(counted, once, rtol=tolerance)
    close((got[0], grads), (want[0], want_grads), 1e-5)


def test_a_scanned_stack_equals_the_same_layers_in_a_row() -> None:
    config = residual(small("DLDL"), "none", 1)
    config = dataclasses.replace(config, moe=dataclasses.replace(config.moe, dense_layers=0))
    params = make_model(config).init(jax.random.key(0))
    assert set(params) >= {"block0_0"} and "block0_1" not in params
    (loss, _), _ = loss_and_grad(config, batch(ROW), params)
    np.testing.assert_allclose(loss, _plain_stack(config, params), rtol=1e-5)


def _plain_stack(config: ModelConfig, params: Any) -> float:
    """The loss of a stack that is one scanned segment, its repeats run one after the other."""
    from mlmoe.layers.attention import Latent
    from mlmoe.layers.layer import Stream
    from mlmoe.layers.norm import rms_norm
    from mlmoe.model import Period
    from pallas_kernels.bounded_decay import document_ids

    data, a, f32 = batch(ROW), config.attention, jnp.dtype("float32")
    ((segment,),) = blocks(config)
    x = jnp.take(params["embedding"], data.tokens_BT, axis=0)
    shared = Latent(*(jnp.zeros((*x.shape[:2], w)) for w in (a.kv_rank, a.rope_dim)))
    stream = Stream(x, (), None if a.kv_share == 1 else shared)
    documents = document_ids(data.segment_ids_BT)
    routing = first_routing(config.moe, len(segment.period))
    body = jax.jit(Period(config, f32, segment.period).apply)
    for i in range(segment.repeats):
        p = {"params": jax.tree.map(lambda x, i=i: x[i], params["block0_0"])}
        stream, _ = body(p, stream, (), documents, data.positions_BT, routing)
    x = rms_norm(stream.running_BTD, params["final_norm"]["gain"], config.norm_eps)
    sums = cross_entropy(x, params["head"], data.targets_BT, data.weights_BT, config.vocab)
    return float(sums.nats)


def test_segments_cover_the_stack_in_order() -> None:
    d, l = LayerSpec("D", False, False, False), LayerSpec("L", False, False, False)
    first = LayerSpec("D", True, False, False)
    assert segments([first, d, l, d, l]) == [Segment((first,), 1), Segment((d, l), 2)]
    assert segments([d, d, d, l] * 5) == [Segment((d, d, d, l), 5)]
    rng = np.random.default_rng(0)
    for _ in range(50):
        specs = [(d, l, first)[i] for i in rng.integers(0, 3, size=rng.integers(1, 14))]
        assert [s for g in segments(specs) for _ in range(g.repeats) for s in g.period] == specs


def shared_latents(layout: str, share: int) -> ModelConfig:
    config = residual(small(layout), "none", 1)
    attention = dataclasses.replace(config.attention, kv_share=share)
    return dataclasses.replace(config, attention=attention)


def test_layers_that_share_a_latent_make_it_once() -> None:
    config = shared_latents("DLRDLB", 2)
    assert config.follows == (False, False, True, False, False, True)
    params = make_model(config).init(jax.random.key(0))
    names = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(params)]
    assert sum("w_dkv" in n for n in names) == 2 and sum("w_ukv" in n for n in names) == 4
    (loss, _), grads = loss_and_grad(config, batch(ROW), params)
    assert np.isfinite(float(loss))
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        assert float(jnp.abs(grad).max()) > 0.0, jax.tree_util.keystr(path)


def test_a_scan_hands_latents_on() -> None:
    """Leader and follower in one scanned period: as the same layers without a scan."""
    config = shared_latents("LLLL", 2)
    config = dataclasses.replace(config, moe=dataclasses.replace(config.moe, dense_layers=0))
    assert [s.repeats for s in blocks(config)[0]] == [2]
    params = make_model(config).init(jax.random.key(0))
    want = _plain_stack(config, params)
    np.testing.assert_allclose(loss_and_grad(config, batch(ROW), params)[0][0], want, rtol=1e-5)


def test_tied_head_shares_the_embedding() -> None:
    config = small("D", tie_head=True)
    params = make_model(config).init(jax.random.key(0))
    assert "head" not in params
    _, grads = loss_and_grad(config, batch(ROW))
    assert float(jnp.abs(grads["embedding"]).min(-1).max()) > 0.0


def test_initial_parameters_do_not_depend_on_the_number_of_devices() -> None:
    from mlmoe.sharding import make_mesh, sharding

    model = make_model(small("DL"))
    one = jax.jit(model.init)(jax.random.key(3))
    eight = jax.jit(model.init, out_shardings=sharding(make_mesh()))(jax.random.key(3))
    jax.tree.map(np.testing.assert_array_equal, one, eight)
