"""The limit of the time of a reward function, whatever the function does with signals, threads and processes."""

import datetime
import os
import signal
import threading
import time

import pytest

from tests.processes import state_of
from train.config.data import Rewards
from train.data.tasks.reward_function import Verifier
from train.data.tasks.task import Example
from train.data.tasks.user_score import RewardError
from train.data.workers.process import WorkerPool
from train.process.time_limit import TookTooLongError, time_limit

EXAMPLE = Example("the prompt", "", "", record={"prompt": "the prompt"})
LIMIT = 0.4
LONG = 30.0
"""Seconds that the functions take without a limit."""
LATE = r"no answer within 0\.4 s \(rewards\.timeout\)"
ALARM_OF_OTHERS = "signal.signal(signal.SIGALRM, lambda *_: None); signal.alarm(5); signal.alarm(0)"
SLOW = {
    "sleeps": f"time.sleep({LONG})",
    "works": f"end = time.monotonic() + {LONG}\n    while time.monotonic() < end: pass",
    "switches the alarm off, then sleeps": f"{ALARM_OF_OTHERS}\n    time.sleep({LONG})",
    "switches the timer off, then works": (
        f"signal.setitimer(signal.ITIMER_REAL, 5); signal.setitimer(signal.ITIMER_REAL, 0)\n"
        f"    end = time.monotonic() + {LONG}\n    while time.monotonic() < end: pass"
    ),
    "ignores the alarm": f"signal.signal(signal.SIGALRM, signal.SIG_IGN)\n    time.sleep({LONG})",
    "calls math-verify, then sleeps": f"import math_verify; math_verify.parse('$1$')\n    time.sleep({LONG})",
    "switches the alarm off, then matches a regular expression": (
        f"{ALARM_OF_OTHERS}\n    import re; return re.fullmatch('(a+)+b', 'a' * 40) is not None"
    ),
    "switches the alarm off, then raises an integer": f"{ALARM_OF_OTHERS}\n    return 9 ** 9 ** 9 > 0",
    "waits for a thread": (
        f"import threading; t = threading.Thread(target=time.sleep, args=({LONG},), daemon=True)\n"
        "    t.start(); t.join()"
    ),
    "waits for a process": f"import subprocess; subprocess.run(['sleep', '{LONG}'])",
    "waits for a lock": "import threading; lock = threading.Lock(); lock.acquire(); lock.acquire()",
    "catches the interrupt": f"try: time.sleep({LONG})\n    except BaseException: pass",
    "catches the interrupt, then sleeps again": (
        f"try: time.sleep({LONG})\n    except BaseException: pass\n    time.sleep({LONG})"
    ),
    "raises another error for the interrupt": (
        f"try: time.sleep({LONG})\n    except BaseException as error: raise ValueError from error"
    ),
}
IN_A_WORKER = ("sleeps", "switches the alarm off, then matches a regular expression", "catches the interrupt")
"""Nothing that the function does can matter there."""
TWO_SECONDS_OF_C = "import ctypes; ctypes.PyDLL(None).sleep(2)"


def verifier(tmp_path, body: str, *, workers: int = 0, timeout: float = LIMIT, before: str = "") -> Verifier:
    """Makes a verifier of a function with this body, which returns 1 if it does not return before."""
    text = f"import os, signal, time\n{before}\ndef rate(record, completion, finished):\n    {body}\n    return 1.0\n"
    (tmp_path / "rate.py").write_text(text)
    return Verifier(f"{tmp_path / 'rate.py'}:rate", workers=workers, timeout=timeout)


@pytest.fixture(autouse=True)
def _alarm_unchanged():
    before = signal.getsignal(signal.SIGALRM)
    yield
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
    assert signal.getitimer(signal.ITIMER_PROF)[0] == 0


def test_an_interrupt_is_not_interrupted_itself():
    """Timer and thread may both ring at once; the second would leave files open that the first was closing."""
    handled = []

    @time_limit(0.1)
    def late() -> None:
        try:
            time.sleep(LONG)
        except BaseException:
            signal.raise_signal(signal.SIGPROF)
            handled.append(True)
            raise

    with pytest.raises(TookTooLongError):
        late()
    assert handled


@pytest.mark.parametrize(
    ("name", "workers"), [*((name, 0) for name in SLOW), *((name, 1) for name in SLOW if name in IN_A_WORKER)]
)
def test_slow_function_ends_at_its_limit(tmp_path, name, workers):
    if "math-verify" in name:
        # The first call imports for longer than the limit.
        import math_verify

        math_verify.parse("$1$")
    score = verifier(tmp_path, SLOW[name], workers=workers)
    started = time.monotonic()
    with pytest.raises(RewardError, match=f"^data\\.reward: .*rate for the prompt 'the prompt' .*: {LATE}"):
        score(EXAMPLE, "the completion", True)
    assert time.monotonic() - started < LONG / 2


@pytest.mark.parametrize("workers", [0, 1])
def test_function_of_c_without_signals_is_late(tmp_path, workers):
    started = time.monotonic()
    score = verifier(tmp_path, TWO_SECONDS_OF_C, workers=workers)
    with pytest.raises(RewardError, match=LATE):
        score(EXAMPLE, "", True)
    assert time.monotonic() - started < LONG / 2


def test_call_in_another_thread_is_late_too(tmp_path):
    score, errors = verifier(tmp_path, "time.sleep(2 * 0.4)"), []

    def scored():
        try:
            score(EXAMPLE, "", True)
        except RewardError as error:
            errors.append(error)

    thread = threading.Thread(target=scored)
    thread.start()
    thread.join()
    assert "no answer within 0.4 s" in str(errors[0])


