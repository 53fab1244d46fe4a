"""The folder of a run: made, writable, and used by one run at a time."""

import os
from pathlib import Path
from typing import Any

from mlmoe.errors import UserError


class Workdir:
    """Context manager that opens the folder and holds its lock; process 0 of a run owns one.

    Raises:
      UserError: the folder cannot be made or written to, or another run is using it.
    """

    def __init__(self, path: str):
        self.path = Path(path).expanduser()
        self._file: Any = None

    def __enter__(self) -> "Workdir":
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._file = (self.path / ".lock").open("a+")
        except OSError as e:
            raise self._refused(e) from e
        if not _lock(self._file):
            self._file.seek(0)
            owner = self._file.read().strip() or "another process"
            self._file.close()
            raise UserError(
                f"workdir {self.path} is in use by {owner}: two runs would overwrite each other. "
                "Wait for it, or give --config.workdir=<another folder>"
            )
        try:
            self._file.truncate(0)
            self._file.write(f"process {os.getpid()}")
            self._file.flush()
        except OSError as e:
            raise self._refused(e) from e
        return self

    def _refused(self, e: OSError) -> UserError:
        message = f"workdir {self.path}: {e.strerror}; give --config.workdir=<another folder>"
        return UserError(message)

    def __exit__(self, *_: object) -> None:
        self._file.close()  # the lock goes with it


def _lock(file: Any) -> bool:
    """Whether the lock is ours now; the system frees it when this process ends, however it ends."""
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
