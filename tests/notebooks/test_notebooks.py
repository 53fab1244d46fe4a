"""The notebooks run from top to bottom, name no path of the machine they were saved on, and were
saved with the outputs of such a run. Jupyter is not needed: cells are plain Python.
"""

import json
import linecache
import re
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
EACH = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)

# At least two parts, at the start of a word: not 1/2, not and/or, not the path of a URL.
ABSOLUTE_PATH = re.compile(r"(?<![\w./:)\]}~-])/[\w.-]+/[\w.-]|\b[A-Za-z]:\\\w+\\\w|~/\w|file://")


def cells_of(path: Path, kind: str) -> list[tuple[int, dict]]:
    """(number counted from 1 over all cells, cell) of one kind."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [(n, cell) for n, cell in enumerate(cells, 1) if cell["cell_type"] == kind]


def execute(path: Path) -> None:
    """Run the code cells in order in one fresh namespace; the error of a cell says which it was."""
    namespace = {"__name__": "__main__"}
    for n, cell in cells_of(path, "code"):
        source, name = "".join(cell["source"]), f"<{path.name}, cell {n}>"
        # Lets a traceback show the lines of the cell.
        linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
        try:
            exec(compile(source, name, "exec"), namespace)
        except Exception as error:
            error.add_note(f"in {path.name}, cell {n}")
            raise


def texts(value) -> list[str]:
    """Every string of a notebook but the images, which are base64."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        return [text for item in value for text in texts(item)]
    if isinstance(value, dict):
        kept = (item for key, item in value.items() if not key.startswith("image/"))
        return [text for item in kept for text in texts(item)]
    return []


@pytest.fixture(autouse=True)
def no_window(monkeypatch):
    """Figures are drawn but not shown, and closed afterwards."""
    plt.switch_backend("Agg")
    monkeypatch.setattr(plt, "show", lambda *args, **kwargs: None)
    yield
    plt.close("all")


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@EACH
def test_runs_from_top_to_bottom(path: Path, monkeypatch) -> None:
    monkeypatch.chdir(path.parent)  # as Jupyter does
    execute(path)
    for number in plt.get_fignums():
        plt.figure(number).canvas.draw()


@EACH
def test_names_no_path_of_a_machine(path: Path) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    found = [m.group() for text in texts(notebook) for m in ABSOLUTE_PATH.finditer(text)]
    assert not found


@EACH
def test_is_saved_with_the_outputs_of_one_run(path: Path) -> None:
    """A reader who runs nothing sees what the text speaks of."""
    cells = [cell for _, cell in cells_of(path, "code")]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    kinds = {(o["output_type"], o.get("name")) for cell in cells for o in cell["outputs"]}
    assert kinds <= {("stream", "stdout"), ("display_data", None), ("execute_result", None)}


def test_an_error_names_its_cell(tmp_path: Path) -> None:
    cells = [
        {"cell_type": "markdown", "source": ["text"]},
        {"cell_type": "code", "source": ["x = 1\n", "y = 0"]},
        {"cell_type": "code", "source": ["x / y"]},
    ]
    path = tmp_path / "broken.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    with pytest.raises(ZeroDivisionError) as caught:
        execute(path)
    assert caught.value.__notes__ == ["in broken.ipynb, cell 3"]


@pytest.mark.parametrize(
    ("text", "bad"),
    [
        ("open('/home/me/x')", True),
        ("saved in /tmp/a", True),
        (r"C:\Users\me", True),
        ("~/texts", True),
        ("https://arxiv.org/abs/2607.24653", False),
        ("tokens/s, and/or, $1/5\\tau$, a // b, d / dx", False),
        ("configs/base.py", False),
    ],
)
def test_what_counts_as_a_path(text: str, bad: bool) -> None:
    assert bool(ABSOLUTE_PATH.search(text)) == bad
