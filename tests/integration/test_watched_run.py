"""A run that is watched from outside: its health, a trace of a step, and lines for a log collector."""

import json
import socket

from tests.integration.command import run_here


def test_run_is_traced_and_logged_as_json(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    done = run_here(
        *("configs/smoke.yaml", f"output={tmp_path}", "eval.prompts=0", "warm_start.steps=0"),
        *("profile.steps=[2, 2]", "log.format=json", f"report.health_port={port}"),
    )
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (done.stdout + done.stderr).splitlines()]
    assert {(record["process"], record["time"][-6:]) for record in records} == {(0, "+00:00")}
    assert [record for record in records if record["text"].startswith("RL 2/2  reward ")]
    assert len(list((tmp_path / "smoke" / "profile").rglob("*.xplane.pb"))) == 1
    # The port is free again.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))
