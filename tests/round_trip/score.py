"""Scores every export below a directory with transformers and PEFT: `python score.py DIRECTORY FOLDER`.

FOLDER is the base of all of them. Without it, each export `NAME/hf` has a base of its own, `NAME/model`; so has an
adapter, `NAME/adapter` or `NAME/peft`.
"""

import os
import pathlib
import sys

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

ROOT, *BASES = map(pathlib.Path, sys.argv[1:])


def log_probs(model: torch.nn.Module) -> np.ndarray:
    """Log-prob of every token given those before it, 0 at the first."""
    tokens = torch.from_numpy(np.load(ROOT / "tokens.npy")).long()
    with torch.no_grad():
        logits = model.eval()(tokens).logits.float()
    scored = torch.log_softmax(logits[:, :-1], -1).gather(-1, tokens[:, 1:, None])[..., 0]
    return np.pad(scored.numpy(), ((0, 0), (1, 0)))


def load(path: pathlib.Path) -> torch.nn.Module:
    """A causal language model in float32."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


for base in BASES:
    np.save(ROOT / "before.npy", log_probs(load(base)))
for folder in sorted([*ROOT.glob("*/hf"), *ROOT.glob("*/model")]):
    np.save(folder.with_suffix(".npy"), log_probs(load(folder)))
for folder in sorted([*ROOT.glob("*/peft"), *ROOT.glob("*/adapter")]):
    base = BASES[0] if BASES else folder.with_name("model")
    np.save(folder.with_suffix(".npy"), log_probs(PeftModel.from_pretrained(load(base), folder)))
