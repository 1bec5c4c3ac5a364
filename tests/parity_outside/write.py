"""Writes the dumps of a list of cases: `python -m tests.parity_outside.write FOLDER [--cases FILE] [--only TEXT]`."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.parity_outside.batches import Array, DrawnBatch, draw_batch
from tests.parity_outside.settings import merge
from tests.parity_outside.setups import SETUPS
from tests.parity_outside.step import run_step

CASES = Path(__file__).parent / "cases.json"
_LOG_PROBS = ("log_probs", "old_log_probs", "rollout_log_probs", "ref_log_probs")
SHORT = ("mask", *_LOG_PROBS, "advantages", "loss", "grad_log_probs")
_INTEGERS = ("tokens", "prompt_lengths", "lengths", "group_ids", "micro_batch_ids")


def read_cases(path: Path = CASES) -> list[dict[str, Any]]:
    """The cases of a file, in its order."""
    cases: list[dict[str, Any]] = json.loads(path.read_text())["cases"]
    return cases


def case_batch(case: dict[str, Any]) -> DrawnBatch:
    """The batch of a case, from its seed and shape."""
    shape = dataclasses.replace(SETUPS[case["setup"]].shape, **case.get("shape", {}))
    return draw_batch(case["seed"], shape)


def run_case(case: dict[str, Any], *, planted: bool = True) -> dict[str, Array]:
    """The fields of a case, with its faults or, as a comparison, without them."""
    setup = SETUPS[case["setup"]]
    faults = case.get("plant", {}) if planted else {}
    rounded = {"coarse": dict.fromkeys(_LOG_PROBS, "bfloat16")} if case.get("dtype") == "bfloat16" else {}
    settings = merge(setup.settings, case.get("declare", {}), rounded, faults)
    dtype = np.float64 if case.get("dtype") == "float64" else np.float32
    return run_step(case_batch(case), settings, seed=case["seed"], dtype=dtype)


def make_dump(case: dict[str, Any], *, values: bool = False) -> tuple[dict[str, Any], dict[str, Array]]:
    """Header and arrays of a case as they go into its file; `values` adds the critic's, which the format lacks."""
    setup, batch, fields = SETUPS[case["setup"]], case_batch(case), run_case(case)
    header = setup.header(case.get("declare", {}), case.get("dtype", "float32"))
    arrays: dict[str, Array] = {name: getattr(batch, name).astype(np.int32) for name in _INTEGERS}
    if case.get("level", "full") == "short":
        return header, arrays | {name: fields[name] for name in SHORT if name in fields}
    dtype = fields["log_probs"].dtype
    arrays |= fields | {"rewards": batch.rewards.astype(dtype)}
    if values and setup.values:
        arrays["values"] = batch.values.astype(dtype)
    if batch.shape.layout != "completions":
        rows = np.array([0, batch.shape.rows - 1], np.int32)
        arrays |= {
            "rows": rows,
            "logits": _as_returned(batch.logits["policy"][rows]).astype(dtype),
            "ref_logits": _as_returned(batch.logits["reference"][rows]).astype(dtype),
        }
    return header, arrays


def write_dump(case: dict[str, Any], folder: Path, *, values: bool = False) -> Path:
    """Writes the dump of a case and returns its path."""
    header, arrays = make_dump(case, values=values)
    path = folder / f"{case['id']}.npz"
    np.savez(path, header=np.array(json.dumps(header)), **arrays)  # type: ignore[arg-type]
    return path


def _as_returned(logits: Array) -> Array:
    """Logits as a model returns them: those at a position predict the next token."""
    return np.concatenate([logits[:, 1:], logits[:, :1]], axis=1)


def main() -> None:
    """Writes the dumps of the chosen cases into a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cases", type=Path, default=CASES, help="a list of cases (cases.json)")
    parser.add_argument("--only", default="", help="write only cases whose id has this text")
    parser.add_argument("--values", action="store_true", help="add the values of the critic where there is one")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    chosen = [case for case in read_cases(arguments.cases) if arguments.only in case["id"]]
    for case in chosen:
        write_dump(case, arguments.folder, values=arguments.values)
    print(f"{len(chosen)} dumps in {arguments.folder}")


if __name__ == "__main__":
    main()
