"""The candidates of a search, on devices of this machine in place of a topology's."""

import math

import jax
import pytest

from train.config.errors import UserError
from train.models.devices import Device
from train.models.sharding import device_bytes
from train.plan import search
from train.plan.compiler.topology import Topology
from train.plan.search import best, candidates

SMOKE = "configs/smoke.yaml"
LENGTHS = ("data.max_prompt_length=8", "data.max_completion_length=4")


def topology(memory: int = 2**30) -> Topology:
    return Topology(Device("v5e", "tpu", ("cpu",), memory, 1.0, 1.0, 1.0, 1.0), (2, 2))


@pytest.fixture(autouse=True)
def _devices_of_this_machine(monkeypatch):
    monkeypatch.setattr(search, "topology_devices", lambda topology: jax.devices()[: topology.size])


def test_candidates_use_all_devices_within_the_config():
    collected = list(candidates(SMOKE, [], topology()))
    meshes = {(entry.config.mesh.data, entry.config.mesh.fsdp, entry.config.mesh.tensor) for entry in collected}
    assert {math.prod(mesh) for mesh in meshes} == {4}
    assert (4, 1, 1) in meshes
    assert {entry.config.model.remat for entry in collected} == {"dots", "full"}
    for entry in collected:
        rows = entry.config.rows_per_batch() // entry.config.optim.updates_per_batch // entry.config.optim.micro_batches
        assert rows % (entry.config.mesh.data * entry.config.mesh.fsdp) == 0
    # More is saved with dots, and nothing is gathered without fsdp and tensor.
    by_key = {
        (entry.config.mesh, entry.config.optim.micro_batches, entry.config.model.remat): entry for entry in collected
    }
    for (mesh, parts, remat), entry in by_key.items():
        if remat == "dots":
            assert entry.bytes > by_key[mesh, parts, "full"].bytes
        assert (entry.exchanged == 0) == (mesh.fsdp == mesh.tensor == 1)


def test_exchange_of_a_candidate_grows_with_the_epochs():
    one, two = (
        {entry.overrides: entry.exchanged for entry in candidates(SMOKE, [f"optim.epochs={epochs}"], topology())}
        for epochs in (1, 2)
    )
    assert two == {overrides: 2 * exchanged for overrides, exchanged in one.items()}


def test_memory_of_a_candidate_has_the_state_and_two_gradients():
    """And the inputs of all layers, with full recomputation and the weights whole on each device."""
    collected = candidates(SMOKE, [], topology())
    copied = [x for x in collected if (x.config.mesh.data, x.config.model.remat) == (4, "full")]
    assert copied
    for entry in copied:
        config = entry.config
        run = search.abstract_run(config, topology())
        state = sum(device_bytes(tree) for tree in run.resident().values())
        tokens = config.rows_per_micro_batch() * (config.data.max_prompt_length + config.data.max_completion_length)
        inputs = 4 * tokens * config.model.layers * config.model.width
        assert entry.bytes == state + 2 * device_bytes(run.state.trainable) + inputs


def test_oversized_candidates_are_not_compiled():
    assert list(candidates(SMOKE, [], topology(memory=1000))) == []
    with pytest.raises(UserError, match="--search: no mesh of v5e:2x2 holds the state"):
        best(SMOKE, [], topology(memory=1000), most=1, effort=None, tell=print)


def test_remaining_devices_are_counted_before_a_search():
    collected = list(
        candidates(SMOKE, ["mesh={data: 1, context: -1}", "optim.share_prompts=false", *LENGTHS], topology())
    )
    assert {entry.config.mesh.context for entry in collected} == {4}
    # The axes that a search chooses have no size to keep.
    assert {entry.config.mesh.data for entry in candidates(SMOKE, ["mesh.data=-1"], topology())} == {1, 2, 4}
