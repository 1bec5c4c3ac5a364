"""Every recipe in configs/ goes to its end; the word problems from files in their real form."""

import json
import math
import shutil

import pytest

from tests.integration.command import LORA, PPO, ROOT, TINY, records, run_here, state_arrays
from tests.integration.test_mesh import ONE_DEVICE
from tests.integration.test_recipes import RECIPES as PRETRAINED
from tests.integration.test_routing_run import BIASED
from train import eval as evaluation
from train.config.load import load
from train.run.glossary import metric_of
from train.run.plots import PANELS, write_curves

# The first update of a warm-up of the learning rate is at 0; two steps should show more than one.
SHORT = (*TINY, "steps=2", "optim.warmup_steps=0", "eval.greedy=false")
EXACT = (
    "kl.loss={coef: 0.01, estimator: exact, gradient: value}",
    "kl.reward={coef: 0.01, estimator: exact}",
    "reference.monitor=true",
)
CALCULATOR = (
    "configs/calculator.yaml",
    "model={layers: 1, width: 16, heads: 2, kv_heads: 1, head_dim: 8, mlp_width: 24}",
    "warm_start={steps: 2, batch_size: 4}",
    "rollout={prompts_per_step: 2, samples_per_prompt: 2}",
    "eval={every: 1, prompts: 4, batch_size: 4}",
    "data.arguments={problems: 40, held_out: 4, wrong: 0.5}",
    "steps=2",
    "optim={warmup_steps: 0, updates_per_batch: 1}",
    "checkpoint={every: 1, keep: 10}",
    # Episodes of so small a model have all the same reward, and no advantages.
    "loss.entropy_coef=0.01",
)
EPISODES = (*CALCULATOR[1:5], *CALCULATOR[6:])
GUESSING = (
    "configs/guessing.yaml",
    *EPISODES,
    "data.arguments={most: 14, turns: 4, problems: 40, held_out: 4, wrong: 0.5}",
    "advantage={type: turn_credit, gamma: 0.5}",
)
SQLITE = (
    "configs/sqlite.yaml",
    *EPISODES,
    "data.arguments={seed: 0, names: 40, problems: 40, held_out: 4, wrong: 0.5}",
    "environment.arguments={seed: 0, names: 40}",
)
CENTERED = "configs/reinforce_pp_baseline_centered.yaml"
# With each recipe, metrics of the terms that it is there to show; other files read most of these runs as well.
RECIPES = (
    (ONE_DEVICE, {"kl_loss", "kl_reference_exact", "rollout_kl_loss", "clip_fraction"}),
    (LORA, {"kl_loss"}),
    ((*LORA, *EXACT), {"kl_loss", "kl_reward", "kl_reference", "kl_reference_exact"}),
    (BIASED, {"router_balance_loss", "router_z_loss", "routing_flips", "router_load_layer_0"}),
    (PPO, {"kl_reward", "kl_coef", "value_loss", "entropy_coef"}),
    ((CENTERED, *SHORT), {"kl_reference"}),
    (CALCULATOR, {"kl_loss", "episode_turns", "episode_tool_calls"}),
    (GUESSING, {"kl_loss", "episode_turns", "episode_truncated"}),
    (SQLITE, {"kl_loss", "episode_turns", "episode_tool_calls"}),
)
CURVES = [{panel.metric, panel.instead} for panel in PANELS if panel.phase == "train"]
LONG = "How many apples are in the basket if somebody asks about them at great length? " * 4


def test_every_config_is_run_by_a_test():
    assert {f"configs/{path.name}" for path in (ROOT / "configs").glob("*.yaml")} == {
        *(f"configs/{name}.yaml" for name in PRETRAINED),
        *(recipe[0] for recipe, _ in RECIPES),
        "configs/calculator_agent.yaml",  # tests/agents
        "configs/gsm8k.yaml",
        "configs/replay.yaml",
        "configs/smoke.yaml",
    }


@pytest.mark.parametrize(("recipe", "metrics"), RECIPES, ids=[recipe[0] for recipe, _ in RECIPES])
def test_a_recipe_goes_to_its_end(shared, recipe, metrics):
    root = shared(*recipe).succeeded().root
    steps = load(root / "config.yaml").config.steps
    train = records(root, "train")
    assert [record["step"] for record in train] == list(range(1, steps + 1))
    assert [record["step"] for record in records(root, "eval")] == list(range(steps + 1))
    assert all(metrics <= set(record) for record in train)
    logged = set().union(*records(root, "train"), *records(root, "eval")) - {"phase", "step"}
    assert [name for name in sorted(logged) if metric_of(name) is None] == []
    assert all(names & set(record) for record in train for names in CURVES)
    lists = {name for name in logged if name.startswith("router_tokens_layer_")}
    numbers = [value for record in train for name, value in record.items() if name not in {"phase", *lists}]
    assert all(math.isfinite(value) for value in numbers)
    kls = {name: train[-1].get(name) for name in ("kl_reference", "kl_reference_exact")}
    assert max(kl for kl in kls.values() if kl is not None) > 0
    assert max(record["grad_norm"] for record in train) > 0
    summary = json.loads((root / "summary.json").read_text())
    assert summary["steps"] == steps
    assert {name: summary[name] for name in kls} == kls
    assert int(state_arrays(root, steps)["step"]) == steps


