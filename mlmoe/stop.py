"""Stopping cleanly: the first SIGINT or SIGTERM asks, a second one leaves at once.

Python runs signal handlers only between bytecodes of the main thread, so anything long that happens
inside a C++ call (a compilation) runs in a worker thread while the main one waits for either.
"""

import concurrent.futures
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

from mlmoe.errors import UserError

T = TypeVar("T")
EXIT_CODE = {signal.SIGINT: 130, signal.SIGTERM: 143}


class Stopped(Exception):
    """A stop was asked for; `code` is what the process should exit with."""

    def __init__(self, signum: int):
        super().__init__(signal.Signals(signum).name)
        self.code = EXIT_CODE[signal.Signals(signum)]


class StopSignal:
    """Context manager that turns SIGINT and SIGTERM into a flag, and restores the old handlers."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self._event = threading.Event()
        self._old: dict[int, Any] = {}

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():
            for s in EXIT_CODE:
                self._old[s] = signal.signal(s, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for s, handler in self._old.items():
            signal.signal(s, handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        del frame
        if self._event.is_set():
            os.write(2, b"\nsecond signal: leaving without saving\n")
            os._exit(EXIT_CODE[signal.Signals(signum)])
        self.signum = signum
        self._event.set()

    @property
    def asked(self) -> bool:
        return self._event.is_set()

    def check(self) -> None:
        """Raises Stopped when a stop has been asked for."""
        if self.signum is not None:
            raise Stopped(self.signum)

    def run(self, work: Callable[[], T]) -> T:
        """Runs `work` in a thread; a stop asked for meanwhile raises Stopped and leaves it behind.

        The abandoned thread cannot be killed, so after Stopped the process must end by `os._exit`.
        """
        result: concurrent.futures.Future[T] = concurrent.futures.Future()

        def target() -> None:
            try:
                result.set_result(work())
            except BaseException as e:
                result.set_exception(e)

        threading.Thread(target=target, daemon=True).start()
        while True:
            try:
                return result.result(timeout=0.1)
            except concurrent.futures.TimeoutError:
                if result.done():  # the work itself raised a TimeoutError
                    raise
                self.check()


def run_program(main: Callable[[list[str]], int], interrupted: str) -> None:
    """Ends the process with the code of `main(arguments)`; 2 after a UserError, said in one line.

    `interrupted` is what Ctrl-C cost, where `main` was not the one to say so.
    """
    try:
        code = main(sys.argv[1:])
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        print(f"\nstopped by SIGINT {interrupted}")
        code = EXIT_CODE[signal.SIGINT]
    leave(code)


def leave(code: int) -> None:
    """Ends the process now: what an abandoned thread still has to say is not heard."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
