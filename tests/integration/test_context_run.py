"""A run whose mesh splits the tokens of a row, through the command; one device continues it with the same numbers."""

import json
import shutil

import numpy as np
import pytest

from tests.integration.command import records, run_here, state_arrays

STEPS = 2
TOLERANCE = 2e-6  # of the largest number, float32
RECIPE = (
    "configs/smoke.yaml",
    "model.layers=1",
    # Axis context divides them.
    "data.max_prompt_length=6",
    "data.max_completion_length=4",
    "warm_start.steps=0",
    "eval.greedy=false",
    "kl={loss: {coef: 0.1}}",
    # Returns of one sign: terms of both would cancel, and leave their rounding.
    "advantage={type: reinforce_plus_plus}",
    # An untrained policy is uncertain: this makes its gradients larger.
    "temperature=0.3",
    "optim={learning_rate: 0.1, optimizer: {type: sgd, momentum: 0.9}, share_prompts: false}",
)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> tuple[str, ...]:
    """The recipe with prompts and a reward that random tokens earn in part."""
    directory = tmp_path_factory.mktemp("task")
    rows, judge = directory / "rows.jsonl", directory / "judge.py"
    rows.write_text("".join(json.dumps({"prompt": f"{number}+1="}) + "\n" for number in range(8)))
    judge.write_text("def one(record, completion, finished):\n    return sum(map(ord, completion)) % 5 / 4\n")
    return *RECIPE, "task=jsonl", f"data.train={rows}", f"data.eval={rows}", f"data.reward={judge}:one"


@pytest.fixture(scope="module")
def split(recipe, tmp_path_factory):
    """A run on two devices that split each row."""
    return run_here(*recipe, "mesh.context=2", f"output={tmp_path_factory.mktemp('split')}").succeeded().root


def assert_close(got, expected, names) -> None:
    """Compares the values of some names, of all steps at once."""
    for name in names:
        first, second = (np.array([record[name] for record in run], np.float64) for run in (got, expected))
        np.testing.assert_allclose(first, second, rtol=0, atol=TOLERANCE * np.abs(second).max(), err_msg=name)


@pytest.mark.parametrize("step", range(STEPS))
def test_one_device_resumes_each_checkpoint_with_equal_numbers(recipe, split, tmp_path, step):
    """From that before RL it repeats the whole run."""
    root = shutil.copytree(split, tmp_path / "smoke")
    for later in range(step + 1, STEPS + 1):
        shutil.rmtree(root / "checkpoints" / str(later))
    run_here(*recipe, f"output={tmp_path}", "--resume").succeeded()
    got, expected = records(root, "train"), records(split, "train")
    assert len(got) == STEPS
    assert got[:step] == expected[:step]
    assert_close(got, expected, ["loss", "entropy", "grad_norm", "reward"])
    assert_close(records(root, "eval"), records(split, "eval"), ["reward"])
    for last in range(STEPS + 1):
        assert (root / f"samples/{last}.jsonl").read_text() == (split / f"samples/{last}.jsonl").read_text()
    first, state, wanted = (state_arrays(run, at) for run, at in ((split, 0), (root, STEPS), (split, STEPS)))
    assert state.keys() == wanted.keys()
    for name in (name for name in wanted if name.startswith(("trainable.", "opt_state."))):
        scale = np.abs(wanted[name]).max()
        np.testing.assert_allclose(state[name], wanted[name], rtol=0, atol=TOLERANCE * scale, err_msg=name)
        # Each array moves by far more.
        assert np.abs(wanted[name] - first[name]).max() > 100 * TOLERANCE * scale


def test_the_run_learns_from_different_rewards(split):
    train = records(split, "train")
    assert all(0.1 < record["reward"] < 0.9 and record["grad_norm"] > 0.05 for record in train)
    assert 0 < records(split, "eval")[-1]["reward"] < 1
