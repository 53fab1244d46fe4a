"""Named configurations: `stage`, `stage:scale`, or the path of a config file."""

import importlib
import importlib.machinery
import importlib.util
from pathlib import Path

from ml_collections import ConfigDict

from configs import base
from configs.scales import SCALES
from mlmoe.config import ARCHITECTURES
from mlmoe.errors import UserError, one_of

STAGES = tuple(
    sorted(
        (p.stem for p in Path(__file__).parent.glob("[0-9]*.py")),
        key=lambda name: int(name[:-1]) * {"k": 1, "m": 1024}[name[-1]],
    )
)


def load(name: str, architecture: str = "fixed") -> ConfigDict:
    """`8k` (full scale), `8k:tiny`, or `path/to/config.py` with a `get_config()`.

    `architecture` is `fixed`, the final one in every stage, or `staged`; a file has its own.

    Raises:
      UserError: no such stage, scale or file; names the valid ones.
    """
    stage, _, scale = name.rpartition(":") if ":" in name else (name, "", "")
    if name.endswith(".py"):
        stage, scale = name, ""
    path = Path(stage).expanduser()
    if stage and stage not in STAGES and (path.suffix == ".py" or "/" in stage or path.exists()):
        if scale:
            raise UserError(
                f"--config={name}: a config file sets its own scale; give --config={stage} and, in "
                f"the file, configs.load('8k:{scale}')"
            )
        config = _from_file(path)
        if architecture not in ("fixed", config.architecture):
            raise UserError(
                f"--config={name} with architecture={architecture}: a config file sets its own; "
                f"in the file, configs.load('8k:tiny', {architecture!r})"
            )
    elif stage in STAGES:
        one_of("architecture", architecture, ARCHITECTURES)
        config = importlib.import_module(f"configs.{stage}").get_config(architecture)
        config.architecture = architecture
    else:
        raise UserError(
            f"--config={name}: no such stage; choose one of {', '.join(STAGES)} "
            f"(with :{', :'.join(SCALES)}), or give the path of a config file, such as ./my.py"
        )
    if scale or not config.scale:
        scale = scale or "2p8t"
        if scale not in SCALES:
            raise UserError(f"--config={name}: no such scale; choose one of {', '.join(SCALES)}")
        SCALES[scale](config)
    config.workdir = config.workdir or default_workdir(config)
    return config


def default_workdir(config: ConfigDict) -> str:
    """runs/8k-tiny, runs/8k-tiny-staged."""
    kind = "" if config.architecture == "fixed" else f"-{config.architecture}"
    return f"runs/{config.stage}-{config.scale}{kind}"


def _from_file(path: Path) -> ConfigDict:
    if not path.is_file():
        raise UserError(f"--config={path}: {'is a folder' if path.is_dir() else 'no such file'}")
    loader = importlib.machinery.SourceFileLoader("config_file", str(path))
    spec = importlib.util.spec_from_loader("config_file", loader)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        config = module.get_config()
    except (Exception, SystemExit) as e:
        raise UserError(f"--config={path}: cannot be read: {type(e).__name__}: {e}") from e
    if not isinstance(config, ConfigDict):
        raise UserError(
            f"--config={path}: get_config() returned {type(config).__name__}, "
            "expected the ConfigDict of configs.base.get_config() with changes"
        )
    missing = [field for field in base.get_config() if field not in config]
    if missing:
        raise UserError(
            f"--config={path}: get_config() gives no {', '.join(missing)}; begin with "
            "c = configs.load('8k:tiny') and change what differs"
        )
    return config
