"""Runs in a bucket of a real server of S3: killed at ten moments and resumed, exported, evaluated, shown."""

import filecmp
import json
import os
import signal
import threading
from pathlib import Path

import pytest

from tests.integration.command import finish, run, start, wait_for
from tests.storage.runs import QUICK, STEPS, assert_same_run, command, refused
from tests.storage.servers import Proxy, download

MOMENTS = 10


def test_run_equals_a_local_one_and_is_read_back(s3, env, local, tmp_path):
    run(env, *QUICK, "output=s3://bucket/whole").succeeded()
    assert_same_run(download(env, "s3://bucket/whole/quickstart", tmp_path / "copy"), local)
    assert not list(Path(__file__).parents[2].glob("s3*"))
    here = tmp_path / "here"
    here.mkdir()
    address = "s3://bucket/whole/quickstart"
    command(env, "train.report", address, cwd=here).succeeded()
    command(env, "train.eval", address, "--json", "s3://bucket/whole/eval.json", cwd=here).succeeded()
    command(env, "train.export", address, "--to", "s3://bucket/exports/adapter", cwd=here).succeeded()
    command(env, "train.export", address, "--to", "s3://bucket/exports/merged", "--merge", cwd=here).succeeded()
    command(env, "train.export", address, "--to", "s3://bucket/exports/orbax", "--format", "orbax").succeeded()
    command(env, "train.export", str(local), "--to", str(here / "merged"), "--merge").succeeded()
    assert [path.name for path in here.iterdir()] == ["merged"]
    # What makes a folder one of a model, or a checkpoint complete, comes last.
    written = [path.partition("?")[0] for path in s3.writes()]
    for folder, last in (
        ("merged", "config.json"),
        ("adapter", "adapter_config.json"),
        ("orbax", "commit_success.txt"),
    ):
        assert [path for path in written if f"/exports/{folder}/" in path][-1].endswith(f"/{folder}/{last}")
    copies = download(env, "s3://bucket/exports", tmp_path / "exports")
    for path in (here / "merged").iterdir():
        assert filecmp.cmp(path, copies / "merged" / path.name, shallow=False), path.name
    assert json.loads(download(env, "s3://bucket/whole", tmp_path / "w").joinpath("eval.json").read_text())["sampled"]
    # And in again: weights, adapter and references of every kind.
    smaller = ("steps=1", "warm_start.steps=0", "eval.prompts=0", "output=s3://bucket/second")
    model = ("model=null", "model.path=s3://bucket/exports/merged")
    run(env, *QUICK, *smaller, *model, "name=full").succeeded()
    run(env, *QUICK, *smaller, *model, "name=full", "steps=2", "--resume").succeeded()
    adapter = ("lora=null", "lora.path=s3://bucket/exports/adapter")
    run(env, *QUICK, *smaller, *model, *adapter, "name=adapter").succeeded()
    for name, source, path in (
        ("a", "adapter", "s3://bucket/exports/adapter"),
        ("b", "checkpoint", "s3://bucket/exports/merged"),
        ("c", "adapter", "s3://bucket/exports/orbax"),
        ("d", "adapter", f"{address}/checkpoints/{STEPS}"),
    ):
        reference = f"reference={{source: {source}, path: '{path}'}}"
        start_of = f"warm_start={{checkpoint: '{address}/base', steps: 0, batch_size: 16}}"
        run(env, *QUICK, *smaller, start_of, reference, f"name={name}").succeeded()


@pytest.mark.parametrize("moment", range(MOMENTS))
def test_run_killed_at_a_write_resumes_to_the_bit(s3: Proxy, env, local, tmp_path, moment):
    """The process is killed while the store has its k-th object, before it is written or after."""
    output, root = f"s3://bucket/killed-{moment}", f"s3://bucket/killed-{moment}/quickstart"
    first = _writes_of_a_run(s3, env)
    number = len(first) * (moment + 1) // (MOMENTS + 1)
    reached, killed = threading.Event(), threading.Event()
    count = [0]

    def rule(method: str, path: str) -> tuple[int, str, str] | None:
        if method in ("PUT", "POST") and "/quickstart/" in path and not killed.is_set():
            count[0] += 1
            if count[0] >= number:
                reached.set()
                killed.wait(60)
                return (500, "InternalError", "too late") if moment % 2 else None
        return None

    s3.rule = rule
    process = start(env, *QUICK, f"output={output}")
    wait_for(process, reached.is_set)
    process.send_signal(signal.SIGKILL)
    process.wait()
    killed.set()
    finish(process)
    s3.rule = lambda method, path: None
    run(env, *QUICK, f"output={output}", "--resume").succeeded()
    assert_same_run(download(env, root, tmp_path / "copy"), local)


_COUNTED: list[str] = []


