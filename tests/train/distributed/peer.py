"""One of two processes of four devices that try every function of the door, and the library over all devices.

It prints a line when the library is exact, and one when all holds.
"""

import argparse
import sys
import time

import jax
import numpy as np

from tests.train.distributed import float64
from train.config.errors import GuardError, UserError
from train.distributed import exchange, global_arrays, peers
from train.distributed.exchange import ProcessError, report_failure
from train.models.sharding import batch_sharding, make_mesh, replicated
from train.process.console import add_process_flags, join_processes

MESHES = ((8, 1, 1), (1, 8, 1), (2, 1, 4), (1, 1, 8), (2, 4, 1))


def check_rows(shape: tuple[int, int, int]) -> None:
    """Rows go to the devices and come back, whole and in part, and each is judged once."""
    mesh = make_mesh(*shape)
    sharding = batch_sharding(mesh)
    full = {"a": np.arange(24, dtype=np.float32).reshape(8, 3) / 7, "flag": np.arange(8) % 3 == 0}
    local_rows = global_arrays.held_rows(sharding, 8)
    placed = global_arrays.place_rows({name: value[local_rows] for name, value in full.items()}, sharding)
    assert placed["a"].shape == (8, 3)
    for name, value in global_arrays.to_host(placed).items():
        np.testing.assert_array_equal(value, full[name])
    for name, value in global_arrays.to_host_rows(placed).items():
        np.testing.assert_array_equal(value, full[name][local_rows])
    total = jax.jit(lambda x: x.sum(), out_shardings=replicated(mesh))(placed["a"])
    assert abs(float(total) - full["a"].sum()) < 1e-4
    np.testing.assert_array_equal(
        global_arrays.to_host(global_arrays.place_whole(full["a"], replicated(mesh))), full["a"]
    )
    process_rows = global_arrays.own_rows(sharding, 8)
    assert set(process_rows) <= set(local_rows)
    gathered = global_arrays.gather_rows(
        "rewards", {name: value[process_rows] for name, value in full.items()}, process_rows, 8
    )
    for name, value in gathered.items():
        assert value.tobytes() == full[name].tobytes()
    assert sorted(np.concatenate([np.array(x) for x in exchange.exchange_json("rows", process_rows.tolist())])) == [
        *range(8)
    ]


def error_of(function) -> Exception:
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError("no error")


def check_agreement(number: int) -> None:
    """Values are compared, and an error of one process is raised in both."""
    exchange.agree("seed", 1)
    error = error_of(lambda: exchange.agree("seed", number))
    assert isinstance(error, UserError)
    assert str(error).startswith("seed: process 0 has 0, process 1 has 1; "), error
    error = error_of(lambda: exchange.agree("config", {"seed": 1} if number == 0 else {"name": None, "seed": 1}))
    assert str(error).startswith('name: process 0 has "no such field", process 1 has null; '), error
    assert [exchange.any_of("flag", number == 1), exchange.any_of("flag", False)] == [True, False]

    def fail_in_one() -> int:
        if number == 1:
            raise GuardError("a limit was left")
        return 7

    error = error_of(lambda: exchange.run_together("work", fail_in_one))
    assert (type(error), str(error)) == (GuardError, "process 1 of 2: a limit was left")
    bug = error_of(lambda: exchange.run_together("work", lambda: [0][number]))
    assert isinstance(bug, IndexError if number == 1 else ProcessError)
    assert exchange.run_together("work", lambda: number) == number
    assert exchange.on_leader("name", lambda: f"run-{number}") == "run-0"
    numbers = {"kl": 0.5, "loss": float("inf")}
    assert exchange.of_leader("metrics", numbers if number == 0 else {"kl": 0.6}) == numbers
    assert "process 0 of 2: no" in str(error_of(lambda: exchange.on_leader("name", refuse)))
    exchange.exchange_json("end", None)
    assert "different places" in str(error_of(lambda: exchange.exchange_json(f"place {number}", None)))


def refuse() -> None:
    raise UserError("no")


def check_failure(number: int) -> None:
    """A process that ends alone is named to the one that waits for it."""
    if number == 1:
        report_failure("the disk is full", 2)
        time.sleep(2)
    else:
        error = error_of(lambda: exchange.exchange_json("never", None))
        assert str(error) == "process 1 of 2 failed: the disk is full"


def main() -> None:
    command = argparse.ArgumentParser()
    add_process_flags(command)
    join_processes(command.parse_args())
    number = peers.process()
    assert peers.processes() == 2
    assert peers.is_leader() == (number == 0)
    for shape in MESHES:
        check_rows(shape)
    check_agreement(number)
    with jax.enable_x64(True):
        float64.check_all()
    print(f"process {number}: the library is exact")
    check_failure(number)
    peers.stop()
    print(f"process {number}: all holds")


if __name__ == "__main__":
    sys.exit(main())