def test_curves_are_plotted_from_recipe_metrics(shared, tmp_path):
    """The metrics of every recipe have all that the panels show, as the test before asserts."""
    shutil.copy(shared(*PPO).succeeded().root / "metrics.jsonl", tmp_path)
    write_curves(tmp_path)
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def word_problems(path, count, *, too_long):
    """A file as GSM8K has it: calculations in double angle brackets, the answer after ####."""
    lines = [
        {
            "question": f"Tom has {n} apples and buys {n + 1} more. How many apples does he have?",
            "answer": f"Tom has {n}+{n + 1}=<<{n}+{n + 1}={2 * n + 1}>>{2 * n + 1} apples.\n#### {2 * n + 1}",
        }
        for n in range(count)
    ]
    if too_long:
        lines.insert(count // 2, {"question": LONG, "answer": "Nobody knows.\n#### 1,000"})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("coef", [0.05, pytest.param(0.0, marks=pytest.mark.thorough)])
def test_word_problems(tmp_path, coef):
    """With the KL in the loss and without, as the recipe invites to compare; one question is too long for it."""
    done = run_here(
        "configs/calculator_agent.yaml",  # tests/agents
        "configs/gsm8k.yaml",
        *TINY,
        "steps=1",
        "warm_start={steps: 3, batch_size: 4, learning_rate: 1e-2}",
        "rollout.prompts_per_step=2",
        "eval={every: 1, prompts: 4, batch_size: 4, greedy: false}",
        f"kl.loss.coef={coef}",
        f"data.train={word_problems(tmp_path / 'train.jsonl', 12, too_long=True)}",
        f"data.eval={word_problems(tmp_path / 'eval.jsonl', 5, too_long=True)}",
        f"output={tmp_path}",
    ).succeeded()
    assert "1 of 13 prompts are longer than data.max_prompt_length = 256 tokens and are left out" in done.stderr
    assert "1 of 6 " in done.stderr
    root = tmp_path / "gsm8k"
    (step,) = records(root, "train")
    assert {"correct", "format", "kl_reference", "completion_length"} <= set(step)
    assert ("kl_loss" in step) == (coef > 0)
    # `completion_length` counts bytes of real length, not the six tokens of a sum.
    assert 1 <= step["completion_length"] <= 192
    assert records(root, "eval")[0]["step"] == 0
    config = load(root / "config.yaml").config
    assert (config.data.max_prompt_length, config.data.max_completion_length) == (256, 192)
    assert json.loads((root / "summary.json").read_text())["steps"] == 1
    assert {path.name for path in (root / "checkpoints").iterdir()} == {"0", "1"}


def test_replay_needs_a_recording_alone(tmp_path, capsys):
    recording = tmp_path / "recording.jsonl"
    rows = [{"prompt_ids": [5 + i // 2], "completion_ids": [65 + i, 257], "reward": i % 2} for i in range(8)]
    recording.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = run_here(
        "configs/replay.yaml",
        *("model={layers: 1, width: 16, heads: 4, kv_heads: 2, head_dim: 8, mlp_width: 32}", "steps=2"),
        *("data.max_prompt_length=4", "data.max_completion_length=4", f"rollout.source.path={recording}"),
        *("rollout.prompts_per_step=2", "rollout.samples_per_prompt=2", f"output={tmp_path}"),
    ).succeeded()
    root = tmp_path / "replay"
    assert [record["reward"] for record in records(root, "train")] == [0.5, 0.5]
    assert {"kl_loss", "kl_reference"} <= set(records(root, "train")[1])
    assert records(root, "eval") == []
    summary = json.loads((root / "summary.json").read_text())
    assert summary["accuracy_before"] is summary["accuracy_after"] is None
    assert "sampling:" not in done.stdout
    assert "train.eval" not in done.stdout
    capsys.readouterr()
    assert evaluation.main([str(root)]) == 2
    assert "eval.prompts: got 0, so nothing is held out" in capsys.readouterr().err
