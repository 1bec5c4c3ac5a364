"""The ids that llama.cpp gives texts: `python llama_side.py FILE.gguf DIRECTORY`, in an environment with `xllamacpp`.

The directory has `texts.json`, and gets `llama_ids.json`.
"""

import json
import pathlib
import sys
import urllib.request

import xllamacpp

FILE, ROOT = map(pathlib.Path, sys.argv[1:])

params = xllamacpp.CommonParams()
params.model.path = str(FILE)
params.n_ctx, params.n_parallel, params.warmup = 256, 1, False
server = xllamacpp.Server(params)


def tokenize(text: str) -> list[int]:
    """Asks the server for the ids of a text; texts of special tokens become their ids."""
    body = json.dumps({"content": text, "add_special": False, "parse_special": True}).encode()
    request = urllib.request.Request(f"{server.listening_address}/tokenize", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["tokens"]


texts = json.loads((ROOT / "texts.json").read_text())
(ROOT / "llama_ids.json").write_text(json.dumps([tokenize(text) for text in texts]))
