"""The supervisor of a command, with a small program in its place: what is restarted, how often, and with what."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from train.process.interrupt import handled
from train.run.supervise import VARIABLE, Supervisor, tell_supervisor

# Writes its arguments down and ends as the plan says: one line of Python for each start.
PROGRAM = """
import json, os, pathlib, signal, sys, time
place = pathlib.Path(sys.argv[1])
starts = place / "starts.jsonl"
number = len(starts.read_text().splitlines()) if starts.exists() else 0
with starts.open("a") as file:
    file.write(json.dumps(sys.argv[2:]) + chr(10))
root = place / "run-2"
def tell():
    root.mkdir(exist_ok=True)
    pathlib.Path(os.environ["{variable}"]).write_text(json.dumps(str(root)))
def save(step):
    (root / "checkpoints" / str(step)).mkdir(parents=True)
def end():
    pathlib.Path(os.environ["{variable}"] + ".ended").touch()
    sys.exit(0)
def die(name):
    os.kill(os.getpid(), getattr(signal, name))
exec(json.loads(sys.argv[2])[number])
"""
CONTINUED = ['name="run-2"', "--resume"]


@pytest.fixture
def make(tmp_path):
    """`make([line of each start], restarts=5)`: a supervisor of the program."""
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM.format(variable=VARIABLE)))

    def supervisor(plan: list[str], **limits) -> Supervisor:
        command = [sys.executable, str(program), str(tmp_path), json.dumps(plan)]
        return Supervisor(command, tmp_path / "told", **{"wait": 0.0, **limits})

    return supervisor


@pytest.fixture
def supervised(make, tmp_path):
    """`supervised(...)` as `make`: (exit code, further arguments of each start)."""

    def run(*arguments, **limits) -> tuple[int, list[list[str]]]:
        code = make(*arguments, **limits).run()
        return code, [json.loads(line)[1:] for line in (tmp_path / "starts.jsonl").read_text().splitlines()]

    return run


@pytest.mark.parametrize("code", [1, 2, 3, 130])
def test_deliberate_exit_is_final(supervised, code):
    assert supervised([f"tell(); sys.exit({code})"]) == (code, [[]])


@pytest.mark.parametrize("end", ["end()", "tell(); end()", "tell(); (root / 'summary.json').touch()"])
def test_end_of_the_command_is_final(supervised, end):
    assert supervised([end]) == (0, [[]])


@pytest.mark.parametrize("start", ["", "tell(); ", "tell(); save(1); "])
@pytest.mark.parametrize("end", ["os._exit(0)", "sys.exit(0)"])
def test_early_exit_code_0_is_an_error(supervised, capfd, start, end):
    assert supervised([start + end]) == (2, [[]])
    assert "ended with exit code 0 before the end of the command, as os._exit(0)" in capfd.readouterr().err


def test_summary_of_an_earlier_run_is_no_end(supervised, tmp_path):
    (tmp_path / "run-2").mkdir()
    (tmp_path / "run-2" / "summary.json").touch()
    os.utime(tmp_path / "run-2" / "summary.json", (0, 0))
    assert supervised(["tell(); os._exit(0)"]) == (2, [[]])


def test_end_of_an_earlier_start_is_no_end(supervised):
    plan = [f"pathlib.Path(os.environ['{VARIABLE}'] + '.ended').touch(); tell(); sys.exit(75)", "os._exit(0)"]
    assert supervised(plan) == (2, [[], CONTINUED])


@pytest.mark.parametrize("end", ["sys.exit(75)", "die('SIGKILL')", "die('SIGSEGV')", "die('SIGABRT')"])
def test_loss_is_continued_under_the_first_name(supervised, end):
    assert supervised([f"tell(); {end}", "end()"]) == (0, [[], CONTINUED])


def test_loss_before_the_directory_starts_anew(supervised):
    assert supervised(["die('SIGKILL')", "tell(); die('SIGKILL')", "end()"]) == (0, [[], [], CONTINUED])


def test_supervisor_stops_after_restarts_without_progress(supervised, capfd):
    code, starts = supervised(["tell(); die('SIGKILL')"] * 4, restarts=3)
    assert (code, len(starts)) == (128 + signal.SIGKILL, 4)
    errors = capfd.readouterr().err
    assert "restart 3 of 3" in errors
    assert "SIGKILL, as it is without memory, after 3 restarts without a new checkpoint" in errors


def test_new_checkpoint_resets_the_count(supervised):
    lost = ["tell(); sys.exit(75)", "sys.exit(75)"]
    plan = [*lost, "save(1); sys.exit(75)", "sys.exit(75)", "save(2); sys.exit(75)", "sys.exit(75)", "sys.exit(75)"]
    code, starts = supervised(plan, restarts=2)
    assert (code, len(starts)) == (75, len(plan))


def test_waits_double(supervised, capfd):
    supervised(["sys.exit(75)"] * 4, restarts=3, wait=0.02)
    errors = capfd.readouterr().err
    assert [f"in {seconds} s" in errors for seconds in (0.02, 0.04, 0.08)] == [True] * 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_is_forwarded_without_a_restart(make, tmp_path, number):
    answer = f"signal.signal({int(number)}, lambda *_: sys.exit(75)); tell(); time.sleep(60)"
    supervisor = make([answer, "sys.exit(0)"])

    def send() -> None:
        while not (tmp_path / "told").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    with handled(supervisor):
        thread = threading.Thread(target=send)
        thread.start()
        assert supervisor.run() == 75
        thread.join()
    assert len((tmp_path / "starts.jsonl").read_text().splitlines()) == 1


def test_a_signal_ends_the_wait_for_a_restart(make):
    supervisor = make(["sys.exit(75)"], wait=60.0)
    with handled(supervisor):
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        assert supervisor.run() == 130


def test_process_without_a_supervisor_reports_nothing(monkeypatch, tmp_path):
    monkeypatch.delenv(VARIABLE, raising=False)
    tell_supervisor(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_supervisor_starts_no_jax():
    code = "import sys, train.run.supervise; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3], check=False).returncode == 0
