"""Lost, failed and slow processes are named: the watch alone with a clock of its own, and real processes."""

import json
import os
import re
import signal
import time

import pytest

from tests import peers
from train.config.errors import LostProcessError
from train.distributed import peer_watch
from train.distributed.exchange import ProcessError

NAMES = ("a, pid 10", "b, pid 11", "c, pid 12")


class Service:
    """A coordination service in this process."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def key_value_set(self, key: str, text: str, allow_overwrite: bool = False) -> None:
        assert allow_overwrite or key not in self.values
        self.values[key] = text

    def key_value_dir_get(self, directory: str) -> list[tuple[str, str]]:
        return [(key, text) for key, text in self.values.items() if key.startswith(f"{directory}/")]


@pytest.fixture
def clock(monkeypatch):
    """`clock.now += seconds` is the time of the watch."""

    class ManualClock:
        now = 100.0

    monkeypatch.setattr(peer_watch.time, "monotonic", lambda: ManualClock.now)
    return ManualClock


@pytest.fixture
def watches(clock):
    service = Service()
    return [peer_watch.PeerWatch(NAMES, service, number) for number in range(3)]


def pass_seconds(clock, seconds: int, *watches) -> None:
    for _ in range(seconds):
        clock.now += 1
        for watch in watches:
            watch.beat()


def test_silent_process_is_named_with_its_last_activity(clock, watches):
    watches[2].enter(17, "update")
    pass_seconds(clock, 3, *watches)
    assert watches[0].reason() is None
    pass_seconds(clock, 7, *watches[:2])
    reason = watches[0].reason()
    assert isinstance(reason, LostProcessError)
    assert str(reason) == (
        "process 2 of 3 (c, pid 12) is lost: nothing was heard from it for 6 s, last at step 17 (update); "
        "start all processes again with --resume, or use --supervise"
    )
    assert reason.code == 75


def test_silence_after_an_abort_is_judged_sooner(clock, watches):
    pass_seconds(clock, 3, *watches)
    assert watches[1].reason_of_abort(lambda: True) is None
    assert "process 0 of 3 (a, pid 10) is lost" in str(watches[1].reason_of_abort(lambda: False))
    assert watches[0].reason_of_abort(lambda: False) is None
    pass_seconds(clock, 4, *watches[:2])
    assert watches[1].reason() is None
    assert "process 2 of 3" in str(watches[1].reason_of_abort(lambda: False))


def test_stopped_process_blames_nobody_after_waking(clock, watches):
    pass_seconds(clock, 3, *watches)
    clock.now += 60
    watches[0].beat()
    assert watches[0].reason() is None


def test_report_of_another_process_takes_precedence(clock, watches):
    pass_seconds(clock, 3, *watches)
    pass_seconds(clock, 8, watches[0])
    watches[0]._service.key_value_set(f"{peer_watch.LOST}/reason", "process 1 of 3 is lost")
    watches[0].beat()
    assert str(watches[0].reason()) == "process 1 of 3 is lost"


def test_a_failed_process_is_not_a_lost_one(clock, watches):
    watches[0]._service.key_value_set("kljax/failed/1", '["the disk is full", 130]')
    watches[0].beat()
    reason = watches[0].reason()
    assert isinstance(reason, ProcessError)
    assert (str(reason), reason.code) == ("process 1 of 3 failed: the disk is full", 130)


def test_process_awaited_by_all_others_is_slow(clock, watches):
    for step, phase in ((0, "sample"), (0, "score")):
        for watch in watches:
            watch.enter(step, phase)
        pass_seconds(clock, 100, *watches)
        assert watches[0].slow() is None, "all do the same"
    watches[0].enter(0, "update")
    pass_seconds(clock, 100, *watches)
    assert watches[0].slow() is None, "two are behind"
    watches[2].enter(0, "update")
    pass_seconds(clock, 59, *watches)
    assert watches[0].slow() is None, "not yet"
    pass_seconds(clock, 3, *watches)
    text = "process 1 of 3 (b, pid 11) is slow: the others have waited {} s for it; it is at step 0 (score)"
    assert watches[0].slow() == text.format(60)
    pass_seconds(clock, 58, *watches)
    assert watches[0].slow() is None, "said a moment ago"
    pass_seconds(clock, 10, *watches[::2])
    assert watches[0].slow() == text.format(128) + ", and silent for 9 s"
    watches[1].enter(0, "update")
    pass_seconds(clock, 100, *watches)
    assert watches[0].slow() is None


def test_process_awaited_in_an_exchange_is_slow(clock, watches, monkeypatch):
    for watch in watches:
        watch.enter(2, "rollout")
    for _ in range(64):
        clock.now += 1
        for watch, rounds in zip(watches, (8, 7, 8), strict=True):
            monkeypatch.setattr(peer_watch, "rounds_begun", lambda rounds=rounds: rounds)
            watch.beat()
    text = "process 1 of 3 (b, pid 11) is slow: the others have waited 62 s for it; it is at step 2 (rollout)"
    assert watches[0].slow() == text


def test_activities_are_small_json(watches):
    watches[1].enter(3, "update")
    watches[1].beat()
    assert json.loads(watches[1]._service.values["kljax/progress/1"]) == [1, 1, 3, "update"]


MOMENTS = ("collective", "compilation", "python", "exchange", "save", "end")
# That the leader is killed is in tests/integration/test_lost_process.py.
CASES = [
    pytest.param(moment, victim, processes, marks=[] if case == 0 else [pytest.mark.thorough])
    for case, (processes, victim, moment) in enumerate(
        (processes, victim, moment) for processes, victim in ((2, 1), (2, 0), (3, 1)) for moment in MOMENTS
    )
]


@pytest.mark.parametrize(("moment", "victim", "processes"), CASES)
def test_killed_process_is_named_within_fifteen_seconds(moment, victim, processes):
    arguments = ("tests.train.distributed.watched", "--at", moment)
    with peers.started(*arguments, processes=processes, devices=1, env=os.environ) as started:
        until = time.monotonic() + 120
        while not all("watching" in peer.stdout for peer in started):
            assert time.monotonic() < until
            time.sleep(0.05)
        time.sleep(2.5)
        started[victim].process.send_signal(signal.SIGKILL)
        peers.wait(started, 15)
        for number, peer in enumerate(started):
            if number != victim:
                assert peer.returncode == 75
                pid = started[victim].process.pid
                actual = rf"error: process {victim} of {processes} \(.*, pid {pid}\) is lost: .* step 7 \({moment}\)"
                assert re.search(actual, peer.stderr), peer.stderr


@pytest.mark.parametrize("moment", [pytest.param("interpreter", marks=pytest.mark.thorough), "end"])
def test_slow_process_is_not_lost(moment):
    ended = peers.run("tests.train.distributed.watched", "--at", moment, processes=2, devices=1, env=os.environ)
    for code, out, err in ended:
        assert (code, out.splitlines()[-1]) == (0, "all alive"), err
