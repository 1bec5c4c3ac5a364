"""The door with two real processes, and what its flags refuse."""

import os
import re
from typing import NamedTuple

import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests import peers
from train.config.errors import UserError
from train.distributed import exchange, global_arrays
from train.distributed.peers import is_leader, peers_of, process, processes, start, stop
from train.models.sharding import batch_sharding, make_mesh


@pytest.fixture(scope="module")
def pair() -> list[tuple[int, str, str]]:
    """Exit code, output and errors of both processes; flags name the first, variables of a pod the second."""
    return peers.run("tests.train.distributed.peer", processes=2, devices=4, env=os.environ, variables=True)


def test_two_processes_share_rows_values_and_errors(pair) -> None:
    for number, (code, out, err) in enumerate(pair):
        # The collectives of CPU devices print lines of their own.
        assert (code, out.splitlines()[-1:]) == (0, [f"process {number}: all holds"]), err


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("host:1", None, 2), "--process: missing; set all of --coordinator, --process, --processes, or none"),
        ((None, 0, 2), "--coordinator: missing"),
        (("host", 0, 2), "--coordinator: got 'host', expected HOST:PORT"),
        (("host:70000", 0, 2), "--coordinator: got 'host:70000'"),
        (("host:1", 2, 2), "--process: got 2, expected 0 to 1"),
        (("host:1", -1, 2), "--process: got -1, expected 0 to 1"),
        (("host:1", 0, 0), "--processes: got 0, expected at least 1"),
    ],
)
def test_mismatched_flags_are_refused(flags, text) -> None:
    with pytest.raises(UserError, match=r"^--") as caught:
        peers_of(*flags)
    assert text in str(caught.value)


ADDRESS, COUNT, NUMBER, INDEX = (
    *("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"),
    "JOB_COMPLETION_INDEX",
)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({ADDRESS: "pod-0:8476", COUNT: "4", NUMBER: "3"}, ("pod-0:8476", 3, 4)),
        ({ADDRESS: "pod-0:8476", COUNT: "4", INDEX: "2"}, ("pod-0:8476", 2, 4)),
        ({ADDRESS: "pod-0:8476", COUNT: "4", NUMBER: "1", INDEX: "0"}, ("pod-0:8476", 1, 4)),
        ({ADDRESS: "pod-0:8476", COUNT: "1"}, ("", 0, 1)),
        ({ADDRESS: "pod-0:8476"}, None),  # JAX takes the count from its cluster
    ],
)
def test_variables_name_the_processes(variables, expected) -> None:
    assert peers_of(None, None, None, variables) == expected
    if variables:
        assert peers_of("host:1", 0, 2, variables) == ("host:1", 0, 2)
        assert peers_of(None, None, 1, variables) == ("", 0, 1)


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({ADDRESS: "pod-0:8476", COUNT: "4"}, f"{NUMBER}: missing beside {ADDRESS} and {COUNT}; "),
        ({ADDRESS: "pod-0", COUNT: "4", INDEX: "0"}, f"{ADDRESS}: got 'pod-0', expected HOST:PORT"),
        ({ADDRESS: "pod-0:1", COUNT: "four", INDEX: "0"}, f"{COUNT}: got 'four', expected a number"),
        ({ADDRESS: "pod-0:1", COUNT: "4", INDEX: "4"}, f"{INDEX}: got 4, expected 0 to 3, as {COUNT} is 4"),
        ({ADDRESS: "pod-0:1", COUNT: "0", NUMBER: "0"}, f"{COUNT}: got 0, expected at least 1"),
    ],
)
def test_mismatched_variables_are_refused_by_name(variables, text) -> None:
    with pytest.raises(UserError, match=r"^J") as caught:
        peers_of(None, None, None, variables)
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize("variables", [{INDEX: "1"}, {COUNT: "2", NUMBER: "1"}, {ADDRESS: "pod-0:8476"}])
def test_pod_that_cannot_join_does_not_train_alone(variables, monkeypatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="this process would train alone") as caught:
        start(peers_of(None, None, None), join_seconds=1)
    named = ", ".join(name for name in (ADDRESS, NUMBER, COUNT, INDEX) if name in variables)
    assert str(caught.value).startswith(f"{named}: set, but ")
    start(peers_of(None, None, 1), join_seconds=1)
    assert processes() == 1


def test_one_process_needs_no_flags_and_no_network() -> None:
    assert peers_of(None, None, None) is None
    start(None, join_seconds=1)
    start(peers_of("nowhere.invalid:1", 0, 1), join_seconds=1)
    assert (process(), processes(), is_leader()) == (0, 1, True)
    stop()


