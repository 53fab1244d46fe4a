"""A trained model, read back from the folder of its run."""

import json
from pathlib import Path
from typing import NamedTuple

import jax

from mlmoe.build import Program, abstract_state, make_program
from mlmoe.checkpoint import Checkpoints
from mlmoe.config import TrainConfig, from_dict
from mlmoe.errors import UserError, require
from mlmoe.step import TrainState


class Trained(NamedTuple):
    """The newest sound checkpoint of a run, and the config it was made with."""

    config: TrainConfig
    program: Program
    state: TrainState
    step: int


def load_trained(workdir: str, mesh: jax.sharding.Mesh) -> Trained:
    """The newest sound checkpoint in `workdir`, on `mesh`; its config is the one stored with it.

    Raises:
      UserError: there is no such folder, no sound checkpoint in it, or one of another version.
    """
    config = read_config(workdir)
    program = make_program(config)
    with Checkpoints(Path(workdir).expanduser(), keep=1) as checkpoints:
        found = checkpoints.restore(abstract_state(program, mesh))
    if found is None:
        raise UserError(f"no checkpoint in {workdir} is sound")
    return Trained(config, program, found.state, found.step)


def read_config(workdir: str) -> TrainConfig:
    """The config stored with the newest complete checkpoint in `workdir`; reads no array."""
    path = Path(workdir).expanduser()
    if not (path / "checkpoints").is_dir():
        near = sorted(str(p.parent) for p in path.parent.glob("*/checkpoints"))
        found = f"; runs beside it: {', '.join(near)}" if near else ""
        raise UserError(f"{workdir} is not the folder of a run: it has no checkpoints{found}")
    with Checkpoints(path, keep=1) as checkpoints:
        meta = checkpoints.latest_meta()
        if meta is None:
            raise UserError(f"no checkpoint in {workdir} is complete")
    require("config" in meta, f"{workdir}: its checkpoints are those of another program")
    try:
        return from_dict(TrainConfig, json.loads(json.dumps(meta["config"])))
    except UserError as e:
        raise UserError(f"{workdir} was made by another version of this program: {e}") from e
