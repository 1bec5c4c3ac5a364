"""Runs whose mesh splits the tokens of a row, or experts; one device continues them with the same numbers."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.integration.command import records, run_here, saved_arrays, state_arrays
from train.export import main as export

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
EXPERTS = ("mesh.expert=2", "model.experts={count: 4, active: 2, width: 16}", "model.qk_norm=true")
ADAPTERS = "adapters of experts"
SCALE = 32
"""Of an adapter, whose first matrix has a gradient that grows with the square."""
SPLITS = {
    "tokens": ("mesh.context=2",),
    "experts": (*EXPERTS, "optim.host_memory=true", "reference={source: ema, decay: 0.9}"),
    ADAPTERS: (*EXPERTS, f"lora={{rank: 2, alpha: {2 * SCALE}, targets: [q_proj, up_proj, gate]}}"),
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> tuple[str, ...]:
    """The recipe with prompts and a reward that random tokens earn in part."""
    directory = tmp_path_factory.mktemp("task")
    rows, judge = directory / "rows.jsonl", directory / "judge.py"
    rows.write_text("".join(json.dumps({"prompt": f"{number}+1="}) + "\n" for number in range(8)))
    judge.write_text("def one(record, completion, finished):\n    return sum(map(ord, completion)) % 5 / 4\n")
    return *RECIPE, "task=jsonl", f"data.train={rows}", f"data.eval={rows}", f"data.reward={judge}:one"


@pytest.fixture(scope="module")
def split(recipe, shared):
    """A run on two devices by the name of a split."""
    return lambda name: shared(*recipe, *SPLITS[name]).succeeded().root


def assert_close(got, expected, names) -> None:
    """Compares the values of some names, of all steps at once."""
    for name in names:
        first, second = (np.array([record[name] for record in run], np.float64) for run in (got, expected))
        np.testing.assert_allclose(first, second, rtol=0, atol=TOLERANCE * np.abs(second).max(), err_msg=name)


RESUMED = [("tokens", 0), ("tokens", 1), ("experts", 1), pytest.param(ADAPTERS, 1, marks=pytest.mark.thorough)]


@pytest.mark.parametrize(("name", "step"), RESUMED)
def test_one_device_resumes_each_checkpoint_with_equal_numbers(recipe, split, tmp_path, name, step):
    """From that before RL it repeats the whole run."""
    split_run = split(name)
    root = shutil.copytree(split_run, tmp_path / "smoke")
    for later in range(step + 1, STEPS + 1):
        shutil.rmtree(root / "checkpoints" / str(later))
    run_here(*recipe, *SPLITS[name][1:], f"output={tmp_path}", "--resume").succeeded()
    got, expected = records(root, "train"), records(split_run, "train")
    assert len(got) == STEPS
    assert got[:step] == expected[:step]
    assert_close(got, expected, ["loss", "entropy", "grad_norm", "reward"])
    assert_close(records(root, "eval"), records(split_run, "eval"), ["reward"])
    for last in range(STEPS + 1):
        assert (root / f"samples/{last}.jsonl").read_text() == (split_run / f"samples/{last}.jsonl").read_text()
    first, state, wanted = (state_arrays(run, at) for run, at in ((split_run, 0), (root, STEPS), (split_run, STEPS)))
    assert state.keys() == wanted.keys()
    for array in (array for array in wanted if array.startswith(("trainable.", "opt_state.", "reference."))):
        scale = np.abs(wanted[array]).max()
        np.testing.assert_allclose(state[array], wanted[array], rtol=0, atol=TOLERANCE * scale, err_msg=array)
        # Each array moves by far more.
        assert np.abs(wanted[array] - first[array]).max() > 100 * TOLERANCE * scale, array


@pytest.mark.parametrize("name", ["experts", pytest.param(ADAPTERS, marks=pytest.mark.thorough)])
def test_exported_experts_are_the_weights_of_the_run(split, tmp_path, name):
    """An adapter of experts is added to the base."""
    root, folder = split(name), tmp_path / "hf"
    assert export([str(root), "--to", str(folder), *(["--merge"] if "adapter" in name else [])]) == 0
    tensors, state = load_file(folder / "model.safetensors"), state_arrays(root, STEPS)
    matrix = "layers.mlp.experts.up_proj."
    if "adapter" in name:
        lora_a, lora_b = (state[f"trainable.adapter.{matrix}{part}"] for part in ("lora_A", "lora_B"))
        wanted = saved_arrays(root / "base")[f"{matrix}kernel"] + SCALE * lora_a @ lora_b
    else:
        wanted = state[f"trainable.params.{matrix}kernel"]
    stored = np.stack([tensors[f"model.layers.0.mlp.experts.{number}.up_proj.weight"].T for number in range(4)])
    np.testing.assert_allclose(stored, wanted[0], rtol=0, atol=TOLERANCE * np.abs(wanted).max())


def test_the_run_learns_from_different_rewards(split):
    train = records(split("tokens"), "train")
    assert all(0.1 < record["reward"] < 0.9 and record["grad_norm"] > 0.05 for record in train)
    assert 0 < records(split("tokens"), "eval")[-1]["reward"] < 1
