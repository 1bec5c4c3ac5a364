"""The door to many processes: their start, rows of global arrays, and agreement on values and errors.

Every process runs the same program. Arrays live on the devices of all processes; small values on the host travel
through the coordination service of JAX. With one process every function is a no-op or a plain copy. Nothing else in the
trainer asks how many processes there are, or which devices belong to this one.
"""

from train.distributed.exchange import (
    agree,
    any_of,
    exchange_json,
    on_leader,
    run_together,
    send_to_leader,
    was_raised_together,
)
from train.distributed.global_arrays import (
    RowSplit,
    device_count,
    gather_rows,
    held_rows,
    map_shards,
    own_rows,
    place_rows,
    place_whole,
    processes_of,
    row_owners,
    to_host,
    to_host_rows,
)
from train.distributed.peer_watch import cause, enter, leave, watching
from train.distributed.peers import is_leader, peers_of, process, processes, start, stop

__all__ = [
    "RowSplit",
    "agree",
    "any_of",
    "cause",
    "device_count",
    "enter",
    "exchange_json",
    "gather_rows",
    "held_rows",
    "is_leader",
    "leave",
    "map_shards",
    "on_leader",
    "own_rows",
    "peers_of",
    "place_rows",
    "place_whole",
    "process",
    "processes",
    "processes_of",
    "row_owners",
    "run_together",
    "send_to_leader",
    "start",
    "stop",
    "to_host",
    "to_host_rows",
    "was_raised_together",
    "watching",
]
