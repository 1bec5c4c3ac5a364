"""Lost, failed and slow processes are named: the watch alone with a clock of its own, and real processes."""

import json
import os
import re
import signal
import time

import jax
import pytest

from tests import lost, peers
from train.config.errors import LostProcessError
from train.distributed import peer_watch
from train.distributed.exchange import ProcessError

NAMES = ("a, pid 10", "b, pid 11", "c, pid 12")


class Service:
    """A coordination service in this process, which knows the processes that live."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.live = [0, 1, 2]

    def key_value_set(self, key: str, text: str, allow_overwrite: bool = False) -> None:
        assert allow_overwrite or key not in self.values
        self.values[key] = text

    def key_value_dir_get(self, directory: str) -> list[tuple[str, str]]:
        return [(key, text) for key, text in self.values.items() if key.startswith(f"{directory}/")]

    def get_live_nodes(self, numbers: list[int]) -> dict[int, int]:
        return {number: 7 for number in numbers if number in self.live}


class Processes:
    """Three processes with one clock, whose watches beat in turn."""

    def __init__(self, monkeypatch) -> None:
        self.now = 100.0
        self.service = Service()
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(peer_watch.time, "monotonic", lambda: self.now)
        self.watches = [peer_watch.PeerWatch(NAMES, self.service, number) for number in range(3)]
        self._last = [peer_watch.LastProgress(0, "start", 0, 0)] * 3
        self.rounds = [0] * 3

    def enter(self, number: int, step: int, phase: str) -> None:
        phases = self._last[number].phases + 1
        self._last[number] = peer_watch.LastProgress(step, phase, 0, 0, phases)

    def pass_seconds(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1
            for number in self.service.live:
                self._monkeypatch.setattr(peer_watch, "_last", self._last[number])
                self._monkeypatch.setattr(peer_watch, "rounds_begun", lambda number=number: self.rounds[number])
                self.watches[number].beat()


@pytest.fixture
def three(monkeypatch):
    return Processes(monkeypatch)


def test_lost_process_is_named_with_its_last_activity(three):
    three.enter(2, 17, "update")
    three.pass_seconds(3)
    assert [watch.reason for watch in three.watches] == [None] * 3
    three.service.live = [0, 1]
    three.pass_seconds(1)
    reason = three.watches[0].reason
    assert isinstance(reason, LostProcessError)
    assert str(reason) == (
        "process 2 of 3 (c, pid 12) is lost, last at step 17 (update); start all processes again with --resume"
    )
    assert reason.code == 75


def test_process_0_is_lost_with_its_service(three, monkeypatch):
    three.pass_seconds(1)
    monkeypatch.setattr(three.service, "key_value_set", _refuse)
    three.watches[1].beat()
    assert "process 0 of 3 (a, pid 10) is lost, last at step 0 (start)" in str(three.watches[1].reason)


def _refuse(*_: object, **__: object) -> None:
    raise jax.errors.JaxRuntimeError("UNAVAILABLE: Socket closed")


def test_a_failed_process_is_not_a_lost_one(three):
    three.service.values["kljax/failed/1"] = '["the disk is full", 130]'
    three.service.live = [0, 2]
    three.pass_seconds(1)
    reason = three.watches[0].reason
    assert isinstance(reason, ProcessError)
    assert (str(reason), reason.code) == ("process 1 of 3 failed: the disk is full", 130)


def test_process_awaited_by_all_others_is_slow(three):
    slow = three.watches[0].slow
    for step, phase in ((0, "sample"), (0, "score")):
        for number in range(3):
            three.enter(number, step, phase)
        three.pass_seconds(100)
        assert slow() is None, "all do the same"
    three.enter(0, 0, "update")
    three.pass_seconds(100)
    assert slow() is None, "two are behind"
    three.enter(2, 0, "update")
    three.pass_seconds(59)
    assert slow() is None, "not yet"
    three.pass_seconds(3)
    text = "process 1 of 3 (b, pid 11) is slow: the others have waited {} s for it; it is at step 0 (score)"
    assert slow() == text.format(60)
    three.pass_seconds(58)
    assert slow() is None, "said a moment ago"
    three.pass_seconds(10)
    assert slow() == text.format(128)
    three.enter(1, 0, "update")
    three.pass_seconds(100)
    assert slow() is None


def test_process_awaited_in_an_exchange_is_slow(three):
    for number in range(3):
        three.enter(number, 2, "rollout")
    three.rounds = [8, 7, 8]
    three.pass_seconds(64)
    text = "process 1 of 3 (b, pid 11) is slow: the others have waited 62 s for it; it is at step 2 (rollout)"
    assert three.watches[0].slow() == text


def test_activities_are_small_json(three):
    three.enter(1, 3, "update")
    three.pass_seconds(1)
    assert json.loads(three.service.values["kljax/progress/1"]) == [1, 3, "update"]


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
            if number == victim:
                continue
            pid = started[victim].process.pid
            expected = rf"error: process {victim} of {processes} \(.*, pid {pid}\) is lost, last at step 7 \({moment}\)"
            named = peer.returncode == 75 and re.search(expected, peer.stderr)
            assert named or (victim == 0 and lost.names_the_leader(peer.returncode, peer.stderr)), peer.stderr


@pytest.mark.parametrize("moment", [pytest.param("interpreter", marks=pytest.mark.thorough), "end"])
def test_slow_process_is_not_lost(moment):
    ended = peers.run("tests.train.distributed.watched", "--at", moment, processes=2, devices=1, env=os.environ)
    for code, out, err in ended:
        assert (code, out.splitlines()[-1]) == (0, "all alive"), err
