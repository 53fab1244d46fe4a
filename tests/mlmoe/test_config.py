"""What a config accepts, and what it says of the rest."""

import re
from typing import Any

import pytest

import configs
from mlmoe.config import TrainConfig, check_devices, from_dict, to_dict
from mlmoe.errors import UserError


def build(**changes: Any) -> TrainConfig:
    c = configs.load("8k:tiny").to_dict()
    for path, value in changes.items():
        *sections, name = path.split("__")
        target = c
        for s in sections:
            target = target[s]
        target[name] = value
    return from_dict(TrainConfig, c)


@pytest.mark.parametrize("name", [f"{s}:{z}" for s in configs.STAGES for z in configs.SCALES])
def test_every_named_config_is_valid(name: str) -> None:
    config = from_dict(TrainConfig, configs.load(name).to_dict())
    assert hash(config) == hash(from_dict(TrainConfig, to_dict(config)))
    assert len(config.model.letters) == config.model.layers


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"step": 3}, "no such field"),
        ({"model__moe__expert": 3}, "config.model.moe.expert: no such field"),
        ({"steps": "3"}, "config.steps='3': expected int"),
        ({"steps": True}, "expected int"),
        ({"steps": 0}, "steps=0: must be greater than 0"),
        ({"steps": 3_000_000_000}, "steps=3000000000: must be below"),
        ({"seed": 10**20}, "seed=100000000000000000000: must be in"),
        ({"workdir": "gs://bucket/run"}, "workdir=gs://bucket/run: a URL; mount it"),
        ({"optim__lr": -1.0}, "optim.lr=-1.0"),
        ({"optim__name": "adam"}, "choose one of .muon., .adamw."),
        ({"model__layout": "DX"}, "unknown letter 'X'"),
        ({"model__layout": "DLD"}, "set --config.model.layers=3"),
        ({"model__moe__active": 16}, "must be below model.moe.experts=16"),
        ({"model__moe__balance": "sinkhorn"}, "choose one of .quantile., .quantile_sign."),
        ({"model__moe__capacity_factor": 0.9}, "capacity_factor=0.9: below 1 .* nearest: 1.0"),
        ({"model__moe__temperature_final": -1.0}, "temperature_final=-1.0: must be above 0"),
        ({"model__moe__aux_weight": -1.0}, "aux_weight=-1.0: must be >= 0"),
        ({"model__moe__transport": "ring"}, "choose one of .auto., .ragged., .gather."),
        ({"model__moe__buffer": 0.5}, r"moe.buffer=0.5: must be 0 .* or at least 1"),
        ({"mesh__expert": 0}, "mesh.expert=0: must be greater than 0"),
        ({"mesh__expert": 5}, r"mesh.expert=5 does not divide .*experts=16; nearest: 4 or 8, or"),
        ({"mesh__expert": 32}, r"nearest: 16, or --config.model.moe.experts=32"),
        ({"model__incremental__g_min": -6.0}, r"must be in \[-5, 0\)"),
        ({"model__incremental__memory_max": 1.0}, "memory_min"),
        ({"model__attention__rope_dim": 7}, "nearest: 6 or 8"),
        (
            {"model__attention__kv_share": 2},
            "kv_share=2 does not divide the 1 latent .* nearest: 1$",
        ),
        ({"model__attention__kv_share": 0}, "kv_share=0: must be greater than 0"),
        ({"model__vocab": 300, "model__vocab_chunk": 128}, "nearest vocab: 256"),
        ({"batch": 6, "accumulate": 4}, "nearest batch: 8"),
        ({"state_check_every": -1}, "state_check_every=-1: must be >= 0; 0 for none"),
        ({"state_error_max": 0.0}, "state_error_max=0.0: must be greater than 0"),
        ({"data__source": "web"}, "stdlib"),
        ({"data__tokenizer": 3}, "expected str"),
    ],
)
def test_bad_values_are_named(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        build(**changes)


def test_a_missing_field_is_named() -> None:
    c = configs.load("8k:tiny").to_dict()
    del c["optim"]["clip"]
    with pytest.raises(UserError, match=re.escape("config.optim: missing clip")):
        from_dict(TrainConfig, c)


def test_an_int_serves_as_a_float() -> None:
    assert build(optim__lr=1).optim.lr == 1.0


def test_batch_must_split_over_devices() -> None:
    check_devices(build(batch=16), 8, "cpu")
    with pytest.raises(UserError, match=re.escape("nearest: --config.batch=16")):
        check_devices(build(batch=12), 8, "cpu")


def test_devices_must_form_the_mesh() -> None:
    check_devices(build(mesh__expert=4), 8, "cpu")
    with pytest.raises(UserError, match=r"8 devices .* of mesh.expert=16; nearest: 8$"):
        check_devices(build(mesh__expert=16), 8, "cpu")
    with pytest.raises(UserError, match=r"6 devices .* of mesh.expert=4; nearest: 3 or 6$"):
        check_devices(build(mesh__expert=4), 6, "cpu")
    ragged = build(mesh__expert=4, model__moe__transport="ragged")
    check_devices(ragged, 8, "tpu")
    with pytest.raises(UserError, match="no ragged-all-to-all for CPUs; use 'gather' or 'auto'"):
        check_devices(ragged, 8, "cpu")


def test_presets() -> None:
    letters = lambda layout, n: build(model__layout=layout, model__layers=n).model.letters  # noqa: E731
    assert letters("interleaved", 9) == "DDDLDDDLL"
    assert letters("thirds", 9) == "DDDLLLLLL"
