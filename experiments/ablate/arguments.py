"""Types of the studies' command line arguments."""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def at_least(least: int) -> Callable[[str], int]:
    """The type of a command line argument: a whole number not below `least`."""

    def number(text: str) -> int:
        if (value := int(text)) < least:
            raise argparse.ArgumentTypeError(f"{value} is below {least}")
        return value

    return number


def add_out(parser: Any) -> None:
    """--out, a folder that can be written to: found out before the work, not after it."""
    parser.add_argument("--out", type=folder, default="runs/ablate", help="(%(default)s)")


def add_seeds(parser: Any, default: int = 3) -> None:
    parser.add_argument(
        "--seeds", type=at_least(1), default=default, help="runs of each arm (%(default)s)"
    )


def folder(text: str) -> Path:
    """The type of a command line argument: a folder, made here, that can be written to."""
    path = Path(text).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError as e:
        raise argparse.ArgumentTypeError(f"{text}: {e.strerror}") from None
