"""The parts of the head's benchmark on problems whose answers are known: inputs, verdicts, memory, processes."""

import dataclasses
import io
import json
import subprocess
import sys

import numpy as np
import pytest

from benchmarks import head
from benchmarks.harness import environments, measure, worker
from benchmarks.harness.process import ROOT, RemoteError, start
from benchmarks.harness.report import ContenderResult, Measured
from benchmarks.suites.head import jax_forms
from benchmarks.suites.head.forms import QUICK, SIZES, FormsContender, HeadOptions, Inputs, Size
from benchmarks.suites.head.jax_forms import make_inputs

MODULE = "benchmarks.suites.head.jax_forms"


def test_inputs_are_equal_if_drawn_again_or_loaded(tmp_path):
    inputs = make_inputs(QUICK)
    inputs.save(tmp_path)
    again, loaded = make_inputs(QUICK), Inputs.load(tmp_path)
    for name, array in vars(inputs).items():
        np.testing.assert_array_equal(array, getattr(again, name))
        np.testing.assert_array_equal(array, getattr(loaded, name))
    assert inputs.size == loaded.size == QUICK
    assert inputs.mask.sum() == QUICK.tokens // 2


def test_old_log_probs_decide_the_clipping():
    inputs = make_inputs(QUICK)
    logits = inputs.hidden.astype(np.float64) @ inputs.head
    exact = logits[np.arange(QUICK.tokens), inputs.targets] - np.log(np.exp(logits).sum(1))
    ratios = np.exp(exact - inputs.old_log_probs)
    within, beyond = np.abs(ratios - 1) < 0.11, np.abs(ratios - 1) > 0.3
    assert (within | beyond).all()
    assert beyond.sum() == QUICK.tokens / 3


def measured(size=SIZES[0], **seconds):
    """Forms with the given seconds, and a byte of memory for each."""
    results = {
        name: ContenderResult(name, seconds={"run": [(time + 1, 2 * time), (time, 3 * time)]}, temp_bytes=int(time))
        for name, time in seconds.items()
    }
    return Measured(size, results)


def verdicts(found, device="cpu"):
    targets = {head.title(target): target for target in head.TARGETS[device]}
    return {
        (target.measure, target.name, target.against): check
        for check in head.checks(found, device)
        for target in (targets[check.title],)
    }


def test_verdicts_of_times_and_memory():
    actual = verdicts(measured(tile=80.0, naive=100.0, tunix_full=1921.0, tunix_chunk=99.0, tile_kl=121.0))
    met = actual["time", "tile", "naive"]
    assert (met.value, met.other, met.limit, met.verdict) == (0.8, 0.8, 0.8, "met")
    assert actual["time", "tile", "tunix_chunk"].verdict == "missed"
    assert actual["time", "tile_kl", "tile"].verdict == "missed"
    assert actual["temporary", "tile", "naive"].verdict == "missed"
    assert actual["temporary", "tile", "tunix_full"].verdict == "met"
    assert actual["time", "tile", "verl"].verdict == "not measured: not among the contenders"
    assert not measured(tile=1.0).failures({})


def test_large_vocabulary_has_separate_bounds():
    large = verdicts(measured(Size(1024, 1024, 131_072), tile=10.0, naive=200.0))
    assert large["temporary", "tile", "naive"].limit == 1 / 24
    assert large["temporary", "tile", "naive"].verdict == "missed"
    assert verdicts(measured(tile=10.0, naive=200.0))["temporary", "tile", "naive"].verdict == "met"


def test_errors_name_the_cause_of_a_worthless_table():
    actual = measured(QUICK, tile=1.0, naive=1.0, verl=1.0, trl=1.0)
    results = actual.results
    results["tile"].differences = {"loss": 1e-6, "gradients": 2e-4}
    results["verl"].differences = {"loss": float("nan"), "gradients": 0.0}
    results["naive"].differences = {"loss": 0.0, "gradients": 0.0}
    results["trl"].problem, results["trl"].failed = "no memory", True
    assert actual.failures({"loss": 1e-4, "gradients": 1e-4}) == [
        f"{QUICK} trl: no memory",
        f"{QUICK} tile: got a difference of 2.0e-04 from the gradients of the baseline, expected at most 1e-04",
        f"{QUICK} verl: got a difference of nan from the loss of the baseline, expected at most 1e-04",
    ]


def test_distances():
    expected = np.array([[3.0, 4.0], [0.0, 0.0]], np.float32)
    assert measure.relative_distance(expected, expected) == 0
    assert measure.relative_distance(
        expected + np.array([[0.0, 0.0], [0.3, 0.4]], np.float32), expected
    ) == pytest.approx(0.1)
    assert measure.relative_distance(expected * np.float32(np.nan), expected) == float("inf")
    with pytest.raises(ValueError, match="shape"):
        measure.relative_distance(expected[:1], expected)


