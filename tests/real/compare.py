"""Weights, ids and log-probs that kljax reads from an imported GGUF file, in the form of `transformers_side.py`."""

import hashlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import safe_open

from kljax import Policy
from train.data.tasks import Example
from train.data.tokenizers.files import load_folder
from train.models.decoder import Decoder
from train.models.sharding import make_mesh
from train.rl.policy import ScoredPolicy, Sequences, token_stats
from train.weights.huggingface import load_params
from train.weights.huggingface.config import decoder_config

CHATS = 100


def weight_digests(folder: Path) -> dict[str, str]:
    """Computes the SHA-256 of each tensor in float32."""
    with safe_open(folder / "model.safetensors", framework="numpy") as file:
        return {name: hashlib.sha256(file.get_tensor(name).tobytes()).hexdigest() for name in sorted(file.keys())}


def token_ids(folder: Path, lines: list[str]) -> dict[str, Any]:
    """Encodes each text alone, and the first ones as conversations; decodes the first ones."""
    tokenizer = load_folder(folder)
    ids = [tokenizer.encode(line) for line in lines]
    return {
        "texts": ids,
        "chats": [tokenizer.prompt_ids(Example(line, "", "")) for line in lines[:CHATS]],
        "decoded": [tokenizer.decode(row) for row in ids[:CHATS]],
    }


def log_probs(folder: Path, tokens: np.ndarray) -> np.ndarray:
    """Computes the log-prob of every token given the tokens before it, 0 at the first."""
    mesh = make_mesh()
    model = Decoder(decoder_config(folder))
    params = load_params(folder, model, mesh)
    with jax.set_mesh(mesh):
        score = jax.jit(
            lambda p: (
                token_stats(
                    ScoredPolicy(model, Policy(p)), Sequences(tokens, np.ones(tokens.shape, bool)), temperature=1.0
                )[0].log_prob
            )
        )
        return np.asarray(score(params))