@pytest.mark.slow
def test_library_is_exact_over_two_processes_in_float64(pair) -> None:
    for number, (_, out, err) in enumerate(pair):
        assert f"process {number}: the library is exact" in out.splitlines(), err


def test_missing_process_ends_the_waiting_processes() -> None:
    """Process 2 never starts; the service ends with process 0, whose limit is the shortest."""
    flags = ("--coordinator", f"127.0.0.1:{peers.free_port()}", "--processes", 3)
    module, start = "tests.train.distributed.peer", {"processes": 1, "devices": 1, "env": os.environ}
    with (
        peers.started(module, *flags, "--process", 1, "--join-timeout", 20, **start) as (second,),
        peers.started(module, *flags, "--process", 0, "--join-timeout", 8, **start) as (first,),
    ):
        peers.wait([first, second], 60)
        assert (first.returncode, second.returncode) == (75, 75)
        advice = "start all processes at about the same time, or raise the limit\n$"
        assert re.search(
            rf"^error: --join-timeout: not all of 3 processes have joined 127\.0\.0\.1:\d+ after 8 s; {advice}",
            first.stderr,
            re.M,
        )
        unreachable = r"process 0 at 127\.0\.0\.1:\d+ cannot be reached \(Connection refused\) after 20 s"
        assert re.search(rf"^error: --join-timeout: {unreachable}; {advice}", second.stderr, re.M)


class ProcessDevice(NamedTuple):
    """A device of some process."""

    id: int
    process_index: int


class Spread:
    """A sharding whose devices belong to several processes, `per_process` devices each."""

    def __init__(self, sharding: NamedSharding, per_process: int) -> None:
        self._sharding, self._per_process = sharding, per_process

    def devices_indices_map(self, shape):
        indices = self._sharding.devices_indices_map(shape)
        return {ProcessDevice(d.id, d.id // self._per_process): index for d, index in indices.items()}


@pytest.mark.parametrize("per_process", [1, 2, 4, 8])
@pytest.mark.parametrize("shape", [(8, 1, 1), (2, 2, 2), (1, 1, 8), (1, 4, 2), (4, 1, 2)])
def test_every_row_is_scored_once_by_its_process(shape, per_process) -> None:
    sharding = Spread(batch_sharding(make_mesh(*shape)), per_process)
    owners = global_arrays.row_owners(sharding, 16)
    holders = [
        {d.process_index for d, i in sharding.devices_indices_map((16,)).items() if row in range(16)[i[0]]}
        for row in range(16)
    ]
    assert all(owner in holder_rows for owner, holder_rows in zip(owners, holders, strict=True))
    counts = np.bincount(owners, minlength=8 // per_process)
    assert counts.max() - counts.min() == 0  # the work is shared evenly


def test_single_process_rows_equal_the_array() -> None:
    sharding = batch_sharding(make_mesh(2, 2, 2))
    rows = np.arange(16.0).reshape(8, 2)
    assert global_arrays.own_rows(sharding, 8).tolist() == global_arrays.held_rows(sharding, 8).tolist() == [*range(8)]
    placed = global_arrays.place_rows({"x": rows}, sharding)
    assert placed["x"].sharding == sharding
    np.testing.assert_array_equal(global_arrays.to_host(placed)["x"], rows)
    np.testing.assert_array_equal(global_arrays.to_host_rows(placed)["x"], rows)


def test_a_shard_is_changed_on_the_host() -> None:
    mesh = make_mesh(2, 2, 2)
    placed = global_arrays.place_whole(np.arange(8, dtype=np.uint16), NamedSharding(mesh, PartitionSpec("fsdp")))
    changed = global_arrays.map_shards(lambda x: x.view(np.int16) - np.int16(1), placed)
    assert changed.sharding == placed.sharding
    np.testing.assert_array_equal(changed, np.arange(-1, 7, dtype=np.int16))


def test_single_process_error_is_raised_unchanged() -> None:
    with pytest.raises(ZeroDivisionError):
        exchange.run_together("work", lambda: 1 // 0)
    assert exchange.run_together("work", lambda: 3) == 3
    assert exchange.on_leader("name", lambda: "run") == "run"
    assert exchange.of_leader("metrics", {"kl": 0.5}) == {"kl": 0.5}
    exchange.agree("seed", 3)
    assert exchange.any_of("flag", True)
    values = global_arrays.gather_rows("rewards", {"reward": np.ones(3)}, np.arange(3), 3)
    assert values["reward"].tolist() == [1, 1, 1]
