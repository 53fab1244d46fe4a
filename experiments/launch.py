"""Trains one stage of the curriculum, resuming where the same command stopped before.

    python -m experiments.launch --config=8k:tiny          on a laptop, in minutes
    python -m experiments.launch --config=8k               the full scale (2.8 T parameters): a pod
    python -m experiments.launch --config=path/to/my.py    any file with a get_config()

--config is STAGE or STAGE:SCALE. Stages: {stages}. Scales: {scales} (2p8t if not given).
Any field of configs/base.py can be overridden:

    --config.steps=2000 --config.optim.lr=0.01 --config.model.layout=DDDL --config.model.layers=4
    --config.data.source=files --config.data.path=~/my/texts --config.workdir=runs/mine
    --config=64k:tiny --config.init_from=runs/8k-tiny         goes on from another stage's weights

Ctrl-C or SIGTERM saves a checkpoint and stops. Exit codes: 0 finished, 2 bad input or a run that
diverged, 130 and 143 stopped by a signal.
"""

import difflib
import os
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

import configs
from configs.scales import SCALES
from mlmoe.config import TrainConfig, from_dict, to_dict
from mlmoe.count import parameters, training_bytes
from mlmoe.errors import UserError
from mlmoe.stop import run_program
from pallas_kernels.libtpu import describe_no_tpu


def parse(argv: list[str]) -> TrainConfig:
    """The validated config of a command line (without the program's name).

    Raises:
      UserError: no --config, an unknown stage, scale, field or positional leftover, a wrong type.
    """
    if "--config" in argv:
        raise UserError("write --config=8k:tiny, with an equals sign")
    names = [a.partition("=")[2] for a in argv if a.startswith("--config=")]
    if len(names) != 1 or not names[0]:
        raise UserError(
            f"give exactly one --config=STAGE:SCALE, such as --config=8k:tiny; stages: "
            f"{', '.join(configs.STAGES)}; scales: {', '.join(SCALES)}"
        )
    kinds = [a.partition("=")[2] for a in argv if a.startswith("--config.architecture=")]
    config = configs.load(names[0], *kinds[-1:])
    rest = [a for a in argv if not a.startswith("--config=")]
    apply_overrides(config, rest)
    config.workdir = config.workdir or configs.default_workdir(config)
    return from_dict(TrainConfig, config.to_dict())


def apply_overrides(config: ConfigDict, argv: list[str]) -> None:
    """Applies `--config.a.b=value` arguments in place; anything else is an error."""
    for a in argv:
        if not a.startswith("--config."):
            hint = f"; did you mean --config.{a.lstrip('-')}?" if "=" in a else ""
            raise UserError(f"unexpected argument {a!r}{hint}")
        if "=" not in a:
            raise UserError(f"{a}: write it as {a}=VALUE")
        if a.partition("=")[0] in ("--config.stage", "--config.scale"):
            raise UserError(f"{a}: stage and scale are chosen by --config=STAGE:SCALE")
        default = find_field(config, a)
        values = flags.FlagValues()
        try:
            config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=[a])
            values(["launch", a])
        except (flags.Error, AttributeError, KeyError, TypeError, ValueError) as e:
            raise UserError(
                f"{a}: expected {type(default).__name__}, such as {default!r}"
                if not isinstance(default, ConfigDict)
                else f"{a}: is a section; set one of its fields: {', '.join(default)}"
            ) from e


def find_field(config: ConfigDict, argument: str) -> Any:
    """The present value of a.b in `--config.a.b=value`; without such a field, names the nearest."""
    path = argument.partition("=")[0].removeprefix("--config.").split(".")
    for depth, name in enumerate(path):
        if not isinstance(config, ConfigDict) or name not in config:
            fields = list(config) if isinstance(config, ConfigDict) else []
            where = ".".join(["config", *path[:depth]])
            near = difflib.get_close_matches(name, fields, 1)
            hint = f'. Did you mean "{near[0]}"?' if near else ""
            has = f"{where} has {', '.join(fields)}" if fields else f"{where} is a single value"
            raise UserError(f"{argument}: no such field; {has}{hint}")
        config = config[name]
    return config


def available_bytes() -> tuple[int, str]:
    """Memory of all accelerators, or of the machine where JAX runs on CPU; and what it is."""
    import jax

    devices = jax.local_devices()
    limits = [(d.memory_stats() or {}).get("bytes_limit", 0) for d in devices]
    if devices[0].platform != "cpu" and all(limits):
        return sum(limits) * jax.process_count(), f"{jax.device_count()} x {devices[0].device_kind}"
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "this machine's memory"


def check_fits(config: TrainConfig) -> None:
    """Refuses a run whose state alone is larger than the memory there is; says what would work."""
    need, (found, where) = training_bytes(config), available_bytes()
    if need <= found:
        return
    count = parameters(config.model)
    works = [s for s in SCALES if _need(config.stage, s) <= found]
    if config.scale in works:
        works = [config.scale]
    commands = "\n".join(
        f"  python -m experiments.launch --config={config.stage}:{s}" for s in works[:2]
    )
    if config.scale in works:
        commands += f"\nwithout these changes to it: {', '.join(_changes(config))}"
    raise UserError(
        f"{config.stage}:{config.scale} has {_short(count.total)} parameters "
        f"({_short(count.active)} active) and needs at least {need / 1e9:,.0f} GB for parameters, "
        f"gradients, optimizer and layer inputs; found: {found / 1e9:,.0f} GB ({where}). "
        f"What works here:\n{commands}"
    )


def _changes(config: TrainConfig) -> list[str]:
    """The fields of a run that differ from its stage and scale, such as batch=512."""
    name = f"{config.stage}:{config.scale}"
    plain = configs.load(name, config.architecture).to_dict()

    def walk(mine: dict[str, Any], theirs: dict[str, Any], prefix: str) -> list[str]:
        found = []
        for key, value in mine.items():
            if isinstance(value, dict):
                found += walk(value, theirs[key], f"{prefix}{key}.")
            elif value != theirs[key]:
                found.append(f"{prefix}{key}={value}")
        return found

    return walk(to_dict(config), plain, "")


def _need(stage: str, scale: str) -> int:
    return training_bytes(from_dict(TrainConfig, configs.load(f"{stage}:{scale}").to_dict()))


def _short(n: int) -> str:
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if n >= size:
            return f"{n / size:.3g} {unit}"
    return str(n)


def main(argv: list[str]) -> int:
    """Runs one command line; returns the exit code."""
    if not argv or {"-h", "--help", "--helpfull", "--helpshort"} & set(argv):
        print((__doc__ or "").format(stages=", ".join(configs.STAGES), scales=", ".join(SCALES)))
        return 0 if argv else 2
    describe_no_tpu()
    config = parse(argv)
    check_fits(config)
    from mlmoe.loop import train

    train(config)
    return 0


if __name__ == "__main__":
    run_program(main, "before the first step: nothing to save")
