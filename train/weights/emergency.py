"""States of the steps between two checkpoints, in the memory of the hosts of every slice but the first.

Orbax saves them there, and restores a slice that was lost from the memory of another one.
"""

import json
import shutil
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import flags
from etils import epath
from jax.sharding import Mesh, NamedSharding
from orbax.checkpoint.experimental.emergency import checkpoint_manager as orbax_emergency

from kljax.checkpoint import open_sealed, seal, tree_digests
from kljax.checkpoint._digests import check_digests
from train.config.errors import Note, UserError, warn
from train.config.schema import EmergencySection
from train.distributed.exchange import exchange_json, on_leader, run_together
from train.distributed.global_arrays import processes_of
from train.distributed.peers import process, processes
from train.storage.uploads import whole_file

Tree = Any
ITEM = "state"
KEPT = 2
"""A process may be lost while the newest state is saved."""
NO_MESH = Mesh(np.empty((), object), ())
"""Under the mesh of a run, values that orbax exchanges between processes would be arrays of all devices."""


class EmergencyCheckpoints:
    """The newest states of a run in memory; what belongs to them, as JSON, is in the run directory.

    All functions are called by all processes together.
    """

    def __init__(self, section: EmergencySection, run_id: str, records: Path) -> None:
        """Takes the section, the run, and the directory for the JSON of each state."""
        hosts = exchange_json("hosts", socket.gethostname())
        on_this_host = [number for number, host in enumerate(hosts) if host == hosts[process()]]
        # Processes of one host have a directory each.
        self._local = Path(section.folder) / run_id / str(on_this_host.index(process()))
        self._records = records
        self._manager: orbax_emergency.CheckpointManager | None = None
        self._newest = -1

    def save(self, tree: Tree, step: int, content: Mapping[str, Any]) -> None:
        """Starts a save; the arrays are copied before it returns."""
        sealed = seal({**content, "step": step, "arrays": tree_digests(tree), "mesh": _layout(tree)})
        with jax.set_mesh(NO_MESH):
            manager = self._manager_of(tree)
            manager.wait_until_finished()
            manager.save(step, args=ocp.args.Composite(**{ITEM: ocp.args.PyTreeSave(tree)}))
        self._newest = step

        def record() -> None:
            self._records.mkdir(exist_ok=True)
            with whole_file(self._records / f"{step}.json") as file:
                file.write_text(json.dumps(sealed))
            # Those of later steps are of states that are gone: the run went on from an earlier step.
            numbers = sorted((int(path.stem) for path in self._records.glob("*.json")), key=lambda n: (n <= step, n))
            for old in numbers[:-KEPT]:
                (self._records / f"{old}.json").unlink()

        on_leader("emergency checkpoint", record)

    def restore_last(self, like: Tree, *, after: int) -> tuple[Tree, dict[str, Any]] | None:
        """Restores the newest state after a step, and its JSON; None if no slice has one that fits `like`.

        Without one, the states in memory are deleted: the run goes on from an earlier step.
        """
        with jax.set_mesh(NO_MESH):
            manager = self._manager_of(like)
            steps = [int(step) for step in manager.all_steps(read=True) if int(step) > after]
        content = on_leader("emergency checkpoint", lambda: self._read(steps))
        if content is None or content["mesh"] != _layout(like):
            if content is not None:
                warn(
                    f"checkpoint.emergency: step {content['step']} is in memory, but of {content['mesh']}, and this "
                    f"run has {_layout(like)}; it goes on from the last checkpoint"
                )
            manager.close()
            self._manager = None
            run_together("emergency checkpoints", lambda: shutil.rmtree(self._local, ignore_errors=True))
            return None
        with jax.set_mesh(NO_MESH):
            step = content["step"]
            tree = manager.restore(step, args=ocp.args.Composite(**{ITEM: ocp.args.PyTreeRestore(like)}))[ITEM]
        check_digests(f"checkpoint.emergency: step {step}", tree, content["arrays"])
        self._newest = step
        warn(Note(f"checkpoint.emergency: the run goes on from step {step}, which the memory of a slice has"))
        return tree, content

    def _read(self, steps: Sequence[int]) -> dict[str, Any] | None:
        """Reads what belongs to the newest of these states, without which it is of no use."""
        for step in sorted(steps, reverse=True):
            file = self._records / f"{step}.json"
            if file.is_file():
                return open_sealed(str(file), json.loads(file.read_text()))
        return None

    def _manager_of(self, tree: Tree) -> orbax_emergency.CheckpointManager:
        """Opens the directory of this process; the layout of the state is known no sooner."""
        if self._manager is None:
            # As the programs of orbax do, of which the trainer is none.
            if not flags.FLAGS.is_parsed():
                flags.FLAGS.mark_as_parsed()
            ocp.multihost.initialize_runtime_to_distributed_ids()
            ocp.multihost.initialize_distributed_to_device_ids()
            # Orbax asks for a directory of checkpoints of its own, which it never writes here.
            unused = self._local / "unused"
            memory = self._local / "states"

            def make() -> None:
                for path in (unused, memory):
                    path.mkdir(0o700, parents=True, exist_ok=True)

            run_together("checkpoint.emergency", make)
            self._manager = orbax_emergency.CheckpointManager(
                epath.Path(memory),
                epath.Path(unused),
                global_mesh=_mesh_of(tree),
                abstract_state=abstract(tree),
                options=orbax_emergency.CheckpointManagerOptions(
                    local=orbax_emergency.LocalCheckpointOptions(save_interval_steps=1, max_to_keep=KEPT),
                    persistent=orbax_emergency.PersistentCheckpointOptions(should_save_fn=lambda *_: False),
                    cleanup_tmp_directories=True,
                ),
            )
        return self._manager

    def wait(self) -> None:
        """Waits until every started save is complete."""
        if self._manager is not None:
            self._manager.wait_until_finished()

    def close(self, saved: int) -> None:
        """Deletes the states, unless one is newer than the checkpoint `saved`: a run that failed goes on from it."""
        if self._manager is not None:
            self._manager.close()
            self._manager = None
            if self._newest <= saved:
                shutil.rmtree(self._local, ignore_errors=True)


def abstract(tree: Tree) -> Tree:
    """Replaces the arrays of a tree with their shapes, dtypes and shardings."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def _mesh_of(tree: Tree) -> Mesh:
    sharding = jax.tree.leaves(tree)[0].sharding
    assert isinstance(sharding, NamedSharding)
    mesh = sharding.mesh
    assert isinstance(mesh, Mesh)
    return mesh


def _layout(tree: Tree) -> str:
    sizes = " x ".join(f"{name}={size}" for name, size in _mesh_of(tree).shape.items())
    return f"{sizes}, {processes()} processes"


def check_process(mesh: Mesh) -> None:
    """Raises `UserError` unless the devices of this process are in one slice, an index of the first axis."""
    slices = [Mesh(mesh.devices[[row]], mesh.axis_names) for row in range(len(mesh.devices))]
    count = sum(process() in processes_of(of_slice) for of_slice in slices)
    if count != 1:
        raise UserError(
            f"checkpoint.emergency: process {process()} has devices of {count} slices; start one process or more for "
            "each slice"
        )
