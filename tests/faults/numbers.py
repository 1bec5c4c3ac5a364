"""Numbers that are not finite, and runs that diverge: nothing is lost, and a message says so."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.faults import runs
from tests.faults.case import Fault, Finished, refused, run_command
from tests.integration.command import TINY, saved_arrays, state_arrays
from train.__main__ import main
from train.process.console import quiet_orbax
from train.weights.orbax import save_base

AREA = "NaN and divergence"
NOT_FINITE = "has numbers that are not finite"
# A few right answers, so that every term of the loss has a gradient.
RUN = ("configs/quickstart.yaml", *TINY, "steps=6", "optim.warmup_steps=0", "warm_start.steps=40")


def _saved_finite(root: pathlib.Path) -> bool:
    """Whether all weights of the newest checkpoint are finite; true if there is none."""
    steps = [int(path.name) for path in root.glob("checkpoints/*") if path.name.isdigit()]
    if not steps:
        return True
    arrays = state_arrays(root, max(steps))
    return all(np.isfinite(array).all() for name, array in arrays.items() if name.startswith("trainable"))


def _said(root: pathlib.Path, done: Finished) -> str:
    """Tells the outcome of a run that went to its end: a metric that is null needs a message, and a count."""
    records = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    if not any(None in record.values() for record in records):
        return "identical"
    skipped = json.loads((root / "summary.json").read_text())["skipped_updates"]
    return "repaired" if "was skipped" in done.text and skipped > 0 else "silent"


def _run(place: pathlib.Path, overrides: tuple[str, ...]) -> str:
    """Runs to the end, or to where the guard ends it; nothing that was saved may be NaN."""
    done = run_command(main, *RUN, f"output={place}", *overrides)
    if done.traceback:
        return "traceback"
    if done.code == 2:
        return refused(done)
    if not _saved_finite(place / "quickstart"):
        return "silent"
    if done.code == 3:
        return "refused" if "guard." in done.text or "is not finite" in done.text else "silent"
    return _said(place / "quickstart", done)


def _diverges(name: str, *overrides: str) -> Fault:
    return Fault(AREA, name, lambda place: _run(place, overrides))


def _rewards(name: str, body: str) -> Fault:
    def run(place: pathlib.Path) -> str:
        (place / "judge.py").write_text(f"def rate(record, completion, finished):\n    {body}\n")
        rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(1, 9)]
        (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        task = ("task=jsonl", f"data.train={place}/rows.jsonl", f"data.eval={place}/rows.jsonl")
        return _run(place, (*task, f"data.reward={place}/judge.py:rate", "warm_start.steps=0"))

    return Fault(AREA, name, run)


def _nested(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Makes a tree of arrays by dotted name."""
    tree: dict[str, Any] = {}
    for name, array in arrays.items():
        *folders, last = name.split(".")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[last] = array
    return tree


def save_nonfinite(base: pathlib.Path, target: pathlib.Path, number: float) -> None:
    """Saves the base of a run once more, with one number that is not finite, and with right digests."""
    with quiet_orbax():
        arrays = {name: array.copy() for name, array in saved_arrays(base).items()}
        next(array for array in arrays.values() if array.size > 8).flat[3] = number
        save_base(target, _nested(arrays))


def _reference(name: str, number: float) -> Fault:
    """Makes a fault of a reference with one number that is not finite."""

    def run(place: pathlib.Path) -> str:
        save_nonfinite(runs.finished_run().root / "base", place / "reference", number)
        source = f"reference={{source: checkpoint, path: {place}/reference}}"
        done = run_command(main, *runs.RECIPE, f"output={place}", source)
        return refused(done, "reference.path", NOT_FINITE)

    return Fault(AREA, name, run)


FAULTS = [
    _reference("a reference with a NaN", float("nan")),
    _reference("a reference with an infinity", float("inf")),
    _diverges("learning rate 1e3", "optim.learning_rate=1e3"),
    _diverges("learning rate 1e30", "optim.learning_rate=1e30"),
    _diverges("learning rate 1e38, gradient not clipped", "optim.learning_rate=1e38", "optim.max_grad_norm=1e30"),
    _diverges("learning rate 1e308", "optim.learning_rate=1e308"),
    _diverges("kl.loss.coef 1e38", "kl.loss.coef=1e38"),
    _diverges("warm start at 1e10", "warm_start.learning_rate=1e10"),
    _diverges("warm start at 1e38", "warm_start.learning_rate=1e38"),
    _diverges("warm start at 1e38, in its last step", "warm_start.learning_rate=1e38", "warm_start.steps=2"),
    _diverges("warm start at 1e20, in its last step", "warm_start.learning_rate=1e20", "warm_start.steps=2"),
    _rewards("rewards of 1e39", "return 1e39"),
    _rewards("rewards of 1e308", "return 1e308"),
    _rewards("rewards of 3e38, whose mean is not finite", "return 3e38 * (len(completion) % 2)"),
]
