"""`python -m train.eval`: the numbers that the run itself wrote, of a step or of a config that starts from it."""

import json

import pytest

from tests.integration.command import LORA, files, records
from train.eval import main
from train.export import main as export


@pytest.fixture(scope="module")
def run(shared):
    return shared(*LORA).succeeded().root


@pytest.fixture
def evaluate(tmp_path, capsys):
    """`evaluate(*arguments)`: the exit code, the JSON that was written or None, and what was printed."""

    def call(*arguments):
        file = tmp_path / "found.json"
        code = main([*map(str, arguments), "--json", str(file)])
        printed = capsys.readouterr()
        return code, json.loads(file.read_text()) if code == 0 else None, printed.out + printed.err

    return call


def assert_as_written(found, record):
    """All the numbers of an evaluation in a run's metrics, to the last bit."""
    sampled = {name: value for name, value in record.items() if name in found["sampled"]}
    assert "accuracy" in sampled
    assert sampled == found["sampled"]
    assert found["greedy"]["accuracy"] == record["accuracy_greedy"]


def test_evaluated_step_gives_the_numbers_of_the_run(smoke, evaluate):
    before, record = files(smoke.root), records(smoke.root, "eval")[0]
    code, actual, printed = evaluate(smoke.root, "--step", "0")
    assert code == 0
    assert actual["step"] == record["step"] == 0
    assert_as_written(actual, record)
    assert f"{smoke.root} after step 0: {actual['prompts']} prompts" in printed
    assert f"{actual['sampled']['accuracy']:.2f}" in printed
    assert files(smoke.root) == before


def test_config_starting_from_weights_and_adapter_is_evaluated(run, evaluate, tmp_path):
    adapter = tmp_path / "adapter"
    assert export([str(run), "--to", str(adapter)]) == 0
    arguments = [*LORA, f"warm_start.checkpoint={run / 'base'}", f"lora.path={adapter}"]
    code, actual, _ = evaluate(*arguments)
    assert code == 0
    assert actual["step"] is None
    assert_as_written(actual, records(run, "eval")[-1])
    code, _, printed = evaluate(*arguments, "lora.rank=3")
    assert code == 2
    assert f"error: lora.path: adapter {adapter} does not fit the config: r: got 2, but lora.rank of" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["RUN", "--step", "9"], "error: --step: got 9, but the run RUN has steps 0, 1, 2"),
        (["RUN", "model.width=32"], "error: step 2: checkpoint "),
        ([*LORA, "--step", "1"], "error: --step: got 1, but configs/lora.yaml is no directory of a run"),
        (LORA, "error: nothing to evaluate: name a run, or set model.path or warm_start.checkpoint"),
        (["RUN/base"], "error: RUN/base is not the directory of a run: it has no config.yaml"),
    ],
)
def test_impossible_evaluations_are_named(run, evaluate, arguments, message):
    code, _, printed = evaluate(*(str(argument).replace("RUN", str(run)) for argument in arguments))
    assert code == 2
    assert message.replace("RUN", str(run)) in printed


def test_results_never_replace_a_file_of_the_run(run, capsys):
    before = (run / "metrics.jsonl").read_bytes()
    assert main([str(run), "--json", str(run / "metrics.jsonl")]) == 2
    assert "error: --json: " in capsys.readouterr().err
    assert (run / "metrics.jsonl").read_bytes() == before


def test_directory_in_place_of_the_file_is_refused(run, tmp_path, capsys):
    assert main([str(run), "--json", str(tmp_path)]) == 2
    assert f"error: --json: {tmp_path} is a directory; name a file" in capsys.readouterr().err
