"""Scores an export with PEFT or transformers: `python exports_side.py adapter|merged DIRECTORY`.

The directory has the export under its name and `replies.npz`, and gets the log-probs of the tokens, the largest logit
and the greedy continuation of the prompts in a file with the name of the export.
"""

import os
import pathlib
import sys

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM

NAME, ROOT = sys.argv[1], pathlib.Path(sys.argv[2])

load = AutoPeftModelForCausalLM if NAME == "adapter" else AutoModelForCausalLM
model = load.from_pretrained(ROOT / NAME, dtype=torch.float32, attn_implementation="eager").eval()
with np.load(ROOT / "replies.npz") as file:
    arrays = {name: torch.from_numpy(file[name]) for name in file.files}
tokens, mask = arrays["tokens"].long(), arrays["token_mask"].long()
positions = (mask.cumsum(1) - 1).clamp(min=0)
first = int(arrays["replies"].any(0).long().argmax())
with torch.no_grad():
    logits = model(input_ids=tokens, attention_mask=mask, position_ids=positions).logits
    scored = torch.log_softmax(logits[:, :-1], -1).gather(-1, tokens[:, 1:, None])[..., 0]
    replies = model.generate(
        input_ids=tokens[:, :first],
        attention_mask=mask[:, :first],
        max_new_tokens=tokens.shape[1] - first,
        do_sample=False,
    )
real = mask.bool()[..., None].expand_as(logits)
np.savez(
    ROOT / f"{NAME}.npz",
    log_probs=np.pad(scored.numpy(), ((0, 0), (1, 0))),
    scale=logits[real].abs().max().numpy(),
    tokens=replies.numpy(),
)
