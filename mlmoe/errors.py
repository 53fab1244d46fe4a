"""The one exception a user is meant to read."""


class UserError(ValueError):
    """Bad input, named for the reader: what is wrong, the value, the nearest valid one.

    Entry points print its message without a traceback and exit with code 2.
    """
