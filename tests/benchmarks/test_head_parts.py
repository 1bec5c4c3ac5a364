"""The parts of the head's benchmark on problems whose answers are known: inputs, verdicts, memory, processes."""

import io
import json
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import _measure, _rates, _results, _sides, _torch_env, _worker
from benchmarks._inputs import QUICK, SIZES, Inputs, Options, Size, log_probs, make_inputs
from benchmarks._measure import Agreement
from benchmarks._rows import ROWS

ROW = {row.name: row for row in ROWS}


def test_inputs_are_drawn_anew_and_kept(tmp_path):
    inputs = make_inputs(QUICK)
    inputs.save(tmp_path)
    again, loaded = make_inputs(QUICK), Inputs.load(tmp_path)
    for name, array in vars(inputs).items():
        np.testing.assert_array_equal(array, getattr(again, name))
        np.testing.assert_array_equal(array, getattr(loaded, name))
    assert inputs.size == loaded.size == QUICK
    assert inputs.mask.sum() == QUICK.tokens // 2


def test_old_log_probs_decide_what_is_clipped():
    inputs = make_inputs(QUICK)
    logits = inputs.hidden.astype(np.float64) @ inputs.head
    exact = logits[np.arange(QUICK.tokens), inputs.targets] - np.log(np.exp(logits).sum(1))
    np.testing.assert_allclose(log_probs(inputs.hidden, inputs.head, inputs.targets, chunk=300), exact, rtol=1e-6)
    ratios = np.exp(exact - inputs.old_log_probs)
    within, beyond = np.abs(ratios - 1) < 0.11, np.abs(ratios - 1) > 0.3
    assert (within | beyond).all()
    assert beyond.sum() == QUICK.tokens / 3


def measured(size=SIZES[0], rates=None, **seconds):
    """Rows with the given seconds, and a byte of memory for each."""
    results = {
        name: _results.Result(ROW[name], wall=[time + 1, time], cpu=[2 * time, 3 * time], temp_bytes=int(time))
        for name, time in seconds.items()
    }
    return _results.Measured(size, results, rates)


def verdicts(found, device="cpu"):
    return {
        (check.target.measure, check.target.row, check.target.against): check for check in _results.check(found, device)
    }


def test_verdicts_of_times_and_memory():
    found = verdicts(measured(tile=80.0, naive=100.0, tunix_full=1921.0, tunix_chunk=99.0, tile_kl=121.0))
    met = found["time", "tile", "naive"]
    assert (met.value, met.cpu, met.limit, met.verdict) == (0.8, 0.8, 0.8, "met")
    assert found["time", "tile", "tunix_chunk"].verdict == "missed"
    assert found["time", "tile_kl", "tile"].verdict == "missed"
    assert found["memory", "tile", "naive"].verdict == "missed"
    assert found["memory", "tile", "tunix_full"].verdict == "met"
    assert found["time", "tile", "verl"].verdict == "not measured: not among the contenders"
    assert found["rate", "tile", "matmul"].verdict == "not measured"
    assert not _results.errors(measured(tile=1.0), 1e-4)


def test_a_large_vocabulary_has_bounds_of_its_own():
    large = verdicts(measured(Size(1024, 1024, 131_072), tile=10.0, naive=200.0))
    assert large["memory", "tile", "naive"].limit == 1 / 24
    assert large["memory", "tile", "naive"].verdict == "missed"
    assert verdicts(measured(tile=10.0, naive=200.0))["memory", "tile", "naive"].verdict == "met"


@pytest.mark.parametrize(
    ("reached", "cpu", "gpu"), [(84.0, "missed", "met"), (86.0, "met", "met"), (64.0,) + ("missed",) * 2]
)
def test_the_part_of_the_matmul_rate(reached, cpu, gpu):
    rates = _results.Rates((512, 4096), {}, mixed=100.0, reached=reached, copied=1.0, moved=1.0)
    for device, verdict in (("cpu", cpu), ("gpu", gpu)):
        assert verdicts(measured(rates=rates, tile=1.0), device)["rate", "tile", "matmul"].verdict == verdict


def test_errors_name_what_makes_the_table_worthless():
    found = measured(tile=1.0, naive=1.0, verl=1.0, trl=1.0)
    found.results["tile"].agreement = Agreement(1.0, 1e-6, 2e-4)
    found.results["verl"].agreement = Agreement(1.0, float("nan"), 0.0)
    found.results["naive"].agreement = Agreement(1.0, 0.0, 0.0)
    found.results["trl"].problem, found.results["trl"].failed = "no memory", True
    assert _results.errors(found, 1e-4) == [
        "tile: differs from naive by 2.0e-04, more than 1e-04",
        "verl: differs from naive by nan, more than 1e-04",
        "trl: no memory",
    ]


