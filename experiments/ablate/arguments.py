"""Types of the studies' command line arguments."""

import argparse
from collections.abc import Callable


def at_least(least: int) -> Callable[[str], int]:
    """The type of a command line argument: a whole number not below `least`."""

    def number(text: str) -> int:
        if (value := int(text)) < least:
            raise argparse.ArgumentTypeError(f"{value} is below {least}")
        return value

    return number
