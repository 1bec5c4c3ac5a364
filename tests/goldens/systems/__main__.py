"""`python -m tests.goldens.systems RELEASES [--check] [--checkouts DIR]`; `generate.py` calls it where PyTorch is."""

import argparse
import collections
import importlib
import json
import pathlib
import sys
import types
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from tests.goldens import batches, generate, plan
from tests.goldens.systems import defaults, record, release

DIRECTORY = pathlib.Path(__file__).resolve().parents[1]
NOTE = (
    "computed in float64 with PyTorch 2.13.0 on CPU by running the named release's own function; written by generate.py"
)
# Shared cases whose function works in float32 inside: they agree to its rounding, which the CPU's vector unit decides.
FLOAT32 = {("openrlhf", "compute_approx_kl")}
# What the shared cases call an array that has another name here.
SHARED_NAMES = {"group": "group_ids", "token_level_rewards": "token_rewards", "token_level_scores": "token_rewards"}


def modules() -> dict[str, types.ModuleType]:
    """The runner of each system, by its name."""
    return {system: importlib.import_module(f"tests.goldens.systems.{system}") for system in generate.RELEASES}


def plans(system: str) -> tuple[plan.RecordingPlan, ...]:
    """The planned cases of a system."""
    return importlib.import_module(f"tests.goldens.plans.{system}").PLANS


def version(system: str) -> str:
    """The version of a release as the shared cases write it."""
    return generate.RELEASES[system].replace("==", " ")


def generated(releases: pathlib.Path) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """Runs every planned case: the index and the arrays."""
    drawn = {name: batches.draw(name) for name in batches.BATCHES} | {"updates": batches.updates()}
    index: list[dict[str, Any]] = []
    arrays: dict[str, np.ndarray] = {}
    for system, module in modules().items():
        with release.isolated():
            calls = module.calls(releases / system)
            for identity, planned, batch in plan.identities(system, plans(system)):
                arguments, call = drawn[batch], calls[planned.function]
                result, narrow = record.run_widened(call, planned.params, arguments, planned.gradient_of)
                params = {**planned.params, "batch": batch, **({"dtype": record.WIDENED} if narrow else {})}
                index.append(
                    {
                        "id": identity,
                        "system": system,
                        "version": version(system),
                        "function": planned.function,
                        "params": params,
                        "inputs": list(result.inputs),
                        "outputs": sorted(result.outputs),
                        "gradient_of": planned.gradient_of if "grad" in result.outputs else None,
                        "note": planned.note,
                    }
                )
                arrays |= {f"{batch}/{name}": arguments[name] for name in result.inputs}
                arrays |= {f"{identity}/out/{name}": value for name, value in result.outputs.items()}
    return index, dict(sorted(arrays.items()))


class RecordingReport:
    """Counts, per system and function, the cases that agree and those that do not, and says it in lines."""

    def __init__(self) -> None:
        self.agree: collections.Counter[tuple[str, str]] = collections.Counter()
        self.differ: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
        self.left_out: collections.Counter[tuple[str, str, str]] = collections.Counter()

    def compare(
        self, case: Mapping[str, Any], outputs: Mapping[str, np.ndarray], recorded: np.lib.npyio.NpzFile
    ) -> None:
        """Compares the outputs of one case with what the file holds."""
        key = case["system"], case["function"]
        tolerance = 1e-6 if key in FLOAT32 and "dtype" not in case["params"] else 1e-12
        wrong = [
            name
            for name in case["outputs"]
            if name not in outputs or not record.close(outputs[name], recorded[f"{case['id']}/out/{name}"], tolerance)
        ]
        if wrong:
            self.differ[key].append(f"{case['id']}: {', '.join(wrong)}")
        else:
            self.agree[key] += 1

    def print(self, title: str) -> None:
        """The lines of the report."""
        print(title)
        for key in sorted({*self.agree, *self.differ}):
            total = self.agree[key] + len(self.differ[key])
            print(f"  {key[0]:9} {key[1]:55} {self.agree[key]:3} of {total:3} agree")
            for line in self.differ[key]:
                print(f"      differs: {line}")
        for (system, function, reason), count in sorted(self.left_out.items()):
            print(f"  {system:9} {function:55} {count:3} not run: {reason}")


def check_shared(releases: pathlib.Path) -> RecordingReport:
    """Runs the shared cases again on their recorded inputs."""
    index = json.loads((DIRECTORY / "torch_goldens.json").read_text())["cases"]
    recorded = np.load(DIRECTORY / "torch_goldens.npz")
    report = RecordingReport()
    for system in sorted({case["system"] for case in index}):
        cases = [case for case in index if case["system"] == system]
        if system in generate.NOT_ON_PYPI:
            report.left_out.update((system, case["function"], generate.NOT_ON_PYPI[system]) for case in cases)
            continue
        with release.isolated():
            calls = modules()[system].calls(releases / system)
            for case in cases:
                if case["function"] not in calls:
                    report.left_out[system, case["function"], "no call of it here"] += 1
                    continue
                names = {name: recorded[f"{case['id']}/in/{name}"] for name in case["inputs"]}
                arguments = {SHARED_NAMES.get(name, name): array for name, array in names.items()}
                outputs = record.run(calls[case["function"]], case["params"], arguments, case["gradient_of"]).outputs
                report.compare(case, outputs, recorded)
    return report


def check_generated(releases: pathlib.Path) -> RecordingReport:
    """Runs the generated cases again and compares them with the files."""
    recorded = np.load(DIRECTORY / "generated.npz")
    index = json.loads((DIRECTORY / "generated.json").read_text())["cases"]
    now, arrays = generated(releases)
    report = RecordingReport()
    if [case["id"] for case in now] != [case["id"] for case in index]:
        report.differ["generated", "index"].append("the cases of generated.json are not the planned ones")
    for case in index:
        outputs = {name: arrays.get(f"{case['id']}/out/{name}", np.array(np.nan)) for name in case["outputs"]}
        report.compare(case, outputs, recorded)
    return report


def main() -> int:
    """Writes the generated cases and the defaults, or checks all cases and the defaults."""
    parser = argparse.ArgumentParser()
    parser.add_argument("releases", type=pathlib.Path)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--checkouts", type=pathlib.Path)
    options = parser.parse_args()
    torch.set_num_threads(1)  # sums in one order, whatever the machine
    if not options.check:
        index, arrays = generated(options.releases)
        record.write(DIRECTORY, NOTE, index, arrays)
        defaults.write(options.releases, options.checkouts)
        print(f"{len(index)} cases, {(DIRECTORY / 'generated.npz').stat().st_size / 1e6:.2f} MB")
        return 0
    reports = [check_shared(options.releases), check_generated(options.releases)]
    reports[0].print("shared cases:")
    for system, text in generate.OTHER_VERSION.items():
        print(f"  ({system}: {text})")
    reports[1].print("generated cases:")
    print("not recorded:")
    for system in generate.RELEASES:
        for name, reason in importlib.import_module(f"tests.goldens.plans.{system}").LEFT_OUT.items():
            print(f"  {system:9} {name}: {reason}")
    same = defaults.check(options.releases, options.checkouts)
    return int(not same or any(lines for report in reports for lines in report.differ.values()))


if __name__ == "__main__":
    sys.exit(main())
