"""The model, prompts and policies of the recorded exchanges: the same numbers on every release of JAX."""

import dataclasses
import json
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import kljax
from kljax.checkpoint import named_leaves
from tests import tiny
from train.config.schema import Config
from train.context import RunContext
from train.data.tasks import Example
from train.distributed.global_arrays import RowSplit
from train.models.parameters import abstract_adapter, abstract_params
from train.models.sharding import batch_sharding
from train.rollouts.source import Request
from train.weights.huggingface.save import save_folder

NAME = "tiny"
PROMPTS = ("1+2=", "8", "")
SAMPLES = 2
MODEL = "model={layers: 2, width: 64, heads: 2, kv_heads: 1, head_dim: 32, mlp_width: 64}"
SHAPE = (MODEL, "data={max_prompt_length: 5, max_completion_length: 6}", "rollout.prompts_per_step=3")
LORA = "lora={rank: 4, alpha: 8.0, targets: [q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj]}"


def config_of(url: str, *overrides: str) -> Config:
    """A config whose completions come from a server."""
    source = f"rollout.source={{type: openai, url: '{url}', model: {NAME}, retries: 2, timeout: 60.0}}"
    return tiny.config_of(*SHAPE, source, *overrides)


def context_of(config: Config) -> RunContext:
    """The context of a config, with the prompts of the recording."""
    prompts = tiny.SamePrompts([Example(prompt, "3", "3") for prompt in PROMPTS])
    return dataclasses.replace(tiny.context_of(config), prompts=prompts)


def _drawn(name: str, shape: tuple[int, ...], seed: int) -> jax.Array:
    rng = np.random.default_rng([zlib.crc32(name.encode()), seed])
    values = rng.normal(size=shape).astype(np.float32)
    # Norms near 1, everything else large enough for opinions.
    return jnp.asarray(1 + values / 10 if name.endswith("scale") else values / 4)


def drawn(abstract: dict, seed: int) -> dict:
    """A tree of weights that depend on their names alone."""
    leaves = [_drawn(name, leaf.shape, seed) for name, leaf in named_leaves(abstract).items()]
    return jax.tree.unflatten(jax.tree.structure(abstract), leaves)


def policy_of(context: RunContext, step: int) -> kljax.Policy:
    """The policy after some steps: of its own adapter, or of its own weights where there is none."""
    params = abstract_params(context.model, context.mesh)
    if context.config.lora is None:
        return kljax.Policy(drawn(params, step))
    return kljax.Policy(drawn(params, 0), drawn(abstract_adapter(context.model, context.mesh), step))


def request_of(context: RunContext, step: int, key: int) -> Request:
    """The requests of a step, whose seeds follow from the number of a key."""
    examples = context.prompts.batch(step)
    rows = RowSplit.of(batch_sharding(context.mesh), len(examples) * SAMPLES)
    return Request(examples, SAMPLES, step, jax.random.key(key), rows)


def write_model(folder: Path, context: RunContext) -> None:
    """The folder of a server: the first weights, the tokenizer, and defaults that no request may take."""
    save_folder(folder, context.model, kljax.Policy(policy_of(context, 0).params))
    write_tokenizer(folder, context.model.config.vocab_size)
    write_defaults(folder)


def byte_symbols() -> list[str]:
    """The symbol of each byte in a byte-level tokenizer: printable ones stand for themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """`tokenizer.json` of the byte tokenizer, so that a server speaks of the same ids."""
    extra = ["<bos>", "<eos>", "<pad>", *(f"<unused{n}>" for n in range(vocab_size - 259))]
    symbols = [*byte_symbols(), *extra]
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": 256 + index, "content": text, **special} for index, text in enumerate(extra)]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    content = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": {symbol: index for index, symbol in enumerate(symbols)}, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names | {"pad_token": "<pad>"}))


def write_defaults(folder: Path) -> None:
    """`generation_config.json` with what a server takes where a request leaves it out: no log-prob would be right."""
    penalties = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5}
    content = penalties | {"temperature": 0.3, "top_k": 3, "top_p": 0.5, "min_p": 0.2, "eos_token_id": 257}
    (folder / "generation_config.json").write_text(json.dumps(content))
