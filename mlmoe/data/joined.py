"""Related files as one document: what a repository reads like, and long enough for long rows."""

from pathlib import PurePosixPath

import numpy as np

from mlmoe.data.documents import Subset, stable_hash


class Joined:
    """Documents of consecutive files, folder by folder, each file behind a line with its name.

    A document ends where it has at least `size` bytes, or with its top-level folder. It takes files
    of `files` alone, so that what is held out is in no training document. Documents are in the
    order of hashes: the first ones are a fair sample.
    """

    def __init__(self, files: Subset, size: int):
        self._files = files
        names = [files.name(i) for i in range(len(files))]
        order = sorted(range(len(names)), key=lambda i: _place(names[i]))
        sizes = files.sizes()
        assert sizes is not None  # those of files are known
        groups: list[list[int]] = []
        totals: list[int] = []
        top = None
        for i in order:
            folder = PurePosixPath(names[i]).parts[:-1][:1]
            if not groups or totals[-1] >= size or folder != top:
                groups.append([])
                totals.append(0)
            top = folder
            groups[-1].append(i)
            totals[-1] += int(sizes[i]) + len(names[i].encode()) + 2
        mixed = sorted(range(len(groups)), key=lambda g: stable_hash(names[groups[g][0]].encode()))
        self._groups = [groups[g] for g in mixed]
        self._sizes = np.array([totals[g] for g in mixed], np.int64)

    def __len__(self) -> int:
        return len(self._groups)

    def __getitem__(self, index: int, /) -> str:
        texts = ((self._files.name(i), self._files[i]) for i in self._groups[index])
        return "\n".join(f"{name}\n{text}" for name, text in texts if len(text))

    def name(self, index: int) -> str:
        return self._files.name(self._groups[index][0])

    def sizes(self) -> np.ndarray:
        return self._sizes


def _place(name: str) -> tuple[tuple[str, ...], str]:
    """Files of a folder stay together, before those of the folders in it."""
    path = PurePosixPath(name)
    return path.parts[:-1], path.name
