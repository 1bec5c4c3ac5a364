"""Weights, ids and log-probs that kljax reads from an imported GGUF file, in the form of `transformers_side.py`."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import safe_open

from kljax import Policy
from tests.real.replies import score
from tests.real.texts import texts
from train.data.tasks import Example
from train.data.tokenizers.files import load_folder
from train.models.decoder import Decoder
from train.models.sharding import make_mesh
from train.rl.policy import Sequences
from train.weights.huggingface import load_params
from train.weights.huggingface.config import decoder_config

TEXTS, CHATS = 10_000, 100
ROWS, LENGTH, VOCABULARY = 4, 48, 49_152
# Of log-probs, as a share of the largest logit.
TOLERANCE = 5e-6


def tokens_to_score() -> np.ndarray:
    """Draws tokens, `[ROWS, LENGTH]` int32."""
    return np.random.default_rng(0).integers(0, VOCABULARY, (ROWS, LENGTH)).astype(np.int32)


def digest(value: Any) -> str:
    """Hashes a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def problems(folder: Path, expected: Mapping[str, Any]) -> list[str]:
    """Compares the imported folder with the results of the others; lists what differs.

    Args:
      folder: the imported folder.
      expected: content of tests/goldens/gguf/smollm2.json.
    """
    lines, weights, lines_of_text = [], weight_digests(folder), texts(TEXTS)
    if digest(weights) != expected["weights"]:
        lines.append(f"weights: {len(weights)} tensors differ from the {expected['tensors']} of transformers")
    ids = token_ids(folder, lines_of_text)
    if digest(ids["texts"]) != expected["ids"]:
        lines.append("ids: a text differs from llama.cpp")
    if ids["chats"][: len(expected["chats"])] != expected["chats"]:
        lines.append("chats: a conversation differs from transformers")
    difference = float(np.abs(log_probs(folder, tokens_to_score()) - np.array(expected["log_probs"])).max())
    if not difference <= TOLERANCE * expected["scale"]:
        lines.append(f"log-probs: differ by {difference:.2g}, allowed {TOLERANCE * expected['scale']:.2g}")
    return lines


def weight_digests(folder: Path) -> dict[str, str]:
    """Computes the SHA-256 of each tensor in float32."""
    with safe_open(folder / "model.safetensors", framework="numpy") as file:
        return {name: hashlib.sha256(file.get_tensor(name).tobytes()).hexdigest() for name in sorted(file.keys())}


def token_ids(folder: Path, lines: list[str]) -> dict[str, Any]:
    """Encodes each text alone, and the first ones without digits as conversations."""
    tokenizer = load_folder(folder)
    ids = [tokenizer.encode(line) for line in lines]
    without_digits = [line for line in lines if not any(character.isnumeric() for character in line)][:CHATS]
    return {"texts": ids, "chats": [tokenizer.prompt_ids(Example(line, "", "")) for line in without_digits]}


def log_probs(folder: Path, tokens: np.ndarray) -> np.ndarray:
    """Computes the log-prob of every token given the tokens before it, 0 at the first."""
    mesh = make_mesh()
    model = Decoder(decoder_config(folder))
    params = load_params(folder, model, mesh)
    with jax.set_mesh(mesh):
        return score(model, Policy(params), Sequences.rows(tokens, np.ones(tokens.shape, bool)))
