"""Weights, ids and log-probs that transformers reads: `python transformers_side.py FILE.gguf DIRECTORY`.

The directory has `texts.json` and `tokens.npy`, and gets `weights.json` (SHA-256 of each tensor in float32), `ids.json`
(the ids of each text, and of each text as a conversation), and `log_probs.npy` with the largest logit in `scale.json`.
"""

import hashlib
import json
import os
import pathlib
import sys

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

FILE, ROOT = map(pathlib.Path, sys.argv[1:])

model = AutoModelForCausalLM.from_pretrained(
    FILE.parent, gguf_file=FILE.name, dtype=torch.float32, attn_implementation="eager"
).eval()
weights = {
    name: hashlib.sha256(np.ascontiguousarray(tensor.numpy()).tobytes()).hexdigest()
    for name, tensor in model.state_dict().items()
}
(ROOT / "weights.json").write_text(json.dumps(weights))

tokens = torch.from_numpy(np.load(ROOT / "tokens.npy")).long()
with torch.no_grad():
    logits = model(tokens).logits
scored = torch.log_softmax(logits[:, :-1], -1).gather(-1, tokens[:, 1:, None])[..., 0]
np.save(ROOT / "log_probs.npy", np.pad(scored.numpy(), ((0, 0), (1, 0))))
(ROOT / "scale.json").write_text(json.dumps(float(logits.abs().max())))

tokenizer = AutoTokenizer.from_pretrained(FILE.parent, gguf_file=FILE.name)
texts = json.loads((ROOT / "texts.json").read_text())
chats = [
    tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False)
    for text in texts
    # Its reader does not split digits as the file says.
    if not any(character.isnumeric() for character in text)
][:100]
ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
(ROOT / "ids.json").write_text(json.dumps({"texts": ids, "chats": chats}))