def test_distances():
    expected = np.array([[3.0, 4.0], [0.0, 0.0]], np.float32)
    assert _measure.distance(expected, expected) == 0
    assert _measure.distance(expected + np.array([[0.0, 0.0], [0.3, 0.4]], np.float32), expected) == pytest.approx(0.1)
    assert _measure.distance(expected * np.float32(np.nan), expected) == float("inf")
    with pytest.raises(ValueError, match="shape"):
        _measure.distance(expected[:1], expected)


def test_matmul_rate_is_the_time_of_two_logits_and_two_gradients():
    seconds = {"matmul_logits": 1.0, "matmul_hidden": 2.0, "matmul_head": 4.0}
    assert _rates.matmul_rate(10, seconds) == 40 / (1 + 1 + 2 + 4)


def test_traffic_counts_every_pass():
    size, tile = Size(4, 3, 8), (2, 4)  # two tiles of tokens, two chunks of the vocabulary
    logits, head, hidden = 32, 24, 12
    forward = 2 * (head + 2 * hidden) + 2 * 4 * logits
    backward = forward + 2 * 4 * (2 * hidden + 2 * head) + 2 * (head + hidden)
    assert _rates.traffic(size, tile, itemsize=2) == forward + backward


class Allocating:
    """Contenders whose memory is known: a run takes 96 MiB and returns 32 of them."""

    options = Options()

    def run(self, name):
        scratch = np.full(64 << 20, 1, np.uint8)
        return (np.full(32 << 20, scratch[0]),)

    def nbytes(self, outputs):
        return sum(output.nbytes for output in outputs)


@pytest.mark.skipif(not _measure.CLEAR.exists(), reason="the system does not tell a process's peak memory")
def test_peak_memory_is_without_results():
    assert _measure.peak(Allocating(), "any", Allocating()) == pytest.approx(64 << 20, rel=0.1)


def test_peak_memory_of_a_gpu_is_asked_of_its_library():
    gpu = SimpleNamespace(options=Options(device="gpu"), device_peak=lambda name: 7, run=lambda name: None)
    assert _measure.peak(gpu, "any", gpu) == 7


def test_a_worker_answers_and_survives_errors(tmp_path):
    make_inputs(QUICK).save(tmp_path)
    options = {"device": "cpu", "dtype": "float32", "threads": 0, "tile": [32, 256]}
    requests = [
        {"do": "load", "inputs": str(tmp_path), "options": options, "releases": ""},
        {"do": "time", "name": "tile"},
        {"do": "time", "name": "nothing"},
        {"do": "dance"},
        {"do": "versions"},
    ]
    replies = io.StringIO()
    lines = io.StringIO("".join(json.dumps(request) + "\n" for request in requests))
    _worker.serve(_worker.Worker("jax"), lines, replies)
    loaded, timed, unknown, wrong, versions = map(json.loads, replies.getvalue().splitlines())
    assert loaded == {"result": None}
    assert len(timed["result"]) == 2
    assert unknown == {"error": "KeyError: 'nothing'"}
    assert wrong == {"error": "ValueError: do: got 'dance', expected load, versions, time, compare or peak"}
    assert set(versions["result"]) == {"jax", "kljax"}


def test_another_process_compares_and_measures_its_memory(tmp_path):
    """What the rows of PyTorch go through, with the contenders of JAX in PyTorch's place."""
    from benchmarks._jax_contenders import Contenders

    size, options = Size(256, 8, 32_768), Options(threads=0, tile=(64, 1024))
    inputs = make_inputs(size)
    inputs.save(tmp_path)
    _measure.save_outputs(Contenders(inputs, options), "naive", tmp_path)
    with _sides.worker("jax", tmp_path, options, None) as remote:
        wall, cpu = remote.time("tile")
        agreement = remote.compare("tile", tmp_path, "naive")
        peak = remote.ask(do="peak", name="naive")
        with pytest.raises(_sides.RemoteError, match="KeyError: 'nothing'"):
            remote.time("nothing")
    assert min(wall, cpu) > 0
    assert agreement.gradient_difference < 2e-6
    # The naive form holds the logits, 32 MiB, at least twice.
    assert peak is None or peak > 2 * 4 * size.tokens * size.vocab * 0.9


def test_a_process_that_cannot_start_is_an_error_and_not_a_hang(tmp_path):
    with pytest.raises(_sides.RemoteError), _sides.worker("jax", tmp_path, Options(), None):
        pass


def test_what_an_environment_needs(tmp_path):
    assert "no --torch-env was given" in _torch_env.why_not(None)
    assert "is missing" in _torch_env.why_not(tmp_path)
    for path in (
        _torch_env.interpreter(tmp_path),
        *(_torch_env.releases(tmp_path) / name for name in _torch_env.RELEASES),
    ):
        path.mkdir(parents=True)
    assert _torch_env.why_not(tmp_path) is None
