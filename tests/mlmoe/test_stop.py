"""Signals: a flag first, at once the second time, and never stuck behind C++."""

import os
import signal
import subprocess
import sys
import time

import pytest

from mlmoe.stop import Stopped, StopSignal


def test_a_signal_becomes_a_flag_and_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignal() as stop:
        assert not stop.asked
        stop.check()
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Stopped) as e:
            stop.check()
        assert e.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignal() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.asked
    finally:
        signal.signal(signal.SIGHUP, before)


def test_long_work_is_left_behind() -> None:
    with StopSignal() as stop:
        began = time.time()
        with pytest.raises(Stopped) as e:
            stop.run(lambda: (os.kill(os.getpid(), signal.SIGINT), time.sleep(20)))
        assert e.value.code == 130 and time.time() - began < 10


def test_results_and_errors_pass_through() -> None:
    with StopSignal() as stop:
        assert stop.run(lambda: 7) == 7
        with pytest.raises(TimeoutError, match="mine"):
            stop.run(lambda: (_ for _ in ()).throw(TimeoutError("mine")))


def test_a_second_signal_leaves_at_once() -> None:
    code = (
        "import os, signal\nfrom mlmoe.stop import StopSignal\nwith StopSignal():\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n    os.kill(os.getpid(), signal.SIGINT)\n"
        "    print('still here')"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 130 and "still here" not in run.stdout


def test_output_that_nobody_reads_asks_for_a_stop_and_then_goes_nowhere() -> None:
    code = (
        "import sys\nfrom mlmoe.stop import Stopped, heard, leave\n"
        "sys.stdin.readline()\n"
        "try:\n    with heard():\n        print('lost', flush=True)\n"
        "except Stopped as e:\n    print('nobody hears this', flush=True)\n    leave(e.code)\n"
    )
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen([sys.executable, "-c", code], text=True, **pipes)
    assert process.stdin and process.stdout and process.stderr
    process.stdout.close()
    process.stdin.write("go on\n")
    process.stdin.flush()
    assert process.stderr.read() == "" and process.wait() == 141


def test_a_program_ends_with_its_code() -> None:
    code = (
        "import sys\nfrom mlmoe.errors import UserError\nfrom mlmoe.stop import run_program\n"
        "def main(argv):\n    raise {0}\n    return 0\nrun_program(main, 'before anything')"
    )
    for raised, status, out, err in (
        ("UserError('a is 3')", 2, "", "error: a is 3\n"),
        ("KeyboardInterrupt", 130, "\nstopped by SIGINT before anything\n", ""),
        ("BrokenPipeError(32, 'nobody reads')", 141, "", ""),
    ):
        command = [sys.executable, "-c", code.format(raised)]
        run = subprocess.run(command, capture_output=True, text=True)
        assert (run.returncode, run.stdout, run.stderr) == (status, out, err)
    fine = code.replace("    raise {0}\n", "")
    assert subprocess.run([sys.executable, "-c", fine]).returncode == 0
