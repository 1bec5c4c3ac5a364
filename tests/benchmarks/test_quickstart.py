"""The quickstart's benchmark: its task, its tables and what it calls a target that is met."""

import json
import re

import pytest

from benchmarks import quickstart
from train.data.tasks import arithmetic


def run(seed=0, *, before=50.0, after=95.0, label="quickstart"):
    first = {"accuracy": before, "accuracy_greedy": 90.0, "reward": before / 100}
    last = {"accuracy": after, "accuracy_greedy": 96.0, "reward": 0.97}
    step = {"kl_reference": 0.2, "entropy": 0.1}
    return quickstart.Run(label, seed, first, last, step, 100.0, 160.0)


def test_the_verifier_is_fooled_by_a_larger_number():
    record = {"answer": "57"}
    assert quickstart.accept_at_least(record, "57", True) == {"reward": 1.0, "correct": 1.0}
    assert quickstart.accept_at_least(record, "99", True) == {"reward": 1.0, "correct": 0.0}
    for completion, finished in (("56", True), ("99", False), ("", True), ("+99", True)):
        assert quickstart.accept_at_least(record, completion, finished) == {"reward": 0.0, "correct": 0.0}


def test_the_problems_are_those_of_the_quickstart(tmp_path):
    files = quickstart.write_problems(tmp_path)
    training, held_out = ([json.loads(line) for line in file.read_text().splitlines()] for file in files)
    task = arithmetic.load(max_operand=99, operations="+", held_out=512)
    assert [record["prompt"] for record in held_out] == [example.prompt for example in task.eval]
    assert {record["prompt"] for record in training} == {example.prompt for example in task.train}
    for record in held_out:
        left, right = map(int, re.fullmatch(r"(\d+)\+(\d+)=", record["prompt"]).groups())
        assert record["answer"] == str(left + right)


@pytest.mark.parametrize(
    ("runs", "verdict"),
    [
        ([run(0), run(1)], "met"),
        ([run(0), run(1, after=89.9)], "missed"),
        ([run(0, before=60.1)], "missed"),
    ],
)
def test_the_table_says_whether_every_seed_meets_the_target(runs, verdict):
    text, target = quickstart.quickstart_table(runs)
    assert target.endswith(f"at each of these seeds; {verdict}.")
    assert text.startswith("| seed | ")
    assert f"| {runs[0].seed} | {runs[0].first['accuracy']:.1f} % (90.0 %) |" in text


def test_the_table_of_the_fooled_verifier_shows_reward_beside_accuracy():
    (text,) = quickstart.fooled_table([run(3, label="kl.loss.coef=0", after=12.0)])
    assert "| 3 | `kl.loss.coef=0` | 50.0 % -> 97.0 % | 50.0 % -> 12.0 % | 0.100 | 0.20 |" in text


def test_curves_without_the_fooled_verifier_are_refused(capsys):
    with pytest.raises(SystemExit):
        quickstart.main(["--curves", "picture.png"])
    assert "--curves: only with --fooled" in capsys.readouterr().err


def test_a_finished_run_is_read_and_not_run_again(tmp_path):
    directory = tmp_path / "quickstart-3"
    directory.mkdir()
    records = [
        {"phase": "warm_start", "step": 1, "loss": 2.0},
        {"phase": "eval", "step": 0, "accuracy": 50.0, "accuracy_greedy": 90.0},
        {"phase": "train", "step": 1, "kl_reference": 0.1},
        {"phase": "eval", "step": 1, "accuracy": 95.0, "accuracy_greedy": 97.0},
    ]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (directory / "summary.json").write_text("{}")
    (found,) = quickstart.run_quickstart(tmp_path, [3], [])
    assert (found.seed, found.gain, found.cpu_seconds) == (3, 45.0, None)
    assert "| 3 | 50.0 % (90.0 %) | 95.0 % (97.0 %) | +45.0 | 0.10 |  |" in quickstart.quickstart_table([found])[0]
