"""The shape of the code: which way imports flow, and how long a file may get."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("pallas_kernels", "mlmoe", "configs", "experiments")
FILES = sorted(p for name in PACKAGES for p in (ROOT / name).rglob("*.py"))

# A file of mlmoe imports only from its own rank or from those before it.
RANKS = (
    ("errors",),
    ("data.config", "layout"),
    ("config",),
    ("sharding", "count", "stop", "workdir"),
    ("data",),
    ("layers",),
    ("model",),
    ("loss",),
    ("metrics", "optim"),
    ("step",),
    ("checkpoint", "manifest"),
    ("evaluate", "generate", "convert", "precision"),
    ("surgery", "stream"),
    ("build",),
    ("report", "step_reader", "task_eval", "trained"),
    ("handover",),
    ("loop",),
)


def rank(module: str) -> int:
    """Of `mlmoe.layers.norm`: the most specific name listed in RANKS."""
    name = module.removeprefix("mlmoe.")
    while name:
        for i, names in enumerate(RANKS):
            if name in names:
                return i
        name = name.rpartition(".")[0]
    raise AssertionError(f"{module} has no rank: add it to RANKS")


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> set[str]:
    """Modules a file imports, those only for type checking left out."""
    found: set[str] = set()
    tree = ast.parse(path.read_text())
    skipped = {
        id(n)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for n in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            whole = {f"{node.module}.{a.name}" for a in node.names}
            is_package = (ROOT / node.module.replace(".", "/")).is_dir()
            found |= whole if is_package else {node.module}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_flow_one_way(path: Path) -> None:
    module, used = module_of(path), imports(path)
    package = module.partition(".")[0]
    below = {"pallas_kernels": (), "mlmoe": ("pallas_kernels",), "configs": ("mlmoe",)}
    for name in used:
        top = name.partition(".")[0]
        if top in PACKAGES and top != package and package in below:
            assert top in below[package], f"{module} imports {name}"
        if package == "mlmoe" and top == "mlmoe" and module != "mlmoe" and name != "mlmoe":
            assert rank(name) <= rank(module), f"{module} imports {name}, which comes later"
        if top == "flax":
            assert module == "mlmoe.model" or module.startswith("mlmoe.layers."), module
        if top == "ml_collections":
            assert package in ("configs", "experiments"), module


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_stay_short(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    assert path.stem not in ("utils", "util", "helpers", "common")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= 70, f"{node.name} has {length} lines"


def test_partition_specs_are_written_in_one_file() -> None:
    users = [module_of(p) for p in FILES if "PartitionSpec" in p.read_text()]
    assert users == ["mlmoe.sharding"]


def test_every_file_says_what_it_is_for() -> None:
    silent = [
        str(p.relative_to(ROOT))
        for p in FILES
        if p.read_text() and not ast.get_docstring(ast.parse(p.read_text()))
    ]
    assert not silent
