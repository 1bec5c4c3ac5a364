"""Plays episodes with transformers: `python play.py FOLDER EPISODES.json`; prints the ids of every turn as JSON.

The template writes every prompt anew, from the messages with the replies as text, as a program of a user would.
"""

import json
import os
import pathlib
import sys

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

FOLDER = sys.argv[1]
GIVEN = json.loads(pathlib.Path(sys.argv[2]).read_text(encoding="utf-8"))

tokenizer = AutoTokenizer.from_pretrained(FOLDER)
model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
played = []
for episode in GIVEN["episodes"]:
    messages = list(episode["messages"])
    observations = list(episode["observations"])
    turns = []
    while True:
        text = tokenizer.apply_chat_template(messages, tools=GIVEN["tools"], add_generation_prompt=True, tokenize=False)
        prompt = tokenizer.encode(text, add_special_tokens=False)
        with torch.no_grad():
            ids = model.generate(torch.tensor([prompt]), max_new_tokens=GIVEN["turn_tokens"], do_sample=False)
        drawn = ids[0, len(prompt) :].tolist()
        turns.append([prompt, drawn])
        reply = tokenizer.decode(drawn, skip_special_tokens=True)
        if "<tool_call>" not in reply or not observations:
            break
        messages += [{"role": "assistant", "content": reply}, {"role": "tool", "content": observations.pop(0)}]
    played.append(turns)
print(json.dumps(played))
