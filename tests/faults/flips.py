"""One bit flipped in the arrays of a run: newest checkpoint, base, a moving reference, an adapter, an export."""

import dataclasses
import functools
import logging
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from kljax.checkpoint import named_leaves
from tests import tiny
from tests.faults import runs
from tests.faults.case import Fault
from tests.integration.command import saved_arrays
from train.config.errors import UserError
from train.config.load import load
from train.config.schema import Checkpoint
from train.models.sharding import replicated
from train.process.console import quiet_orbax
from train.rl.state import TrainState, initial_state
from train.run.base_weights import load_base
from train.run.directory import RunDirectory
from train.run.setup import first_state, make_context
from train.weights.emergency import abstract
from train.weights.late_read_errors import quiet_abandoned_reads
from train.weights.orbax import RunCheckpoints, orbax_arrays, restore_base, save_base

SECTION = Checkpoint(every=1, keep=10)


class _Warnings(logging.Handler):
    """Collects the warnings of the readers."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextmanager
def warnings_of_readers() -> Iterator[list[str]]:
    """Collects what the readers of checkpoints warn of inside the block."""
    handler, logger = _Warnings(), logging.getLogger("train.weights.orbax")
    before = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield handler.texts
    finally:
        logger.removeHandler(handler)
        logger.propagate = before


def flip_bit(path: Path, draw: random.Random) -> str:
    """Flips one bit of a file; describes which one."""
    content = path.read_bytes()
    position, bit = draw.randrange(len(content)), draw.randrange(8)
    path.write_bytes(content[:position] + bytes([content[position] ^ 1 << bit]) + content[position + 1 :])
    return f"byte {position}, bit {bit}"


def flip(directory: Path, seed: str) -> str:
    """Flips one bit in one file below a directory such that an array changes or cannot be read; describes it.

    Files are drawn by their size. A flip that changes no array is void: it is undone and drawn again.
    """
    draw = random.Random(seed)
    before = saved_arrays(directory)
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.stat().st_size)
    while True:
        (path,) = draw.choices(files, [file.stat().st_size for file in files])
        content = path.read_bytes()
        bit = flip_bit(path, draw)
        try:
            void = runs.same_arrays(saved_arrays(directory), before)
        except Exception:
            void = False
        if not void:
            return f"{path.relative_to(directory)}, {bit}"
        path.write_bytes(content)


@functools.cache
def layout_of_run() -> TrainState:
    """Returns a state of the layout of the finished run."""
    root = runs.finished_run().root
    context = make_context(load(root / "config.yaml").config)
    with jax.set_mesh(context.mesh):
        base = load_base(RunDirectory(root), context.model, context.mesh)
        return first_state(context.plan, context.model, context.mesh, base, context.optimizer)


def small_state(step: int) -> TrainState:
    """Returns a state with a reference that moves, which a step tells from every other."""
    rng = np.random.default_rng(step)
    params = {"w": jnp.asarray(rng.normal(size=(8, 300)), jnp.float32), "b": jnp.full(7, step / 3, jnp.bfloat16)}
    state = initial_state({"params": params}, optax.adamw(1e-3), {}, replicated(tiny.mesh_of()))
    moving = jax.tree.map(lambda x: x + 1, params)
    state = dataclasses.replace(state, step=jnp.int32(step), reference=moving)
    return jax.device_put(state, replicated(tiny.mesh_of()))


def in_newest_checkpoint(place: Path, seed: str) -> str:
    """Flips a bit in the last checkpoint of the run: the one before is used, and the other is named."""
    root = runs.copied_run(place)
    flip(root / "checkpoints" / str(runs.STEPS) / "state", seed)
    return _goes_on_from(root, layout_of_run(), runs.STEPS - 1)


def in_moving_reference(place: Path, seed: str) -> str:
    """Flips a bit in the item of a reference that follows the policy."""
    checkpoints = RunCheckpoints(place / "checkpoints", SECTION)
    for step in (1, 2):
        checkpoints.save(small_state(step), step)
    checkpoints.close()
    flip(place / "checkpoints" / "2" / "reference", seed)
    return _goes_on_from(place, small_state(0), 1)


def _goes_on_from(root: Path, like: TrainState, step: int) -> str:
    """Restores the last state; "repaired" if it is that of a step, bit by bit, and the newer one is named."""
    expected = {item.name: saved_arrays(item) for item in (root / "checkpoints" / str(step)).iterdir() if item.is_dir()}
    with warnings_of_readers() as said:
        checkpoints = RunCheckpoints(root / "checkpoints", SECTION)
        try:
            restored = checkpoints.restore_last(like)
        except UserError as error:
            return "refused" if str(root) in str(error) else "silent"
        except Exception:
            return "traceback"
        finally:
            checkpoints.close()
    if restored is None or int(restored.step) != step or not any(f"{step + 1} is damaged" in text for text in said):
        return "silent"
    again = RunCheckpoints(root / "again", SECTION)
    again.save(restored, step)
    again.close()
    same = all(
        runs.same_arrays(saved_arrays(root / "again" / str(step) / name), item) for name, item in expected.items()
    )
    return "repaired" if same else "silent"


def in_base(place: Path, seed: str) -> str:
    """Flips a bit in the base, which `--resume`, evaluation and export read."""
    base = Path(shutil.copytree(runs.finished_run().root / "base", place / "base"))
    return _named(base, seed, lambda: restore_base(base, _params_of_run(), "base"))


def in_step_of_other_run(place: Path, seed: str) -> str:
    """Flips a bit in a checkpoint of which another run reads the weights: those are right, or it is refused."""
    state = Path(shutil.copytree(runs.finished_run().root / "checkpoints" / "0" / "state", place / "state"))
    expected = {name: array for name, array in saved_arrays(state).items() if name.startswith("trainable.params")}
    return _named(
        state, seed, lambda: restore_base(state, _params_of_run(), "--step", item="trainable.params"), expected
    )


def in_orbax_export(place: Path, seed: str) -> str:
    """Flips a bit in an adapter or weights that `train.export` wrote, as another run compares them array by array."""
    tree = {"layers": {"a": jnp.arange(900.0).reshape(3, 300), "b": jnp.ones((2, 40))}}
    save_base(place / "export", tree)
    return _named(
        place / "export", seed, lambda: {n: array.read() for n, array in orbax_arrays(place / "export", None).items()}
    )


def _params_of_run() -> Any:
    return abstract(layout_of_run().trainable["params"])


def _named(directory: Path, seed: str, read: Callable[[], Any], needed: runs.Arrays | None = None) -> str:
    """Flips a bit and reads: "refused" if the error names the directory, "identical" if what is needed is unharmed."""
    flip(directory, seed)
    try:
        with warnings_of_readers():
            got = read()
    except (UserError, ValueError, FileNotFoundError) as error:
        return "refused" if str(directory) in str(error) else "silent"
    except Exception:
        return "traceback"
    arrays = {f"trainable.params.{name}": np.asarray(leaf) for name, leaf in named_leaves(got).items()}
    return "identical" if needed is not None and runs.same_arrays(arrays, needed) else "silent"


def _faults() -> Iterator[Fault]:
    quiet_abandoned_reads()
    areas: dict[str, tuple[Callable[[Path, str], str], int]] = {
        "the newest checkpoint": (in_newest_checkpoint, 80),
        "the base": (in_base, 50),
        "a reference that follows the policy": (in_moving_reference, 30),
        "a step that another run reads": (in_step_of_other_run, 20),
        "an export": (in_orbax_export, 20),
    }
    for name, (run, times) in areas.items():
        for number in range(times):
            seed = f"{name} {number}"
            quiet = functools.partial(_run_quietly, run, seed=seed)
            yield Fault("bit flips in arrays", f"{name}, flip {number}", quiet)


def _run_quietly(run: Callable[[Path, str], str], place: Path, *, seed: str) -> str:
    with quiet_orbax():
        return run(place, seed)


FAULTS = list(_faults())