class Allocating(FormsContender):
    """Forms whose memory is known: a run takes 96 MiB and returns 32 of them."""

    def outputs(self, name):
        scratch = np.full(64 << 20, 1, np.uint8)
        return (np.full(32 << 20, scratch[0]),)


@pytest.mark.skipif(not measure.known(), reason="the system does not tell a process's peak memory")
def test_peak_memory_is_without_results():
    contender = Allocating(make_inputs(QUICK), HeadOptions())
    assert contender.peak("any") == pytest.approx(64 << 20, rel=0.1)


def test_peak_memory_of_gpu_comes_from_its_library():
    class Gpu(Allocating):
        def device_peak(self, name):
            return 7

    assert Gpu(make_inputs(QUICK), HeadOptions(device="gpu")).peak("any") == 7


def test_a_worker_answers_and_survives_errors(tmp_path):
    make_inputs(QUICK).save(tmp_path)
    options = {"device": "cpu", "dtype": "float32", "threads": 0, "tile": [32, 256]}
    requests = [
        {"do": "load", "inputs": str(tmp_path), "options": options},
        {"do": "run", "name": "naive_forward"},
        {"do": "run", "name": "nothing"},
        {"do": "dance"},
        {"do": "versions"},
    ]
    replies = io.StringIO()
    lines = io.StringIO("".join(json.dumps(request) + "\n" for request in requests))
    worker.serve(worker.Worker(jax_forms.load), lines, replies)
    loaded, timed, unknown, wrong, versions = map(json.loads, replies.getvalue().splitlines())
    assert loaded == {"result": None}
    assert len(timed["result"]["run"]) == 2
    assert unknown == {"error": "KeyError: 'nothing'"}
    expected = "arrays, compare, device_peak, outputs, peak, prepare, redraw, run, save, temporary, versions"
    assert wrong == {"error": f"ValueError: do: got 'dance', expected load or one of {expected}"}
    assert set(versions["result"]) == {"jax", "kljax"}


def test_another_process_compares_and_measures_its_memory(tmp_path):
    """The forms of PyTorch go through this; the forms of JAX take their place."""
    size, options = Size(256, 8, 32_768), HeadOptions(threads=0, tile=(64, 1024))
    inputs = make_inputs(size)
    inputs.save(tmp_path)
    arguments = {"inputs": str(tmp_path), "options": dataclasses.asdict(options)}
    jax_forms.load(**arguments).save("naive_forward", str(tmp_path))
    with start(MODULE) as remote:
        remote.ask(do="load", **arguments)
        wall, cpu = remote.ask(do="run", name="tile_forward")["run"]
        actual = remote.ask(do="compare", name="tile_forward", directory=str(tmp_path), baseline="naive_forward")
        peak = remote.ask(do="peak", name="naive")
        with pytest.raises(RemoteError, match="KeyError: 'nothing'"):
            remote.ask(do="run", name="nothing")
    assert min(wall, cpu) > 0
    assert actual["differences"]["gradients"] < 2e-6
    # The naive form holds the logits, 32 MiB, at least twice.
    assert peak is None or peak > 2 * 4 * size.tokens * size.vocab * 0.9


def test_processes_of_other_environments_need_no_jax():
    modules = ("harness.worker", "harness.measure", "suites.head.forms", "suites.model.problem")
    program = f"import sys; sys.modules['jax'] = None; import {', '.join(f'benchmarks.{module}' for module in modules)}"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_process_failing_to_load_or_start_raises(tmp_path):
    with start(MODULE) as remote, pytest.raises(RemoteError, match="FileNotFoundError"):
        remote.ask(do="load", inputs=str(tmp_path), options=dataclasses.asdict(HeadOptions()))
    message = r"(?s)its process .*No module named 'benchmarks.nothing'"
    with start("benchmarks.nothing", quiet=True) as remote, pytest.raises(RemoteError, match=message):
        remote.ask(do="load")


def test_requirements_of_an_environment(tmp_path):
    with pytest.raises(environments.MissingError, match="no --torch-env was given"):
        head.TORCH.find(None)
    python = environments.interpreter(tmp_path / "venv")
    for path in (python, *(tmp_path / "releases" / name for name in head.TORCH.releases)):
        with pytest.raises(environments.MissingError, match=f"{path} is missing; make it with --make-torch-env"):
            head.TORCH.find(tmp_path)
        path.mkdir(parents=True)
    assert head.TORCH.find(tmp_path) == python
