"""The command for accelerators: end to end with tiny sizes on a CPU, and what becomes of a part that fails."""

import contextlib
import importlib
import json
import time

import pytest

from benchmarks import accelerator
from benchmarks.accelerator import PARTS, Part, Runner
from benchmarks.harness.worker import Worker


class Here:
    """Answers in this process, as `Remote` does for another one; the next test starts processes."""

    alive = True

    def __init__(self, module):
        self.worker = Worker(importlib.import_module(module).load)

    def ask(self, **request):
        return json.loads(json.dumps(self.worker.ask(**json.loads(json.dumps(request)))))

    def kill(self):
        raise AssertionError("a part takes longer than its time")


@pytest.mark.slow
def test_it_runs_end_to_end_on_a_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(accelerator, "start", lambda module, **_: contextlib.nullcontext(Here(module)))
    assert accelerator.main(["--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "accelerator-cpu-tiny.json").read_text())
    assert list(report["parts"]) == [part.title for part in PARTS]
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
    assert table.count("### ") == len(PARTS)
    assert "Not measured: Liger GRPO: PyTorch is not installed here." in table


# Answers as the worker does, without JAX: sleeps, ends, fails, or returns a row.
CONTENDER = """
import os, time

class Contender:
    def versions(self):
        return {"library": "1"}
    def rows(self, of, seconds):
        if of == "slow":
            time.sleep(60)
        if of == "ends":
            os._exit(7)
        if of == "fails":
            raise MemoryError("no memory")
        return [{"name": of, "value": 1}]

def load():
    return Contender()
"""


def test_failing_benchmark_becomes_a_row_and_others_continue(tmp_path, monkeypatch):
    (tmp_path / "odd_contender.py").write_text(CONTENDER)
    monkeypatch.setitem(accelerator.SETTINGS, "PYTHONPATH", str(tmp_path))
    requests = ["first", "ends", "fails", "slow", "last"]
    part = Part("odd", "odd_contender", requests, requests, 1.0, {}, load=lambda tiny: {})
    runner = Runner(part, tiny=True, until=time.monotonic() + 8)
    rows = {row["name"]: row for row in runner.measure()}
    assert list(rows) == requests
    assert rows["first"] == {"name": "first", "value": 1}
    assert "status 7" in rows["ends"]["problem"]
    assert rows["fails"]["problem"] == "MemoryError: no memory"
    assert rows["slow"]["problem"].startswith("took longer than")
    assert rows["last"]["problem"] == "not measured: the time of the part was over"
    assert runner.versions == {"library": "1"}
