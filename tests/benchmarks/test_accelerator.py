"""The command for accelerators: end to end with tiny sizes on a CPU, and what becomes of a part that fails."""

import contextlib
import functools
import importlib
import json
import pathlib
import subprocess
import time

import pytest

from benchmarks import accelerator
from benchmarks.accelerator import Runner
from benchmarks.harness.worker import Worker
from benchmarks.suites.accelerator import kernels, parts, quickstart
from benchmarks.suites.accelerator.parts import ALL, NEXT, Part, Peer


@functools.cache
def answer(module, load, request):
    """Asks a contender of this process, once for both plans."""
    return json.loads(json.dumps(worker(module, load).ask(**json.loads(request))))


@functools.cache
def worker(module, load):
    made = Worker(importlib.import_module(module).load)
    made.ask(**json.loads(load))
    return made


class Here:
    """Answers in this process, as `Remote` does for another one; other tests start processes."""

    alive = True

    def __init__(self, module):
        self.module = module
        self.load = '{"do": "load"}'

    def ask(self, **request):
        # The time that is left differs.
        request = {**request, "seconds": 60} if "seconds" in request else request
        if request["do"] == "load":
            self.load = json.dumps(request)
            return None
        return answer(self.module, self.load, json.dumps(request))

    def kill(self):
        raise AssertionError("a part takes longer than its time")


def summary_of_a_run(command):
    """Stands for the run of a recipe, which tests of its own start."""
    (output,) = (word.removeprefix("output=") for word in command if word.startswith("output="))
    folder = pathlib.Path(output) / "smoke"
    folder.mkdir()
    (folder / "summary.json").write_text('{"accuracy_before": 0.5, "accuracy_after": 1.0, "steps": 1}')
    return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def in_process(monkeypatch):
    monkeypatch.setattr(accelerator, "start", lambda module, **_: contextlib.nullcontext(Here(module)))
    monkeypatch.setattr(quickstart, "run", summary_of_a_run)


@pytest.mark.slow
def test_both_plans_run_end_to_end_on_a_cpu(tmp_path, in_process):
    assert accelerator.main(["--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "accelerator-cpu-tiny.json").read_text())
    assert list(report["parts"]) == [part.title for part in ALL]
    goldens, head, tiles, attention, experts, model = report["parts"].values()
    assert goldens[0]["compared"] == goldens[0]["cases"] > 1
    assert 0 < goldens[0]["share"] < 1
    assert all(row["ms"] > 0 and row["bytes"] > 0 and row["rate"] > 0 for row in head[:2])
    assert head[2]["absent"] == "PyTorch is not installed here"
    assert all(row["of_naive"] > 0 and row["bytes"] > 0 for row in tiles)
    assert [(row["name"], row["chosen"]) for row in attention] == [("tiny: blocks", None), ("tiny: dense", "yes")]
    assert all(row["ms"] > 0 and row["bytes"] > 0 for row in attention)
    assert attention[1]["differs"] < 3e-2
    assert all(row["of_dense"] > 0 and row["of_equal"] > 0 and row["rate"] > 0 for row in experts[:-3])
    assert all(row["of_dense"] > 0 for row in experts[-3:])
    assert model[0]["rollout_rate"] > 0
    assert model[0]["update_rate"] > 0
    table = (tmp_path / "accelerator-cpu-tiny.md").read_text()
    assert table.count("### ") == len(ALL)
    assert "Not measured: Liger GRPO: PyTorch is not installed here." in table

    assert accelerator.main(["--plan", "next", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "accelerator-next-cpu-tiny.json").read_text())
    assert list(report["parts"]) == [part.title for part in NEXT]
    job, compared, traces, _, decode, _, _, _, (ours, theirs) = report["parts"].values()
    assert job[0]["accuracy_after"] == 1
    assert all(0 < row["differs"] <= row["allowed"] for row in compared)
    assert all(row["kernels"] > 0 and 0 < row["busy"] <= 1 for row in traces)
    assert len(list((tmp_path / "accelerator-next-cpu-tiny" / "traces").rglob("*.xplane.pb"))) == 2
    assert decode[0]["step_ms"] > 0
    assert ours["update_rate"] > 0
    assert theirs["absent"] == "no --peers was given"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in parts.KERNELS if name not in NEXT[1].tiny])
def test_kernels_are_checked_against_their_formulas(name):
    (row,) = kernels.load(tiny=True).rows(name, 60)
    assert 0 < row["differs"] <= row["allowed"]
    assert "problem" not in row


def test_kernel_that_differs_is_a_problem(monkeypatch):
    monkeypatch.setitem(kernels.COMPARED, "broken", lambda sizes, interpret: kernels.KernelDistance(1, 0.5, 0.1))
    (row,) = kernels.load(tiny=True).rows("broken", 60)
    assert row["problem"] == "differs from float32 by 5.0e-01, expected at most 1.0e-01"


