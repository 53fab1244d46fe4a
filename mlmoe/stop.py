"""Stopping cleanly: the first SIGINT, SIGTERM or SIGHUP asks, a second one leaves at once.

Where the reader of the output is gone (`| head`, `| tee` ended by the same Ctrl-C, a closed
terminal), that asks too. Python runs signal handlers only between bytecodes of the main thread, so
anything long that happens inside a C++ call (a compilation) runs in a worker thread while the main
one waits for either.
"""

import concurrent.futures
import contextlib
import errno
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn, TypeVar

from mlmoe.errors import UserError

T = TypeVar("T")
# SIGHUP: the terminal was closed; Windows has none.
ASKS = tuple(getattr(signal, n) for n in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, n))


def exit_code(signum: int) -> int:
    """What a shell reports of a process that a signal ended."""
    return 128 + signum


UNHEARD = (errno.EPIPE, errno.EIO)  # of a pipe whose reader is gone, of a closed terminal


class Stopped(Exception):
    """A stop was asked for; `code` is what the process should exit with."""

    def __init__(self, signum: int):
        super().__init__(signal.Signals(signum).name)
        self.code = exit_code(signum)


class StopSignal:
    """Context manager that turns the signals of ASKS into a flag, and restores the old handlers.

    One that is ignored stays so: `nohup` means it.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self._event = threading.Event()
        self._old: dict[int, Any] = {}

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():
            for s in ASKS:
                if signal.getsignal(s) != signal.SIG_IGN:
                    self._old[s] = signal.signal(s, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for s, handler in self._old.items():
            signal.signal(s, handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        del frame
        if self._event.is_set():
            os.write(2, b"\nsecond signal: leaving without saving\n")
            os._exit(exit_code(signum))
        self.signum = signum
        self._event.set()

    @property
    def asked(self) -> bool:
        return self._event.is_set()

    @property
    def code(self) -> int | None:
        """What the process should exit with; None where no stop has been asked for."""
        return None if self.signum is None else exit_code(self.signum)

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


@contextlib.contextmanager
def heard() -> Iterator[None]:
    """Around output: raises Stopped where nobody reads it any more; what follows goes nowhere."""
    try:
        yield
    except OSError as e:
        if e.errno not in UNHEARD:
            raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):
            ask = select.poll()
            ask.register(stream, 0)  # errors and hang-ups are told unasked
            if ask.poll(0):
                os.dup2(nowhere, stream.fileno())
        raise Stopped(signal.SIGPIPE) from e


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
        code = exit_code(signal.SIGINT)
        with contextlib.suppress(OSError):
            print(f"\nstopped by SIGINT {interrupted}")
    except Stopped as e:
        code = e.code
    except OSError as e:
        if e.errno not in UNHEARD:
            raise
        code = exit_code(signal.SIGPIPE)
    leave(code)


def leave(code: int) -> NoReturn:
    """Ends the process now: what an abandoned thread still has to say is not heard."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)
