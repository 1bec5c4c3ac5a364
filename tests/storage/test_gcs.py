"""Runs in a bucket of an emulator of Google Cloud Storage, which orbax and TensorStore write to themselves."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.command import environment, run, start
from tests.storage import servers
from tests.storage.runs import QUICK, assert_same_run, command, refused


@pytest.fixture(scope="module")
def env(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of a command that finds the emulator."""
    with servers.gcs() as variables:
        yield {**environment(cache), **variables, "KLJAX_COPIES": str(tmp_path_factory.mktemp("copies"))}


def test_run_is_killed_and_resumed_to_the_bit_and_read_back(env, local, tmp_path):
    address = "gs://bucket/runs/quickstart"
    process = start(env, *QUICK, "output=gs://bucket/runs")
    lines: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if line.startswith("RL 2/"):
            break
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    process.stderr.close()
    run(env, *QUICK, "output=gs://bucket/runs", "--resume").succeeded()
    assert_same_run(servers.download(env, address, tmp_path / "copy"), local)
    command(env, "train.report", address, cwd=tmp_path).succeeded()
    command(env, "train.eval", address, cwd=tmp_path).succeeded()
    command(env, "train.export", address, "--to", "gs://bucket/merged", "--merge", cwd=tmp_path).succeeded()
    again = ("model=null", "model.path=gs://bucket/merged", "warm_start.steps=0", "eval.prompts=0", "steps=1")
    run(env, *QUICK, *again, "output=gs://bucket/again").succeeded()
    line = refused(run(env, *QUICK, "output=gs://nobody/runs"))
    assert line == "error: output: got 'gs://nobody/runs', but there is no bucket nobody; make it first"
