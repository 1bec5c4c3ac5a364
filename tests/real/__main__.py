"""SmolLM2-135M-Instruct as kljax imports it, compared with the readers of others.

    python -m tests.real --torch-env ENV [--llama-env ENV] [--directory DIR] [--record]   # `make test-real`

The first environment has torch, transformers, peft and `gguf`, the second `xllamacpp`, which is llama.cpp. Without the
second, ids are compared with the ones recorded of it. `--record` writes tests/goldens/gguf/smollm2.json, which
`tests/real/test_smollm2.py` compares without either. `--directory` keeps what the others computed, and uses it again.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from tests.real import compare
from tests.real.texts import texts
from train import real

GOLDEN = Path(__file__).parents[1] / "goldens" / "gguf" / "smollm2.json"
HERE = Path(__file__).parent


def compute(directory: Path, torch_env: Path, llama_env: Path | None) -> None:
    """Lets the others read the file, unless their results are in the directory."""
    (directory / "texts.json").write_text(json.dumps(texts(compare.TEXTS)))
    np.save(directory / "tokens.npy", compare.tokens_to_score())
    sides = [("transformers_side.py", torch_env, "ids.json"), ("llama_side.py", llama_env, "llama_ids.json")]
    for script, environment, result in sides:
        if environment is not None and not (directory / result).is_file():
            python = environment / "bin" / "python"
            subprocess.run([python, HERE / script, real.CHECKPOINTS / real.FILE, directory], check=True)


def results(directory: Path) -> dict:
    """Collects what the others computed, in the form that is recorded."""
    ids = json.loads((directory / "ids.json").read_text())
    weights = json.loads((directory / "weights.json").read_text())
    weights.pop("lm_head.weight", None)  # a view of the embeddings
    llama = directory / "llama_ids.json"
    known = None if not llama.is_file() else json.loads(llama.read_text())
    recorded = json.loads(GOLDEN.read_text()) if GOLDEN.is_file() else {}
    return {
        "weights": compare.digest(weights),
        "tensors": len(weights),
        "ids": recorded.get("ids") if known is None else compare.digest(known),
        "ids_that_transformers_has_differently": recorded.get("ids_that_transformers_has_differently")
        if known is None
        else sum(one_side != other for one_side, other in zip(known, ids["texts"], strict=True)),
        "chats": ids["chats"][:3],
        "log_probs": np.load(directory / "log_probs.npy").tolist(),
        "scale": json.loads((directory / "scale.json").read_text()),
    }


def main() -> int:
    """Prints a line for each comparison; returns the exit code."""
    command = argparse.ArgumentParser(prog="python -m tests.real", description=str(__doc__).partition("\n")[0])
    command.add_argument("--torch-env", type=Path, required=True, help="with torch, transformers, peft and gguf")
    command.add_argument("--llama-env", type=Path, help="with xllamacpp")
    command.add_argument("--directory", type=Path, help="where the results of the others are kept")
    command.add_argument("--record", action="store_true", help=f"write {GOLDEN.name}")
    options = command.parse_args()
    folder = real.fetch()
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.directory or Path(temporary)
        compute(directory, options.torch_env, options.llama_env)
        expected = results(directory)
    if options.record:
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text(json.dumps(expected) + "\n")
    lines = compare.problems(folder, expected)
    print("\n".join(lines) or "weights, ids and log-probs agree")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
