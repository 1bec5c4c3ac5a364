"""A run in a store has the bits of a local one, is resumed, and every command reads it."""

import filecmp
import json
import subprocess
import sys

import pytest

from kljax.checkpoint import _stores
from tests.integration.command import TINY, assert_same_arrays, run_here, state_arrays
from tests.run_programs import shared_by_runs
from tests.stores import FolderStore, no_fault
from train import eval as evaluation
from train import export
from train.report import __main__ as report
from train.storage.paths import as_path

QUICK = (
    "configs/quickstart.yaml",
    *TINY,
    "optim.warmup_steps=0",
    "lora={rank: 2, alpha: 4.0}",
    "reference={source: base}",
    "kl.loss.coef=0.05",
    "report.rollouts=4",
    "checkpoint.keep=2",
)


@pytest.fixture(autouse=True, scope="module")
def _shared_by_runs():
    """A run and what continues it share the programs that they trace."""
    with shared_by_runs():
        yield


@pytest.mark.slow
def test_run_resumes_to_the_bits_of_a_local_run(store, tmp_path, capsys):
    local = run_here(*QUICK, "steps=3", f"output={tmp_path}/local").succeeded().root
    run_here(*QUICK, "steps=2", "output=s3://bucket/runs", "rollout.record=s3://bucket/rows").succeeded()
    root = as_path("s3://bucket/runs/quickstart")
    # A process that was killed leaves a checkpoint without its last file, and lines after the last whole one.
    (root / "checkpoints/3/state/d/part").write_text("part")
    (root / "metrics.jsonl").write_bytes((root / "metrics.jsonl").read_bytes() + b'{"phase": "train", "st')
    run_here(*QUICK, "steps=3", "output=s3://bucket/runs", "rollout.record=s3://bucket/rows", "--resume").succeeded()
    here = store / "runs/quickstart"
    assert (here / "metrics.jsonl").read_text() == (local / "metrics.jsonl").read_text()
    for step in (0, 3):
        assert_same_arrays(state_arrays(here, step), state_arrays(local, step))
    names = sorted(path.name for path in (local / "samples").iterdir())
    assert filecmp.cmpfiles(here / "samples", local / "samples", names, shallow=False)[0] == names
    assert sorted(path.name for path in (store / "rows").iterdir()) == [
        *(f"{step:08d}.jsonl" for step in range(3)),
        "count.sealed",
    ]
    expected = {path.name for path in local.iterdir()} - {".lock"}
    assert {path.name for path in here.iterdir()} == expected
    assert not list(store.rglob("*.partial"))

    address = str(root)
    assert report.main([address]) == 0
    assert (here / "report.html").stat().st_size > 10_000
    assert evaluation.main([address, "--json", "s3://bucket/eval.json"]) == 0
    assert json.loads((store / "eval.json").read_text())["of"] == address
    FolderStore.written.clear()
    assert export.main([address, "--to", "s3://bucket/merged", "--merge"]) == 0
    assert FolderStore.written[-1] == "bucket/merged/config.json"
    assert export.main([str(local), "--to", str(tmp_path / "merged"), "--merge"]) == 0
    for path in (tmp_path / "merged").iterdir():
        assert filecmp.cmp(path, store / "merged" / path.name, shallow=False), path.name
    assert export.main([address, "--to", "s3://bucket/merged"]) == 2
    assert "is there already, and nothing is overwritten" in capsys.readouterr().err
    assert not list(tmp_path.glob("s3*"))

    # A recording, a folder and an orbax directory are read where they are, and a changed recording is noticed.
    again = (
        *QUICK,
        *("model=null", "model.path=s3://bucket/merged", "warm_start.steps=0", "eval.prompts=0", "name=again"),
        *("lora={rank: 2}", "reference={source: checkpoint, path: 's3://bucket/merged'}", "output=s3://bucket/runs"),
        *("task=recording", "rollout.source={type: file, path: 's3://bucket/rows'}", "data.max_operand=99"),
    )
    run_here(*again, "steps=1").succeeded()
    recorded = json.loads((store / "runs/again/base.json").read_text())
    assert recorded["folder"] == "s3://bucket/merged"
    files = json.loads((store / "runs/again/inputs.json").read_text())["files"]
    assert "s3://bucket/rows/00000000.jsonl" in files["rollout.source.path"]
    run_here(*again, "steps=2", "--resume").succeeded()
    rows = as_path("s3://bucket/rows/00000001.jsonl")
    rows.write_text(rows.read_text().replace("finished", "Finished"))
    ended = run_here(*again, "steps=3", "--resume")
    assert ended.returncode == 2


# A loop of orbax is closed while the threads of its other writes still tell it that they have ended.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.slow
@pytest.mark.parametrize("part", ["/checkpoints/1/", "/metrics.jsonl", "/base/"])
def test_store_that_refuses_ends_the_run_and_loses_nothing(store, monkeypatch, part):
    def full(operation, path):
        begun = (store / "runs/quickstart/checkpoints/0/commit_success.txt").exists() or part == "/base/"
        if operation == "write" and part in f"/{path}" and begun:
            raise OSError(28, "The bucket is full")

    monkeypatch.setattr(FolderStore, "fault", staticmethod(full))
    ended = run_here(*QUICK, "steps=1", "output=s3://bucket/runs")
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr
    assert "The bucket is full" in ended.stderr
    monkeypatch.setattr(FolderStore, "fault", staticmethod(no_fault))
    run_here(*QUICK, "steps=1", "output=s3://bucket/runs", "--resume").succeeded()


def test_specification_of_s3_is_that_of_google_with_another_driver(monkeypatch):
    from orbax.checkpoint._src.serialization import tensorstore_utils

    _stores.open_s3_in_orbax()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://host:1")
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    made = tensorstore_utils.build_kvstore_tspec("s3:/bucket/run/0/state", "params")
    google = tensorstore_utils.build_kvstore_tspec("gs://bucket/run/0/state", "params")
    driver = made["base"]
    assert driver.pop("s3_request_retries") == _stores.RETRIES
    assert driver == {
        "driver": "s3",
        "bucket": "bucket",
        "path": google["base"]["path"],
        "aws_credentials": {"type": "environment"},
        "endpoint": "http://host:1",
        "aws_region": "eu-west-1",
    }
    assert {**made, "base": None} == {**google, "base": None}
    assert "s3" not in str(tensorstore_utils.build_kvstore_tspec("/tmp/run", "params"))


@pytest.mark.slow
def test_local_run_loads_no_package_of_a_store(tmp_path):
    code = (
        "import sys; from train.__main__ import main; "
        f"code = main(['configs/smoke.yaml', 'output={tmp_path}', 'steps=1']); "
        "print(code, sorted(set(sys.modules) & {'s3fs', 'gcsfs', 'botocore', 'aiobotocore', 'aiohttp', "
        "'train.storage.lease.thread'}), 'fsspec.asyn' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "0 [] False"