def _writes_of_a_run(s3: Proxy, env: dict[str, str]) -> list[str]:
    """Lists the objects that an uninterrupted run writes after its config, in order."""
    if not _COUNTED:
        run(env, *QUICK, "output=s3://bucket/counted").succeeded()
        writes = [path for path in s3.writes() if "/quickstart/" in path]
        _COUNTED.extend(writes[next(i for i, path in enumerate(writes) if "inputs.json" in path) :])
        _COUNTED[:0] = writes[: len(writes) - len(_COUNTED)]
    return _COUNTED


def test_two_processes_do_not_write_one_run(s3, env):
    output = "output=s3://bucket/two"
    first = start(env, *QUICK, output, "steps=400")
    wait_for(first, lambda: any("/checkpoints/1/commit" in path for path in s3.writes()))
    ended = run(env, *QUICK, output, "steps=400", "--resume")
    assert "is being written by another process" in refused(ended)
    first.send_signal(signal.SIGTERM)
    assert finish(first).returncode == 130
    assert os.environ.get("AWS_ENDPOINT_URL") is None


STORES_THAT_REFUSE = {
    "no rights": (403, "AccessDenied", "Access Denied"),
    "full": (507, "InsufficientStorage", "the store has no room"),
    "slow down": (503, "SlowDown", "Please reduce your request rate"),
}


@pytest.mark.parametrize("fault", STORES_THAT_REFUSE)
def test_store_that_refuses_at_the_start_is_named(s3, env, fault):
    s3.rule = lambda method, path: STORES_THAT_REFUSE[fault] if method == "PUT" else None
    line = refused(run(env, *QUICK, f"output=s3://bucket/{fault.replace(' ', '-')}"))
    assert line.startswith("error: output: cannot write s3://bucket/")
    assert s3.writes() == []


@pytest.mark.parametrize(
    "fault_and_part", [(fault, part) for fault in STORES_THAT_REFUSE for part in ("/checkpoints/2/", "/metrics.jsonl")]
)
def test_store_that_refuses_in_a_run_loses_nothing(s3, env, local, tmp_path, fault_and_part):
    fault, part = fault_and_part
    output = f"s3://bucket/{fault.replace(' ', '-')}{part.replace('/', '-')}x"

    def rule(method: str, path: str) -> tuple[int, str, str] | None:
        begun = any("/checkpoints/1/commit_success" in written for written in s3.writes())
        return STORES_THAT_REFUSE[fault] if method in ("PUT", "POST") and part in path and begun else None

    s3.rule = rule
    line = refused(run(env, *QUICK, f"output={output}"))
    assert "cannot write" in line
    assert "--resume" in line
    s3.rule = lambda method, path: None
    run(env, *QUICK, f"output={output}", "--resume").succeeded()
    assert_same_run(download(env, f"{output}/quickstart", tmp_path / "copy"), local)


def test_store_that_is_slow_is_waited_for(s3, env, local, tmp_path):
    s3.rule = lambda method, path: 0.1
    run(env, *QUICK, "output=s3://bucket/slow").succeeded()
    s3.rule = lambda method, path: None
    assert_same_run(download(env, "s3://bucket/slow/quickstart", tmp_path / "copy"), local)


def test_wrong_bucket_and_missing_objects_are_named(s3, env, tmp_path):
    wrong = "s3://nobody/run"
    line = refused(run(env, *QUICK, "output=s3://nobody/runs"))
    assert line == "error: output: got 's3://nobody/runs', but there is no bucket nobody; make it first"
    none = "s3://bucket/none"
    without = "eval.prompts=0", "warm_start.steps=0"
    cases = {
        "model.path": ("model=null", f"model.path={none}"),
        "lora.path": (f"lora.path={none}",),
        "reference.path": (f"reference={{source: checkpoint, path: '{none}'}}",),
        "warm_start.checkpoint": (f"warm_start.checkpoint={none}",),
        "rollout.source.path": (f"rollout.source={{type: file, path: '{none}'}}", "task=recording", *without),
    }
    for field, overrides in cases.items():
        assert f"{field}: " in refused(run(env, *QUICK, f"output={tmp_path}", *overrides)), field
    for module, arguments in {
        "train.report": (wrong,),
        "train.eval": (none,),
        "train.export": (none, "--to", str(tmp_path / "x")),
    }.items():
        assert none in refused(command(env, module, *arguments)).replace(wrong, none), module


def test_missing_key_is_an_error_that_says_so(s3, env, tmp_path):
    without = {name: value for name, value in env.items() if not name.startswith(("AWS_ACCESS", "AWS_SECRET"))}
    without |= {"HOME": str(tmp_path), "AWS_EC2_METADATA_DISABLED": "true"}
    line = refused(run(without, *QUICK, "output=s3://bucket/nobody"))
    assert "output: cannot write s3://bucket/nobody: Unable to locate credentials" in line
