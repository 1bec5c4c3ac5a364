"""Files of a run that are flipped, cut, emptied or deleted, and the real `--resume` after it."""

import functools
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from kljax.checkpoint import seal
from tests.faults import runs
from tests.faults.case import Fault, Finished
from tests.faults.flips import flip_bit, warnings_of_readers
from train.process.console import quiet_orbax

Damage = Callable[[Path], None]
LAST, BEFORE = f"checkpoints/{runs.STEPS}", f"checkpoints/{runs.STEPS - 1}"


def flipped(path: Path, seed: int) -> None:
    """Flips one bit of a file, the same one every time."""
    flip_bit(path, random.Random(seed))


def cut(path: Path) -> None:
    """Leaves the first half of a file."""
    os.truncate(path, path.stat().st_size // 2)


def emptied(path: Path) -> None:
    """Leaves nothing of a file."""
    os.truncate(path, 0)


def deleted(path: Path) -> None:
    """Deletes a file or a directory."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def digit_changed(path: Path) -> None:
    """Changes the last digit of a file into another one, so that it reads as before."""
    text = path.read_text()
    position = max(text.rfind(digit) for digit in "0123456789")
    path.write_text(text[:position] + ("1" if text[position] == "0" else "0") + text[position + 1 :])


def line_deleted(path: Path) -> None:
    """Deletes the third line of a file."""
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2] + lines[3:]))


def of_step_before(path: Path) -> None:
    """Puts the checkpoint of the step before in the place of one."""
    shutil.rmtree(path)
    shutil.copytree(path.with_name(str(int(path.name) - 1)), path)


def of_other_run(path: Path) -> None:
    """Gives the seal of a state, or of a base, the id of another run."""
    metadata = json.loads((path / "_METADATA").read_text())
    metadata["custom_metadata"] = seal({**metadata["custom_metadata"]["kljax"], "run": "0" * 16})
    (path / "_METADATA").write_text(json.dumps(metadata))


HARMS: dict[str, Damage] = {"cut": cut, "emptied": emptied, "deleted": deleted}
FLIPS: dict[str, Damage] = {f"flip {seed}": functools.partial(flipped, seed=seed) for seed in range(3)}
DIGIT: dict[str, Damage] = {"a digit changed": digit_changed}


def outcome_of_resume(place: Path, *harms: tuple[str, Damage]) -> str:
    """Harms files of a copy of the run, continues it, and compares it with the uninterrupted one."""
    root = runs.copied_run(place)
    for name, damage in harms:
        damage(root / name)
    with quiet_orbax(), warnings_of_readers() as warned:
        done = runs.resume(place)
    text = "\n".join([done.text, *warned])
    return classified(Finished(done.code, text), root, [name for name, _ in harms])


def classified(done: Finished, root: Path, names: list[str]) -> str:
    """Tells the outcome of a resumed run of which the named files were harmed."""
    if done.traceback:
        return "traceback"
    # A checkpoint is named as a whole, and so is the base.
    named = ["/".join(name.split("/")[: 2 if name.startswith("checkpoints") else 1]) for name in names]
    said = any(f"{root}/{name}" in done.text for name in named)
    if done.code != 0:
        return "refused" if done.code == 2 and said else "silent"
    if said:
        return "repaired"
    return "identical" if runs.same_run(root, runs.finished_run().root, runs.STEPS) else "silent"


def data_file(directory: Path) -> Path:
    """Returns the largest file of arrays of an orbax directory."""
    files = [path for path in directory.rglob("*") if path.is_file() and path.parent.name == "d"]
    return max(files, key=lambda path: path.stat().st_size)


def _in_data(damage: Damage) -> Damage:
    return lambda directory: damage(data_file(directory))


def _cases() -> Iterator[tuple[str, tuple[tuple[str, Damage], ...]]]:
    """Yields the name of each case and the harmed files."""
    for file in ("config.yaml", "reference.json", "metrics.jsonl"):
        for name, damage in {**FLIPS, **DIGIT, **HARMS}.items():
            yield f"{file}, {name}", ((file, damage),)
    yield "metrics.jsonl, a line deleted", (("metrics.jsonl", line_deleted),)
    for directory in (f"{LAST}/state", "base"):
        for file in ("_METADATA", "_sharding", "manifest.ocdbt", "array_metadatas/process_0"):
            for name, damage in {"flip": functools.partial(flipped, seed=7), **HARMS}.items():
                yield f"{directory}/{file}, {name}", ((f"{directory}/{file}", damage),)
        for name, damage in {"flip": functools.partial(flipped, seed=1), **HARMS}.items():
            yield f"{directory}, a data file, {name}", ((directory, _in_data(damage)),)
        yield f"{directory}, deleted", ((directory, deleted),)
        yield f"{directory}/commit_success.txt, deleted", ((f"{directory}/commit_success.txt", deleted),)
        yield (
            f"{directory}, manifest of the writing process, deleted",
            ((f"{directory}/ocdbt.process_0/manifest.ocdbt", deleted),),
        )
    yield f"{LAST}/_CHECKPOINT_METADATA, deleted", ((f"{LAST}/_CHECKPOINT_METADATA", deleted),)
    yield f"{LAST}, deleted", ((LAST, deleted),)
    yield "the two newest, cut", tuple((f"{step}/state", _in_data(cut)) for step in (LAST, BEFORE))
    every = tuple((f"checkpoints/{step}/state", _in_data(emptied)) for step in range(runs.STEPS + 1))
    yield "every checkpoint, emptied", every
    yield "checkpoints, deleted", (("checkpoints", deleted),)
    yield "checkpoints/0, deleted", (("checkpoints/0", deleted),)
    yield "samples, deleted", (("samples", deleted),)
    yield f"{LAST}, the step before in its place", ((LAST, of_step_before),)
    yield f"{LAST}, of another run", ((f"{LAST}/state", of_other_run),)
    yield "base, of another run", (("base", of_other_run),)
    yield "summary.json, deleted", (("summary.json", deleted),)
    yield "base and reference.json, deleted", (("base", deleted), ("reference.json", deleted))


FAULTS = [
    Fault("other damage", name, functools.partial(lambda place, harms: outcome_of_resume(place, *harms), harms=harms))
    for name, harms in _cases()
]
