"""Runs the updates of the parity dumps: without a fault, and with each single fault."""

import dataclasses
import pathlib
from typing import Any

import numpy as np

from tests.goldens.parity import batch, faults, other_updates, recorders, verl_update
from tests.goldens.systems import release, verl

Index = list[dict[str, Any]]
INPUTS = ("tokens", "prompt_lengths", "lengths", "group_ids", "rewards")
# Reductions of the dumps without a fault.
MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


def record(releases: pathlib.Path) -> tuple[Index, dict[str, np.ndarray]]:
    """Records every dump of every system."""
    recording = Recording()
    with release.isolated():
        modules = verl.load(releases / "verl")
        drawn = batch.draw()
        shared = {name: drawn[name] for name in INPUTS}
        shared["rows"] = np.array(batch.SCORED)
        shared |= {name: drawn[name][list(batch.SCORED)] for name in ("hidden", "ref_hidden")}
        shared["head"] = drawn["head"]
        results = {}
        for mode in MODES:
            settings = verl_update.Settings(mode=mode)
            results[mode] = verl_update.update(modules, drawn, settings)
            recording.add(f"verl-clean-{mode}", verl_update.header(settings), {**shared, **results[mode]})
        clean, declared = results["token-mean"], verl_update.header(verl_update.Settings())
        for fault in faults.FAULTS:
            settings = dataclasses.replace(verl_update.Settings(), **fault.changes)
            fields = verl_update.update(modules, drawn, settings)
            if not differ(fields, clean):
                raise ValueError(f"{fault.name}: changes nothing in this batch")
            recording.add(f"verl-{slug(fault.name)}", declared, {**shared, **fields}, (fault,))
    for case, fields in other_updates.record(releases, modules[2]):
        planted = () if case.fault is None else (case.fault,)
        recording.add(slug(case.name), {"dtype": "float32", **case.header}, fields, planted)
    for name, header, fields in recorders.record(releases, modules[2]):
        recording.add(name, header, fields)
    return recording.index, recording.arrays


def differ(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> bool:
    """Whether any array differs by more than the rounding of float32."""
    return any(not np.allclose(first[name], second[name], rtol=1e-5, atol=1e-7) for name in first)


def slug(name: str) -> str:
    """A name for a file."""
    return "".join(c if c.isalnum() else "-" for c in name.lower()).strip("-")


class Recording:
    """The dumps so far: their index, and their arrays, each stored once."""

    def __init__(self) -> None:
        self.index: Index = []
        self.arrays: dict[str, np.ndarray] = {}

    def add(
        self,
        name: str,
        header: dict[str, Any],
        fields: dict[str, np.ndarray],
        planted: tuple[faults.DumpFault, ...] = (),
    ) -> None:
        """Adds a dump; an array that an earlier dump has is referred to."""
        places = {}
        for field, value in fields.items():
            keys = [key for key in self.arrays if key.endswith(f"/{field}")]
            same = [key for key in keys if np.array_equal(self.arrays[key], value)]
            places[field] = same[0] if same else f"{name}/{field}"
            self.arrays.setdefault(places[field], value)
        causes = [{"name": fault.name, "causes": list(fault.causes)} for fault in planted]
        self.index.append({"name": name, "header": header, "planted": causes, "arrays": places})
