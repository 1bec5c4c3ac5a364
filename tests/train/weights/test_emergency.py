"""The records of states in memory; tests/integration/test_lost_process.py has the states themselves."""

import jax.numpy as jnp
import pytest

from tests import tiny
from train.config.schema import EmergencySection
from train.models.shard_rows import shard_rows
from train.weights.emergency import EmergencyCheckpoints


class NoStates:
    """A manager of orbax that saves nothing."""

    def wait_until_finished(self):
        pass

    def save(self, step, args):
        pass

    def close(self):
        pass


@pytest.mark.parametrize("steps", [(51, 56, 57, 51, 52), (51, 52, 53)])
def test_record_of_the_newest_state_stays(tmp_path, monkeypatch, steps):
    """Also after a run has gone on from an earlier step."""
    monkeypatch.setattr(EmergencyCheckpoints, "_manager_of", lambda self, tree: NoStates())
    states = EmergencyCheckpoints(EmergencySection(folder=str(tmp_path / "memory")), "run", tmp_path / "records")
    tree = shard_rows({"x": jnp.zeros(2)}, tiny.mesh_of())
    for step in steps:
        states.save(tree, step, {})
        records = sorted(int(file.stem) for file in (tmp_path / "records").iterdir())
        assert step in records
        assert len(records) <= 2
    assert records == list(steps[-2:])


@pytest.mark.parametrize(("saved", "kept"), [(-1, True), (52, True), (53, False), (60, False)])
def test_states_stay_that_no_checkpoint_has(tmp_path, monkeypatch, saved, kept):
    """After an error in all processes, as of a reward, as after a kill; a run that ends by itself frees the memory."""

    def managed(self, tree):
        self._manager = NoStates()
        return self._manager

    monkeypatch.setattr(EmergencyCheckpoints, "_manager_of", managed)
    states = EmergencyCheckpoints(EmergencySection(folder=str(tmp_path / "memory")), "run", tmp_path / "records")
    states.save(shard_rows({"x": jnp.zeros(2)}, tiny.mesh_of()), 53, {})
    memory = tmp_path / "memory" / "run" / "0"
    memory.mkdir(parents=True)
    states.close(saved)
    assert memory.exists() == kept
