"""The recipes of text load as they are, and go to their end with a tiny model on data of the same form."""

import json

import jax
import pytest

from tests import peers
from tests.integration.command import ROOT, records
from train.__main__ import main
from train.config.load import load

GSM8K = {"question": "What is 1 + 1?", "answer": "1 + 1 = <<1+1=2>>2\n#### 2"}
MATH = {"problem": "What is $1+1$?", "solution": r"It is $\boxed{2}$.", "level": "Level 1", "type": "Algebra"}
# With each recipe, its data and metrics of the terms that it is there to show.
RECIPES = {
    "gsm8k_qwen3_0_6b_lora": (GSM8K, {"kl_loss", "format", "overlong", "correct"}, ("lora.rank=2",)),
    "gsm8k_qwen3_8b_v5p64": (GSM8K, {"kl_loss", "format", "overlong"}, ()),
    "math_llama3_8b_h100x8": (MATH, {"kl_loss", "format", "overlong"}, ()),
    "word_problems": (None, {"kl_loss", "correct", "anywhere", "finished"}, ("data.max_prompt_length=128",)),
    "real": (None, {"kl_loss", "correct", "anywhere", "finished"}, ("lora.rank=2", "data.max_prompt_length=128")),
    "real_agent": (
        None,
        {"kl_loss", "correct", "computed", "episode_tool_calls"},
        (
            *("warm_start={steps: 2, batch_size: 2}", "rollout.slots=null", "rewards.overlong_buffer=0"),
            *("data={arguments: {problems: 8, held_out: 2}, max_prompt_length: 96, max_completion_length: 128}",),
        ),
    ),
    "distill_qwen3": (GSM8K, {"kl_loss", "kl_reference_exact"}, ("reference={source: base}",)),
}
SMALL = (
    "model=tiny",
    "model.layers=1",
    "warm_start.steps=0",
    "mesh={}",
    "rollout.mesh=null",
    "steps=1",
    "data.max_prompt_length=40",
    "data.max_completion_length=8",
    "rollout.prompts_per_step=4",
    "rollout.samples_per_prompt=2",
    "rollout.slots=4",
    "rewards.overlong_buffer=4",
    "optim.updates_per_batch=1",
    "optim.micro_batches=1",
    "eval={every: 1, prompts: 2, batch_size: 2, greedy: false}",
)


# With the tiny model, their losses and data are those of other recipes.
REPEATS = ("gsm8k_qwen3_8b_v5p64", "real", "real_agent")


@pytest.fixture(scope="module")
def quick_compilations(_kept_for_all):
    """Compiles without optimizations: the programs run for milliseconds."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def config_file(name):
    return ROOT / f"configs/{name}.yaml"


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_loads_as_it_is(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoints/Qwen3-8B").mkdir(parents=True)
    loaded = load(config_file(name))
    config = loaded.config
    assert loaded.warnings == ()
    assert config.name == name
    assert (config.warm_start.steps == 0) == (config.model.path is not None and name != "real_agent")
    devices = config.mesh.data * config.mesh.fsdp * config.mesh.tensor
    assert devices == {"distill_qwen3": 8, "math_llama3_8b_h100x8": 8, "gsm8k_qwen3_8b_v5p64": 64}.get(name, 1)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilations")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.thorough] * (name in REPEATS)) for name in RECIPES]
)
def test_recipe_completes_with_a_tiny_model(name, tmp_path, capsys):
    record, metrics, more = RECIPES[name]
    data = tmp_path / "data.jsonl"
    data.write_text(f"{json.dumps(record)}\n" * 8, "utf-8")
    files = () if record is None else (f"data.train={data}", f"data.eval={data}")
    output = f"output={tmp_path / 'runs'}"
    assert main([str(config_file(name)), *SMALL, *files, output, *more]) == 0, capsys.readouterr().err
    (run,) = (tmp_path / "runs").iterdir()
    (step,) = records(run, "train")
    assert metrics <= step.keys()
    assert all(value is not None for value in step.values())
    assert "accuracy" in json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])


@pytest.mark.slow
@pytest.mark.thorough
def test_recipe_of_64_chips_starts_and_resumes(env, tmp_path):
    """Two processes of eight devices: axis `fsdp` spans both, and each axis is as long as fits."""
    data = tmp_path / "data.jsonl"
    data.write_text(f"{json.dumps(GSM8K)}\n" * 8, "utf-8")
    small = [argument for argument in SMALL if not argument.startswith(("model", "mesh=", "steps=", "warm_start"))]
    arguments = (
        *("configs/gsm8k_qwen3_8b_v5p64.yaml", *small, "checkpoint.every=1", f"output={tmp_path}"),
        *(f"data.train={data}", f"data.eval={data}", "eval={every: 1, prompts: 4, batch_size: 4}"),
        "model={layers: 2, width: 32, heads: 8, kv_heads: 4, head_dim: 8, mlp_width: 64, qk_norm: true}",
        *("warm_start.steps=0", "mesh={data: 1, fsdp: 4, tensor: 4}", "rollout.mesh={data: 4, tensor: 4}"),
    )
    for more in (("steps=1",), ("steps=2", "--resume")):
        for code, out, err in peers.run("train", *arguments, *more, processes=2, devices=8, env=env):
            assert code == 0, f"{out}\n{err}"
    (run,) = (path for path in tmp_path.iterdir() if path.is_dir())
    first, second = records(run, "train")
    assert RECIPES[run.name][1] <= first.keys()
    assert (first["step"], second["step"]) == (1, 2)
