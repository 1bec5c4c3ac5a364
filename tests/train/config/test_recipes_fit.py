"""The recipes of pretrained models fit the devices that they name, by arithmetic: nothing is allocated."""

import json
import pathlib

import pytest

from tests.train.weights.parameters import parameter_count
from train.config.load import load
from train.weights.huggingface.config import decoder_config

ROOT = pathlib.Path(__file__).parents[3]
PUBLIC = ROOT / "tests" / "goldens" / "models" / "configs"
GB = 1e9
# Recipe, the model that it downloads, bytes of one of its devices.
DEVICES = {
    "gsm8k_qwen3_0_6b_lora": ("qwen3-0.6b", 16 * GB),
    "gsm8k_qwen3_8b_v5p64": ("qwen3-8b", 95 * GB),
    "math_llama3_8b_h100x8": ("llama-3.1-8b", 80 * GB),
}
SIZE = {"float32": 4, "bfloat16": 2}


def needed(config, shape):
    """Bytes of a device: weights, moments, two gradients; the reference; caches; inputs of all layers."""
    mesh, rows = config.mesh, config.mesh.data * config.mesh.fsdp
    parts, param_bytes, computed = mesh.fsdp * mesh.tensor, SIZE[config.model.param_dtype], SIZE[config.model.dtype]
    weights = parameter_count(shape) * param_bytes / parts
    if config.lora is None:
        weights += parameter_count(shape) * (16 + (param_bytes if config.reference.source == "step" else 0)) / parts
    sampling = config.rollout.mesh or mesh
    token = shape.layers * shape.kv_heads * shape.head_dim * 2 * computed / sampling.tensor
    prompt, max_new_tokens = config.data.max_prompt_length, config.data.max_completion_length
    prompts = max(config.rollout.prompts_per_step, config.eval.batch_size) * prompt
    sampled = rows * mesh.tensor / sampling.tensor
    cache = (config.rollout.slots * (prompt + max_new_tokens) + prompts) / sampled * token
    micro = config.rows_per_batch() / config.optim.updates_per_batch / config.optim.micro_batches / rows
    inputs = micro * (prompt + max_new_tokens) * shape.width * shape.layers * computed
    return {"weights": weights, "cache": cache, "inputs": inputs}


@pytest.mark.parametrize("name", DEVICES)
def test_a_recipe_fits_its_devices(name):
    model, device = DEVICES[name]
    shape = decoder_config(json.loads((PUBLIC / f"{model}.json").read_text()))
    config = load(ROOT / "configs" / f"{name}.yaml").config
    assert shape.kv_heads % (config.rollout.mesh or config.mesh).tensor == 0
    actual = needed(config, shape)
    # A quarter is left for what a layer computes, tiles of logits, and what a compiler adds.
    assert sum(actual.values()) < 0.75 * device, {part: f"{size / GB:.1f} GB" for part, size in actual.items()}
