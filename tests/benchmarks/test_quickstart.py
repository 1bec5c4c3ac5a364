"""The quickstart's benchmark: its task, its tables and what it calls a target that is met."""

import json
import os
import re
import subprocess
import sys

import pytest

from benchmarks import quickstart
from train.data.tasks import arithmetic
from train.rl.kl_metrics import KL_EXACT


def run(seed=0, *, before=50.0, after=95.0, label="quickstart", **more):
    first = {"accuracy": before, "accuracy_greedy": 90.0, "reward": before / 100}
    last = {"accuracy": after, "accuracy_greedy": 96.0, "reward": 0.97}
    step = {KL_EXACT: 0.2, "entropy": 0.1}
    return quickstart.FinishedRun(label, seed, first, last, step, 100.0, 160.0, **{"drop": 1.0, "max_kl": 0.3} | more)


def write_run(directory, *, accuracies=(50.0, 95.0), kls=(0.1,)):
    """Writes a finished run."""
    directory.mkdir()
    records = [{"phase": "warm_start", "step": 1, "loss": 2.0}]
    records += [{"phase": "train", "step": step + 1, KL_EXACT: kl} for step, kl in enumerate(kls)]
    records += [
        {"phase": "eval", "step": 50 * number, "accuracy": accuracy, "accuracy_greedy": 90.0}
        for number, accuracy in enumerate(accuracies)
    ]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (directory / "summary.json").write_text("{}")


def test_fooled_verifier_rewards_larger_numbers():
    record = {"answer": "57"}
    assert quickstart.accept_at_least(record, "57", True) == {"reward": 1.0, "correct": 1.0}
    assert quickstart.accept_at_least(record, "99", True) == {"reward": 1.0, "correct": 0.0}
    for completion, finished in (("56", True), ("99", False), ("", True), ("+99", True)):
        assert quickstart.accept_at_least(record, completion, finished) == {"reward": 0.0, "correct": 0.0}


def test_problems_equal_the_quickstart_problems(tmp_path):
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
        ([run(0), run(1, drop=4.9, max_kl=1.0)], "met"),
        ([run(0), run(1, after=94.9)], "missed by seed 1 (94.9 %)"),
        ([run(0, before=60.1)], "missed by seed 0 (+34.9 points)"),
        ([run(2, isa="AVX2", drop=5.0)], "missed by seed 2 AVX2 (a drop of 5.0 points)"),
        (
            [run(0, max_kl=1e13), run(1, max_kl=1.01)],
            "missed by seed 0 (a KL of 1e+13 nats), seed 1 (a KL of 1.01 nats)",
        ),
    ],
)
def test_table_names_the_runs_missing_a_target(runs, verdict):
    text, target = quickstart.recipe_table(runs)
    assert target.endswith(f"in each of these runs; {verdict}.")
    assert text.startswith("| seed | ")
    first = runs[0]
    assert f"| {first.seed} | {first.isa or 'of the CPU'} | {first.first['accuracy']:.1f} % (90.0 %) |" in text


@pytest.mark.parametrize(
    ("runs", "verdict"),
    [
        ([run(0, after=72.0, label="lora"), run(1, after=75.0, label="lora")], "met"),
        ([run(0, label="lora", max_kl=1.5)], "missed by seed 0 (a KL of 1.5 nats)"),
    ],
)
def test_another_recipe_has_no_target_of_accuracy(runs, verdict):
    assert quickstart.recipe_table(runs)[1].endswith(f"in each of these runs; {verdict}.")


def test_step_kl_is_exact_if_recorded():
    assert quickstart.kl_of({"kl_reference": 0.2}) == 0.2
    assert quickstart.kl_of({"kl_reference": 0.2, "kl_reference_exact": 0.1}) == 0.1
    assert quickstart.kl_of({"loss": 0.2}) is None


def test_recipe_runs_are_named_after_the_recipe(tmp_path):
    write_run(tmp_path / "lora-1")
    (finished,) = quickstart.run_recipe(tmp_path, [quickstart.SeedCase(1)], config="configs/lora.yaml")
    assert (finished.label, finished.seed) == ("lora", 1)


def test_another_recipe_with_the_fooled_verifier_is_refused(capsys):
    with pytest.raises(SystemExit):
        quickstart.main(["--fooled", "--config", "configs/lora.yaml"])
    assert "--config: got configs/lora.yaml with --fooled" in capsys.readouterr().err


def test_fooled_verifier_table_shows_reward_and_accuracy():
    (text,) = quickstart.fooled_table([run(3, label="kl.loss.coef=0", after=12.0)])
    assert "| 3 | `kl.loss.coef=0` | 50.0 % -> 97.0 % | 50.0 % -> 12.0 % | 0.100 | 0.20 |" in text


def test_finished_runs_are_read_without_running_again(tmp_path):
    cases = [quickstart.SeedCase(3), quickstart.SeedCase(3, "AVX2")]
    write_run(tmp_path / "quickstart-3")
    write_run(tmp_path / "quickstart-3-AVX2", accuracies=(40.0, 93.0, 80.0, 96.0), kls=(0.1, 7.0, 0.2))
    plain, other = quickstart.run_recipe(tmp_path, cases, jobs=2)
    assert (plain.case, plain.gain, plain.drop, plain.max_kl, plain.cpu_seconds) == ("seed 3", 45.0, 0.0, 0.1, None)
    assert (other.case, other.gain, other.drop, other.max_kl) == ("seed 3 AVX2", 56.0, 13.0, 7.0)
    row = "| 3 | AVX2 | 40.0 % (90.0 %) | 96.0 % (90.0 %) | +56.0 | 13.0 | 7.00 |  |"
    assert row in quickstart.recipe_table([plain, other])[0]


def test_non_finite_kl_is_reported_as_infinite(tmp_path):
    write_run(tmp_path / "quickstart-0", kls=(0.1, None))
    (finished,) = quickstart.run_recipe(tmp_path, [quickstart.SeedCase(0)])
    assert finished.missed() == ["a KL of inf nats"]


def test_run_flags_follow_the_user_flags(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_flag=1")
    assert quickstart.xla_flags(None, alone=True) == "--xla_flag=1"
    beside = "--xla_flag=1 --xla_cpu_max_isa=AVX2 --xla_cpu_multi_thread_eigen=false"
    assert quickstart.xla_flags("AVX2", alone=False) == beside


def test_an_unknown_instruction_set_is_refused(capsys):
    with pytest.raises(SystemExit):
        quickstart.main(["--isa", "SSE4_2,AVX3"])
    assert "--isa: got ['AVX3'], expected some of ['AVX', 'AVX2', 'AVX512', 'SSE4_2']" in capsys.readouterr().err


def test_every_command_records_cpu_time_and_log(tmp_path):
    def cost(code):
        return quickstart._run_command([sys.executable, "-c", code], {**os.environ, "XLA_FLAGS": ""}, tmp_path / "log")

    assert set(cost("print('hello')")) == {"seconds", "cpu_seconds"}
    assert (tmp_path / "log").read_text() == "hello\n"
    with pytest.raises(subprocess.CalledProcessError):
        cost("raise SystemExit(2)")
