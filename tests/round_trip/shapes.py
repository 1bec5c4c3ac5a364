"""Mixtures of experts of random shapes, made by transformers and computed by kljax.

    python -m tests.round_trip.shapes --torch-env ENV               # a few; `make test-transformers` runs this too
    python -m tests.round_trip.shapes --torch-env ENV --count 40    # before a release

ENV is the environment of `tests.round_trip`. For each shape logits, log-probs, the loss, its gradient of every weight,
routers and experts included, and greedy continuations are compared. Exit code 1 if a number differs by more than the
tolerance, or a continuation does.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests import xla
from tests.train.models import test_parity as parity

FAMILIES = ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe")
"""The families that are drawn in turn; `--families gpt_oss` draws others from the same numbers."""
DRAW = Path(__file__).with_name("draw_shapes.py")
SHAPE = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "num_experts_per_tok")


def differences(folder: Path) -> dict[str, float]:
    """The largest difference of each kind of number; 1 for other continuations."""
    expected, (loss, log_probs, logits, gradient) = parity.golden(str(folder)), parity.results(str(folder))
    model = parity.loaded(str(folder))[0]
    arrays, experts = parity.tensors(model, gradient), model.config.experts
    slopes = {name.removeprefix("grad/"): array for name, array in expected.items() if name.startswith("grad/")}
    routers = [name for name in slopes if name.endswith(("mlp.gate.weight", "mlp.router.weight"))]
    assert routers
    # The gate of an expert alone is 1, whatever its logit.
    constant = experts.normalize and experts.active == 1
    assert constant or min(np.abs(slopes[name]).max() for name in routers) > 0
    pairs = {"logits": (logits, expected["logits"]), "log-probs": (log_probs, expected["log_probs"])}
    pairs |= {"loss": (loss, expected["loss"])}
    largest = {name: float(np.abs(np.float64(got) - want).max()) for name, (got, want) in pairs.items()}
    largest["gradient"] = max(float(np.abs(np.float64(arrays[name]) - want).max()) for name, want in slopes.items())
    return largest | {"greedy": float((parity.greedy(str(folder)) != expected["greedy"]).any())}


def describe(folder: Path) -> str:
    """The family and some sizes of a shape."""
    config = json.loads((folder / "config.json").read_text())
    count = config.get("num_experts", config.get("num_local_experts"))
    return f"{config['model_type']:>9} {' '.join(str(config[key]) for key in SHAPE)} of {count}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line for each shape; returns the exit code."""
    command = argparse.ArgumentParser(
        prog="python -m tests.round_trip.shapes", description=str(__doc__).splitlines()[0]
    )
    command.add_argument("--torch-env", type=Path, required=True, help="an environment with torch and transformers")
    command.add_argument("--first", type=int, default=0, help="number of the first shape, which is its seed")
    command.add_argument("--count", type=int, default=4, help="number of shapes")
    command.add_argument("--families", nargs="+", default=FAMILIES, help="the families that are drawn in turn")
    command.add_argument("--output", type=Path, help="where the models are kept; else they are removed")
    options = command.parse_args(arguments)
    # Each shape compiles two programs and runs them once.
    os.environ["XLA_FLAGS"] = xla.flags(devices=1)
    worst: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as temporary:
        output = options.output or Path(temporary)
        output.mkdir(parents=True, exist_ok=True)
        numbers = range(options.first, options.first + options.count)
        python, drawn = options.torch_env / "bin" / "python", (str(options.first), str(options.count))
        subprocess.run([python, DRAW, output, *drawn, *options.families], check=True)
        for number in numbers:
            folder = output / f"shape-{number}"
            got = differences(folder)
            worst = {name: max(value, worst.get(name, 0.0)) for name, value in got.items()}
            shown = ", ".join(f"{name} {value:.1e}" for name, value in got.items() if name != "greedy")
            print(f"{number:>3} {describe(folder)}: {shown}", flush=True)
    print(f"{options.count} shapes, largest differences: {worst}; allowed {parity.TOLERANCE:.0e}")
    return int(max(worst.values()) > parity.TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
