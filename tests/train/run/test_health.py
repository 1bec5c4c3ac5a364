"""Probes of a launcher: where a process is, and since when."""

import json
import socket
import time
import urllib.error
import urllib.request

import pytest

from tests import tiny
from train.config.errors import UserError
from train.distributed.peer_watch import enter
from train.run.health import serving_health
from train.run.metrics import open_metrics


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def ask(port: int, path: str = "/healthz") -> tuple[int, dict]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_health_tells_step_phase_and_progress(port):
    with serving_health(tiny.config_of(f"report.health_port={port}").report):
        enter(7, "update")
        status, record = ask(port)
        assert 0 <= record.pop("seconds_since_progress") < 5
        assert (status, record) == (200, {"process": 0, "step": 7, "phase": "update"})
        assert ask(port, "/other")[0] == 404
        with (
            pytest.raises(UserError, match=rf"^report\.health_port: cannot listen on port {port}: .* in use; choose"),
            serving_health(tiny.config_of(f"report.health_port={port}").report),
        ):
            pass
    with pytest.raises(urllib.error.URLError):
        ask(port)


def test_step_is_healthy_until_the_limit(port):
    section = tiny.config_of(f"report={{health_port: {port}, unhealthy_after: 0.5}}").report
    with serving_health(section):
        enter(3, "rollout")
        assert ask(port)[0] == 200
        time.sleep(0.6)
        status, record = ask(port)
        assert (status, record["step"], record["seconds_since_progress"] > 0.5) == (503, 3, True)
        enter(3, "update")
        assert ask(port)[0] == 200


def test_prometheus_has_the_time_of_the_last_progress(port, tmp_path):
    writer = open_metrics(tiny.config_of(f"report.prometheus_port={port}"), tmp_path)
    enter(1, "rollout")
    before = time.time()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    writer.close()
    (line,) = (line for line in lines if line.startswith("kljax_last_progress_timestamp_seconds "))
    assert before - 5 < float(line.split()[1]) <= before