@pytest.mark.parametrize("workers", [0, 1])
def test_alarm_left_by_a_function_never_rings(tmp_path, workers):
    """The default of SIGALRM ends the process."""
    score = verifier(tmp_path, "signal.setitimer(signal.ITIMER_REAL, 0.2)", workers=workers, timeout=20)
    assert score(EXAMPLE, "", True)["reward"] == 1
    time.sleep(0.5)
    assert score(EXAMPLE, "", True)["reward"] == 1


def test_quick_function_may_set_alarms_of_its_own(tmp_path):
    body = (
        "class Ended(Exception): pass\n"
        "    def ring(*_): raise Ended\n"
        "    signal.signal(signal.SIGALRM, ring); signal.setitimer(signal.ITIMER_REAL, 0.1)\n"
        "    try: time.sleep(20)\n"
        "    except Ended: return 0.25"
    )
    assert verifier(tmp_path, body, timeout=20)(EXAMPLE, "", True)["reward"] == 0.25


def test_limit_leaves_no_signal_behind():
    """CPU time of other threads rings early, and a signal that comes late finds a handler."""
    with time_limit(0.2):
        os.kill(os.getpid(), signal.SIGPROF)
    os.kill(os.getpid(), signal.SIGPROF)
    with pytest.raises(TookTooLongError), time_limit(0.01):
        time.sleep(10)
    with pytest.raises(ZeroDivisionError), time_limit(10):
        _ = 1 / 0
    with pytest.raises(KeyboardInterrupt), time_limit(10):
        raise KeyboardInterrupt


def test_late_worker_ends_with_the_processes_it_started(tmp_path):
    body = (
        "import subprocess; child = subprocess.Popen(['sleep', '60']); "
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid)); child.wait()"
    )
    with pytest.raises(RewardError, match="no answer within 2 s"):
        verifier(tmp_path, body, workers=1, timeout=2)(EXAMPLE, "", True)
    pid = int((tmp_path / "pid").read_text())
    until = time.monotonic() + 20
    while state_of(pid) not in "ZX" and time.monotonic() < until:
        time.sleep(0.05)
    assert state_of(pid) in "ZX"


@pytest.mark.parametrize("start", ["subprocess.Popen(['sleep', '60'])", "fork()"])
def test_programs_started_by_a_function_hear_signals(tmp_path, start):
    """Worker processes hear none, and a program inherits that a signal is ignored."""
    before = (
        "import subprocess\n"
        "class fork:\n"
        "    def __init__(self):\n"
        "        self.pid = os.fork()\n"
        "        if not self.pid:\n"
        "            time.sleep(60); os._exit(0)\n"
        "    def terminate(self): os.kill(self.pid, signal.SIGTERM)\n"
        "    def wait(self): return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])\n"
    )
    body = f"child = {start}; time.sleep(0.3); child.terminate(); return -child.wait()"
    score = verifier(tmp_path, body, workers=1, timeout=20, before=before)
    assert score(EXAMPLE, "", True)["reward"] == signal.SIGTERM


def test_worker_imports_the_function_once(tmp_path):
    before = f"open({str(tmp_path / 'imports')!r}, 'a').write('x')"
    score = verifier(tmp_path, "pass", workers=1, timeout=20, before=before)
    score(EXAMPLE, "", True)
    assert (tmp_path / "imports").read_text() == "x"


def test_worker_gets_the_record_as_it_is(tmp_path):
    """Data sets have dates, arrays and mappings with keys that are no text."""
    record = {"day": datetime.date(2020, 1, 2), "counts": {1: (2, 3)}, "text": "\ud800"}
    score = verifier(tmp_path, f"assert record == {record!r}", workers=1, timeout=20, before="import datetime")
    assert score(Example("p", "", "", record=record), "", True)["reward"] == 1


def test_unpicklable_record_error_names_the_setting(tmp_path):
    score = verifier(tmp_path, "pass", workers=1, timeout=20)
    with pytest.raises(RewardError, match=r"the record cannot be sent to a worker process .*; set rewards\.workers=0"):
        score(Example("p", "", "", record={"f": lambda: 0}), "", True)


def test_ended_worker_error_names_no_limit(tmp_path):
    with pytest.raises(RewardError, match=r"its process ended with exit code 0$"):
        verifier(tmp_path, "os._exit(0)", workers=1, timeout=20)(EXAMPLE, "", True)


def test_one_process_calls_the_reward_function_by_default():
    assert Rewards().workers == 1


def test_slow_import_is_bounded(monkeypatch, tmp_path):
    """An import may load a model: its limit is another one, and is not that of a call."""
    monkeypatch.setattr("train.data.tasks.reward_function.IMPORT_SECONDS", 1.5)
    with pytest.raises(Exception, match=r"cannot import .* in a worker process: .* no answer within 1\.5 s"):
        verifier(tmp_path, "pass", workers=1, before="time.sleep(60)")
    assert WorkerPool("reward", "a:b")._start_seconds == 120


def test_question_after_an_interruption_has_its_own_answer(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import time\ndef rate(record, completion, finished):\n"
        "    time.sleep(0.2 if completion == 'slow' else 0)\n    return float(len(completion))\n"
    )
    pool = WorkerPool("reward", f"{tmp_path / 'mine.py'}:rate")

    def ask(text: str) -> float:
        question = {"record": {}, "completion": text, "finished": True}
        return pool.ask(question, seconds=LONG)["rewards"]["reward"]

    assert ask("") == 0.0
    with pytest.raises(TookTooLongError), time_limit(0.05):
        ask("slow")
    assert ask("a") == 1.0
    pool.close()
