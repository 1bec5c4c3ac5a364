"""The generated cases are the planned ones, their files belong together, and every release has its plan."""

import ast
import importlib
import json
import pathlib
import sys

import numpy as np

from tests.goldens import batches, cases, generate, plan


def test_the_index_is_the_plan() -> None:
    index = json.loads((cases.DIRECTORY / "generated.json").read_text())["cases"]
    planned = [
        (system, *identity)
        for system in generate.RELEASES
        for identity in plan.identities(system, importlib.import_module(f"tests.goldens.plans.{system}").PLANS)
    ]
    assert [case["id"] for case in index] == [identity for _, identity, _, _ in planned]
    for case, (system, _, what, batch) in zip(index, planned, strict=True):
        params = {name: value for name, value in case["params"].items() if name != "dtype"}
        assert params == {**json.loads(json.dumps(what.params)), "batch": batch}, case["id"]
        assert (case["system"], case["function"], case["note"]) == (system, what.function, what.note)
        assert case["version"] == generate.RELEASES[system].replace("==", " ")


def test_index_lists_the_arrays() -> None:
    with np.load(cases.DIRECTORY / "generated.npz") as arrays:
        names = set(arrays.files)
        assert all(np.issubdtype(arrays[name].dtype, np.number) for name in names)
    generated = [case for case in cases.all_cases() if case.file == cases.GENERATED]
    inputs = {f"{case.params['batch']}/{name}" for case in generated for name in case.inputs}
    assert names == inputs | {f"{case.id}/out/{name}" for case in generated for name in case.outputs}


def test_no_two_cases_share_an_id() -> None:
    identities = [case.id for case in cases.all_cases()]
    assert len(set(identities)) == len(identities)


def test_every_system_is_run_again_or_has_reasons() -> None:
    shared = {case.system for case in cases.all_cases() if case.file == cases.SHARED}
    assert shared <= set(generate.RELEASES) | set(generate.NOT_ON_PYPI)
    assert not set(generate.RELEASES) & set(generate.NOT_ON_PYPI)
    assert set(generate.OTHER_VERSION) <= set(generate.RELEASES)


def test_batches_match_their_names() -> None:
    drawn = {name: batches.draw(name) for name in batches.BATCHES}
    has_token = {name: arrays["mask"].any(1) for name, arrays in drawn.items()}
    assert [name for name, rows in has_token.items() if not rows.all()] == ["empty_row"]
    # A hole has a token after it.
    after = {name: np.flip(np.maximum.accumulate(np.flip(a["mask"], 1), 1), 1) for name, a in drawn.items()}
    assert [name for name, arrays in drawn.items() if (after[name] > arrays["mask"]).any()] == ["holes"]
    assert [name for name, a in drawn.items() if np.abs(a["log_probs"] - a["old_log_probs"]).max() > 20] == ["huge"]
    assert [name for name, a in drawn.items() if 1 in np.bincount(a["group_ids"])] == ["holes"]


def test_the_generator_starts_without_any_package() -> None:
    # It makes its own environment, so it must run where neither PyTorch nor the project's packages are installed.
    tree = ast.parse(pathlib.Path(generate.__file__).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in imports if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} <= set(sys.stdlib_module_names)


def test_releases_and_libraries_are_pinned() -> None:
    requirements = [*generate.RELEASES.values(), generate.TORCH, *generate.LIBRARIES]
    assert all(requirement.count("==") == 1 for requirement in requirements)
