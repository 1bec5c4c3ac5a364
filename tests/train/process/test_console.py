"""The process of a command."""

import errno
import gc
import logging
import os
import signal
import subprocess
import sys
import threading

import pytest

from train import __main__ as train
from train import serve
from train.config.errors import UserError
from train.process.console import run_command
from train.process.disk_problem import handle_thread_errors

PRINTS = """
import sys
from train.process.console import run_command
def command():
    for number in range(20000):
        print(number)
    return 7
sys.exit(run_command(command))
"""


def test_command_collects_garbage_rarely_and_restores_thresholds(capsys: pytest.CaptureFixture[str]):
    before, inside = gc.get_threshold(), []

    def command() -> None:
        inside.append(gc.get_threshold())
        raise UserError("seed: got x, expected an integer")

    gc.set_threshold(700, 10, 10)
    try:
        assert run_command(command) == 2
        assert gc.get_threshold() == (700, 10, 10)
    finally:
        gc.set_threshold(*before)
    assert inside[0][0] >= 100 * 700
    assert capsys.readouterr().err == "error: seed: got x, expected an integer\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_ends_a_command_with_its_code(number, capsys):
    assert run_command(lambda: os.kill(os.getpid(), number)) == 130
    assert capsys.readouterr().err == "interrupted\n"
    handle_thread_errors().ending = False


def _raise(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES])
def test_an_error_of_the_disk_is_one_line(number, capsys):
    error = OSError(number, os.strerror(number), "runs/a/metrics.jsonl")
    assert run_command(lambda: _raise(error)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: cannot write runs/a/metrics.jsonl: {os.strerror(number)}; complete checkpoints ")
    handle_thread_errors().ending = False


def test_disk_error_inside_other_errors_is_found(capsys):
    def command() -> None:
        try:
            raise ValueError("Error writing d/0a1b: [OS error 28: ENOSPC No space left on device]")
        except ValueError:
            raise RuntimeError("finalize failed") from None

    assert run_command(command) == 2
    assert "error: cannot write: No space left on device" in capsys.readouterr().err
    handle_thread_errors().ending = False
    with pytest.raises(RuntimeError, match="something else"):
        run_command(lambda: _raise(RuntimeError("something else")))


def test_disk_error_in_a_thread_warns_at_end(capsys):
    def command() -> None:
        thread = threading.Thread(target=_raise, args=(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),))
        thread.start()
        thread.join()
        try:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            logging.getLogger("absl").exception("a thread of orbax raised")

    assert run_command(command) == 0
    assert capsys.readouterr().err == "warning: cannot write: No space left on device\n"


FULL = pytest.param("> /dev/full", marks=pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has it"))


@pytest.mark.parametrize("redirection", ["| head -1", ">&-", FULL])
def test_closed_standard_output_does_not_end_the_command(redirection):
    shell = f"set -o pipefail; {sys.executable} -c '{PRINTS}' {redirection}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=False)
    assert done.returncode == 7
    (line,) = done.stderr.splitlines()
    assert line.startswith("warning: standard output cannot be written (")
    assert line.endswith("): the command goes on without it")


@pytest.mark.parametrize(
    "error", [MemoryError(), MemoryError("Unable to allocate 4 GiB"), RuntimeError("RESOURCE_EXHAUSTED: Out of memory")]
)
def test_failed_allocation_is_one_line(error, capsys):
    assert run_command(lambda: _raise(error)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    on_host = isinstance(error, MemoryError)
    assert line.startswith(f"error: out of memory{' on the host' if on_host else ''}: ")
    # The advice for a large batch is for the devices alone; on the host the line that asked for the memory counts.
    assert ("optim.micro_batches" in line) == (not on_host)
    assert ("test_console.py, line" in line and line.endswith(": raise error")) == on_host
    assert "make room" not in line
    handle_thread_errors().ending = False


def test_thread_interrupted_by_a_signal_logs_nothing():
    def record(error):
        return logging.LogRecord("absl", logging.ERROR, "manager.py", 1, "failed", (), (type(error), error, None))

    assert not handle_thread_errors().filter(record(KeyboardInterrupt()))
    assert handle_thread_errors().filter(record(ValueError("another")))


@pytest.mark.parametrize("code", [0, None, 3, "a text"])
def test_exit_inside_a_command_is_an_error(capsys, code):
    """Code 0 means that the command came to its end, whatever a function of the user wants."""
    assert run_command(lambda: sys.exit(code)) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"error: SystemExit: {'' if code is None else code}")
    assert "test_console.py" in printed
    assert "The command was ended by sys.exit, before its end" in printed


@pytest.mark.parametrize(
    ("main", "flag", "value", "expected"),
    [
        (serve.main, "--port", "70000", "an integer from 0 to 65535"),
        (serve.main, "--rows", "0", "an integer >= 1"),
        (serve.main, "--rows", "x", "an integer >= 1"),
        (train.main, "--join-timeout", "0", "seconds above 0, at most 86400"),
        (train.main, "--join-timeout", "soon", "seconds above 0, at most 86400"),
    ],
)
def test_number_of_a_flag_is_refused_with_its_range(capsys, main, flag, value, expected):
    with pytest.raises(SystemExit):
        main(["config.yaml", flag, value])
    assert capsys.readouterr().err.endswith(f"argument {flag}: got {value}, expected {expected}\n")
