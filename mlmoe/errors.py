"""The one exception a user is meant to read, and the checks that raise it."""

from collections.abc import Sequence


class UserError(ValueError):
    """Bad input, named for the reader: what is wrong, the value, the nearest valid one.

    Entry points print its message without a traceback and exit with code 2.
    """


def require(ok: bool, message: str) -> None:
    """Raises UserError(message) unless ok."""
    if not ok:
        raise UserError(message)


def one_of(name: str, value: str, choices: Sequence[str]) -> None:
    require(value in choices, f"{name}={value!r}: choose one of {', '.join(map(repr, choices))}")
