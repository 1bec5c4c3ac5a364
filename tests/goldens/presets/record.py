"""Runs the update of a system on the recorded batch and writes loss and weight gradients.

    python -m tests.goldens.presets.record inputs                         the model and the batch
    python -m tests.goldens.presets.record SYSTEM RELEASE [--check]       SYSTEM of record_SYSTEM.py

RELEASE is the unpacked release, or a checkout, of the system: its own code runs, none of it is here. `--check` compares
with the file instead of writing it. Needs PyTorch 2.13.0 and transformers 5.23.0, Tunix only itself; each
record_SYSTEM.py says what more.
"""

import argparse
import dataclasses
import importlib
import json
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tests.goldens.presets import batch


@dataclasses.dataclass(frozen=True)
class Step:
    """One optimizer step of a system before its optimizer.

    Attributes:
      algorithm: name of the preset, such as "grpo".
      accumulation: number of micro-batches.
      settings: the system's own settings, by its names.
      loss: the loss of the step; NaN where the system computes none for a whole step.
      gradients: the gradient of each weight, by its name in transformers.
    """

    algorithm: str
    accumulation: int
    settings: Mapping[str, Any]
    loss: float
    gradients: Mapping[str, np.ndarray]


Run = Callable[[str, int, batch.Recorded], Step]
"""Runs the step of an algorithm with a number of micro-batches on the recorded batch."""


def each_step(run: Run, algorithms: Iterable[str]) -> Iterator[Step]:
    """Yields the step of every algorithm with one and with two micro-batches."""
    recorded = batch.load()
    for algorithm in algorithms:
        for accumulation in (1, 2):
            yield run(algorithm, accumulation, recorded)


def gradients_of(model: Any) -> dict[str, np.ndarray]:
    """Copies the gradients of a model of PyTorch; the tied head is part of the embeddings."""
    return {name: weight.grad.detach().numpy().copy() for name, weight in model.named_parameters()}


def distance(first: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray]) -> float:
    """The norm of the difference of two gradients, relative to the norm of the second."""
    difference = sum(np.sum((first[name] - second[name]) ** 2) for name in second)
    return float(np.sqrt(difference / sum(np.sum(array**2) for array in second.values())))


def collect(system: str, about: Mapping[str, Any], steps: Sequence[Step]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The index and the arrays of a file: the gradient of one micro-batch, and how far that of two is from it."""
    arrays: dict[str, np.ndarray] = {}
    index: dict[str, Any] = {}
    for step in steps:
        entry = index.setdefault(step.algorithm, {"settings": dict(step.settings), "accumulation": {}})
        full = entry["accumulation"].get("1")
        actual: dict[str, Any] = {"loss": step.loss}
        if full is not None:
            stored = {name: arrays[f"{step.algorithm}/1/{name}"] for name in step.gradients}
            actual["distance"] = distance(step.gradients, stored)
        else:
            arrays |= {f"{step.algorithm}/{step.accumulation}/{name}": x for name, x in step.gradients.items()}
        entry["accumulation"][str(step.accumulation)] = actual
    return {"system": system, **about, "algorithms": index}, arrays


def write(system: str, index: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Writes the two files of a system."""
    (batch.DIRECTORY / f"{system}.json").write_text(json.dumps(index, indent=1) + "\n")
    np.savez_compressed(batch.DIRECTORY / f"{system}.npz", **arrays)  # type: ignore[arg-type]


def differences(system: str, index: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Iterator[str]:
    """Yields a line for everything that is not as the files have it."""
    recorded = json.loads((batch.DIRECTORY / f"{system}.json").read_text())
    stored = np.load(batch.DIRECTORY / f"{system}.npz")
    for name in sorted({*arrays, *stored.files}):
        if name not in arrays or name not in stored.files:
            yield f"{name}: not in both"
        elif not np.allclose(arrays[name], stored[name], rtol=1e-9, atol=1e-12, equal_nan=True):
            yield f"{name}: differs by {np.abs(arrays[name] - stored[name]).max():.2g}"
    for algorithm in sorted({*index["algorithms"], *recorded["algorithms"]}):
        now, before = (x["algorithms"].get(algorithm, {}).get("settings") for x in (index, recorded))
        if now != before:
            yield f"{algorithm}: settings are not the recorded ones"
        for count, actual in index["algorithms"].get(algorithm, {}).get("accumulation", {}).items():
            stored_step = recorded["algorithms"].get(algorithm, {}).get("accumulation", {}).get(count, {})
            if not all(np.isclose(actual[key], stored_step.get(key, np.nan), rtol=1e-9, atol=1e-12) for key in actual):
                yield f"{algorithm}: loss or distance with {count} micro-batches"


def record_inputs() -> None:
    """Draws the model and the batch, and writes them."""
    import torch

    from tests.goldens.presets import model
    from tests.goldens.systems import release

    model.save()
    model.preload()
    drawn = batch.draw_tokens()
    empty = {name: np.zeros(drawn["mask"].shape) for name in batch.draw_log_probs(drawn["mask"] * 0.0, drawn["mask"])}
    with release.widened(), torch.no_grad():
        log_probs = model.completion_log_probs(model.load(), batch.Recorded(**drawn, **empty)).numpy()
    np.savez_compressed(batch.DIRECTORY / "batch.npz", **drawn, **batch.draw_log_probs(log_probs, drawn["mask"]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes a file, or checks it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("system")
    parser.add_argument("release", type=pathlib.Path, nargs="?")
    parser.add_argument("--check", action="store_true", help="compare instead of writing; exit 1 if anything differs")
    options = parser.parse_args(arguments)
    if options.system == "inputs":
        record_inputs()
        return 0
    module = importlib.import_module(f"tests.goldens.presets.record_{options.system.replace('-', '_')}")
    index, arrays = collect(options.system, module.ABOUT, list(module.steps(options.release)))
    for algorithm, entry in index["algorithms"].items():
        for count, actual in entry["accumulation"].items():
            print(f"{algorithm:20} {count}  loss {actual['loss']:+.9f}  {actual.get('distance', 0):.2g}")
    if not options.check:
        write(options.system, index, arrays)
        print(f"{(batch.DIRECTORY / f'{options.system}.npz').stat().st_size / 1e3:.0f} kB")
        return 0
    lines = list(differences(options.system, index, arrays))
    print("\n".join(lines) or "as recorded")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
