"""A process, alone or one of several, that compiles a program over all devices with the cache it is told.

It prints the line for the user, and how many programs came from the cache and how many were compiled.
"""

import argparse
import collections
import sys

import jax
import jax.numpy as jnp

from train.distributed import peers
from train.distributed.compile_cache import start_compile_cache
from train.models.sharding import batch_sharding, make_mesh, replicated
from train.process.console import add_process_flags, join_processes


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("field")
    add_process_flags(parser)
    options = parser.parse_args()
    join_processes(options)
    line = start_compile_cache({"true": True, "false": False}.get(options.field, options.field))
    events: collections.Counter[str] = collections.Counter()
    jax.monitoring.register_event_listener(lambda event, **_: events.update([event.rpartition("/")[2]]))
    mesh = make_mesh(jax.device_count())
    rows = jax.jit(lambda: jnp.arange(8.0), out_shardings=batch_sharding(mesh))()
    total = jax.jit(lambda x: jnp.sin(x).sum(), out_shardings=replicated(mesh))(rows)
    assert abs(float(total) - 0.5538) < 1e-3, total
    print(line)
    print(events["cache_hits"], events["compile_requests_use_cache"] - events["cache_hits"])
    peers.stop()


if __name__ == "__main__":
    sys.exit(main())
