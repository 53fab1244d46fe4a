"""Finding files, and text files as documents: the sources 'files' and 'stdlib'."""

import glob
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mlmoe.data.documents import BadDocument, check_text, decode_text, stable_hash
from mlmoe.errors import UserError

# Third-party packages differ from machine to machine, and tests hold text in broken encodings.
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def find_files(path: str, suffixes: tuple[str, ...]) -> tuple[Path, list[str]]:
    """The folder that names are relative to, and the sorted relative names under it.

    `path` is one file, a folder (searched for `suffixes`, through links, hidden files left out) or
    a glob (`**` crosses folders). Raises UserError where nothing is found.
    """
    full = os.path.expanduser(path)
    if os.path.isfile(full):
        return Path(full).parent, [os.path.basename(full)]
    if os.path.isdir(full):
        root = Path(full)
        found = sorted(
            p.relative_to(root).as_posix()
            for p in _walk(root, {root.resolve()})
            if p.name.endswith(suffixes) and _is_file(p)
        )
    elif glob.has_magic(full):
        plain = [part for part in Path(full).parts]
        magic = next(i for i, part in enumerate(plain) if glob.has_magic(part))
        root = Path(*plain[:magic])
        hits = [p for p in glob.glob(full, recursive=True) if _is_file(Path(p))]
        found = sorted(Path(p).relative_to(root).as_posix() for p in hits)
    else:
        what = "is no file and no folder" if os.path.exists(full) else "does not exist"
        raise UserError(f"data.path={path!r} {what} (working folder: {os.getcwd()})")
    for name in found:
        if not _is_utf8(name):
            raise UserError(f"data.path={path!r}: the file name {name!r} is not UTF-8; rename it")
    if not found:
        wanted = f" that ends in {' or '.join(suffixes)}" if suffixes != ("",) else ""
        raise UserError(f"data.path={path!r} holds no file{wanted}")
    return root, found


def _walk(folder: Path, above: set[Path]) -> Iterator[Path]:
    """What is not a folder, under one and its subfolders; a link to a folder above ends there."""
    for p in folder.iterdir():
        if p.name.startswith("."):
            continue
        if not p.is_dir():
            yield p
        elif (real := p.resolve()) not in above:
            yield from _walk(p, above | {real})


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_file(path: Path) -> bool:
    """Raises UserError at a link to nothing: leaving it out would lose a document unsaid."""
    if path.is_symlink() and not path.exists():
        raise UserError(f"{path} is a link to {path.readlink()}, which does not exist; remove it")
    return path.is_file()


class TextFiles:
    """Documents that are whole text files, named by their path relative to `root`."""

    split_by_name = True

    def __init__(self, root: Path, names: list[str]):
        self._root, self._names = root, names
        self.files = tuple((name, (root / name).stat().st_size) for name in names)
        self.n_bytes = sum(size for _, size in self.files)

    @classmethod
    def of_path(cls, path: str) -> "TextFiles":
        return cls(*find_files(path, ("",)))

    @classmethod
    def of_stdlib(cls) -> "TextFiles":
        """The .py files of the running Python's own library, tests left out (about 11 MB)."""
        root = sysconfig.get_paths()["stdlib"]
        names = []
        for folder, subfolders, files in os.walk(root):
            subfolders[:] = [s for s in subfolders if s not in _SKIPPED_FOLDERS]
            relative = Path(folder).relative_to(root)
            names += [(relative / f).as_posix() for f in files if f.endswith(".py")]
        if not names:
            raise UserError(f"this Python's library has no .py files under {root}; use 'files'")
        return cls(Path(root), sorted(names))

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> str:
        where = self.name(index)
        try:
            data = (self._root / self._names[index]).read_bytes()
        except OSError as e:
            message = f"{self._root / self._names[index]}: {e.strerror}"
            raise BadDocument("unreadable file", message) from None
        return check_text(decode_text(data, where), where)

    def name(self, index: int) -> str:
        return self._names[index]

    def keys(self) -> np.ndarray:
        return np.array([stable_hash(n.encode()) for n in self._names], np.uint64)

    def sizes(self) -> np.ndarray:
        return np.array([size for _, size in self.files], np.int64)