# Answers as the worker does, without JAX: sleeps, ends, fails, or returns a row.
CONTENDER = """
import os, sys, time
from benchmarks.harness.environments import MissingError

class Contender:
    def versions(self):
        return {"library": "1"}
    def describe(self):
        return {"date": "today", "processor": "a", "cores": "1 core", "memory": None, "system": "b", "platform": "cpu",
                "devices": 1}
    def rows(self, of, seconds):
        if of == "slow":
            time.sleep(60)
        if of == "ends":
            os._exit(7)
        if of == "fails":
            raise MemoryError("no memory")
        if of == "missing":
            raise MissingError("torch is not installed")
        return [{"name": of, "value": 1, "flags": os.environ.get("XLA_FLAGS"), "python": sys.executable}]

def load():
    return Contender()
"""


@pytest.fixture
def odd_contender(tmp_path, monkeypatch):
    (tmp_path / "odd_contender.py").write_text(CONTENDER)
    monkeypatch.setitem(accelerator.SETTINGS, "PYTHONPATH", str(tmp_path))
    monkeypatch.setitem(accelerator.SETTINGS, "XLA_FLAGS", "--all")
    return "odd_contender"


def odd_part(module, title, *requests, minutes=1.0, **options):
    columns = {"value": ("value", "d")}
    return Part(title, module, requests, requests, minutes, columns, load=lambda tiny, directory: {}, **options)


def test_failing_benchmark_becomes_a_row_and_others_continue(odd_contender):
    requests = ["first", "ends", "fails", "missing", "slow", "last"]
    kept = []
    runner = Runner(
        odd_part(odd_contender, "odd", *requests),
        tiny=True,
        until=time.monotonic() + 8,
        keep=lambda rows: kept.append(len(rows)),
    )
    rows = {row["name"]: row for row in runner.measure()}
    assert list(rows) == requests
    assert rows["first"]["value"] == 1
    assert "status 7" in rows["ends"]["problem"]
    assert rows["fails"]["problem"] == "MemoryError: no memory"
    assert rows["missing"]["absent"] == "torch is not installed"
    assert rows["slow"]["problem"].startswith("took longer than")
    assert rows["last"]["problem"] == "not measured: the time of the part was over"
    assert runner.versions == {"library": "1"}
    assert kept == [1, 2, 3, 4, 5, 6]


def test_next_plan_leaves_out_what_no_longer_fits(odd_contender, tmp_path, monkeypatch, capsys):
    peer = Peer(odd_contender, lambda tiny: {})
    plan = (
        odd_part(odd_contender, "long", "first", minutes=100.0),
        odd_part(odd_contender, "odd", "first", "fails", settings={"first": {"XLA_FLAGS": "--one"}}, fresh=True),
        odd_part(odd_contender, "raced", "ours", "theirs", peers={"theirs": peer}, fresh=True),
    )
    monkeypatch.setitem(accelerator.PLANS, "next", plan)
    start = accelerator.start
    probed = lambda module, **options: start(odd_contender, **options)  # noqa: E731
    monkeypatch.setattr(accelerator, "start", probed)
    python = tmp_path / "peers-python"
    python.symlink_to(accelerator.sys.executable)
    arguments = ["--plan", "next", "--minutes", "2", "--out", str(tmp_path), "--peers", str(python)]
    assert accelerator.main(arguments) == 1
    report = json.loads((tmp_path / "accelerator-next-cpu-tiny.json").read_text())["parts"]
    assert report["long"][0]["absent"] == "takes 100 minutes, and 2.0 of --minutes are left"
    assert report["odd"][0]["flags"] == "--one"
    assert report["odd"][1]["problem"] == "MemoryError: no memory"
    assert [row["python"] for row in report["raced"]] == [accelerator.sys.executable, str(python)]
    assert report["raced"][0]["flags"] == "--all"
    assert "Not measured: first: takes 100 minutes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--minutes", "0"], "argument --minutes: got '0', expected minutes above 0"),
        (["--json", "x.json"], "argument --json: has no meaning here; --out names the directory of both files"),
        (["--peers", "nowhere"], "argument --peers: got 'nowhere', expected a Python interpreter"),
    ],
)
def test_wrong_options_are_named(arguments, message, capsys):
    with pytest.raises(SystemExit):
        accelerator.main(arguments)
    assert message in capsys.readouterr().err


def test_parts_have_names_of_their_own():
    for plan in (ALL, NEXT):
        assert len({part.name for part in plan}) == len(plan)
        assert len({part.title for part in plan}) == len(plan)
