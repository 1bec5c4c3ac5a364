"""One of several processes that watch one another: `--at MOMENT` says where it is when a test ends another."""

import argparse
import re
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np

from train.distributed import exchange, global_arrays, peer_watch, peers
from train.models.sharding import make_mesh, replicated
from train.process.console import add_process_flags, join_processes


def in_collectives() -> None:
    """Sums over all processes again and again."""
    mesh = make_mesh(data=jax.device_count())
    ones = global_arrays.place_whole(np.ones(8, np.float32), replicated(mesh))
    add = jax.jit(lambda x: jax.lax.with_sharding_constraint(x, jax.sharding.NamedSharding(mesh, jax.P("data"))) + 1)
    double = jax.jit(lambda x: x * 1, out_shardings=replicated(mesh))
    while True:
        ones = double(add(ones))
        ones.block_until_ready()
        # One that is left alone waits in a sum soon enough.
        time.sleep(0.01)


def in_compilation() -> None:
    """Compiles new programs again and again."""
    for size in range(1, 10**6):
        x = jnp.ones((size, 8))
        jax.jit(lambda x: jnp.linalg.svd(jnp.tanh(x @ x.T))[1].sum())(x).block_until_ready()


def in_python() -> None:
    """Computes on the host."""
    while True:
        sum(range(1000))


def in_exchange() -> None:
    """Waits for values of the other processes, one of which comes late every time."""
    while True:
        if peers.process() == peers.processes() - 1:
            time.sleep(1.5)
        exchange.exchange_json("again", None)


def in_save() -> None:
    """Saves arrays again and again."""
    import orbax.checkpoint as ocp

    mesh = make_mesh(data=jax.device_count())
    arrays = global_arrays.place_whole(np.ones((64, 64), np.float32), replicated(mesh))
    root = exchange.on_leader("directory", tempfile.mkdtemp)
    with ocp.CheckpointManager(root, options=ocp.CheckpointManagerOptions(max_to_keep=2)) as manager:
        for step in range(10**6):
            manager.save(step, args=ocp.args.StandardSave({"x": arrays}))


def holding_the_interpreter() -> None:
    """Process 1 runs long C code that lets no thread of Python go on; nobody is lost."""
    if peers.process() == 1:
        began = time.monotonic()
        while time.monotonic() - began < 13:
            re.match(r"(a|a)*b", "a" * 22)
    exchange.exchange_json("after", None)
    print("all alive", flush=True)


def at_the_end() -> None:
    """Process 0 still writes files when process 1 has come to its end; nobody is lost."""
    if peers.is_leader():
        time.sleep(peers.HEARTBEAT_SECONDS + 3)
    print("all alive", flush=True)


MOMENTS = {
    "collective": in_collectives,
    "compilation": in_compilation,
    "python": in_python,
    "exchange": in_exchange,
    "save": in_save,
    "interpreter": holding_the_interpreter,
    "end": at_the_end,
}


def main() -> None:
    command = argparse.ArgumentParser()
    add_process_flags(command)
    command.add_argument("--at", choices=MOMENTS, required=True)
    options = command.parse_args()
    join_processes(options)
    with peer_watch.watching():
        peer_watch.enter(7, options.at)
        print("watching", flush=True)
        try:
            MOMENTS[options.at]()
        except BaseException as error:
            reason = peer_watch.cause(error)
            if reason is None:
                raise
            peer_watch.leave(f"error: {reason}", reason.code, reason)
    peers.stop()


if __name__ == "__main__":
    sys.exit(main())
