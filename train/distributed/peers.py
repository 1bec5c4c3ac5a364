"""Joining and leaving the other processes, and how many there are."""

from typing import Any, NamedTuple

import jax

from train.config.errors import LostProcessError, UserError
from train.distributed.joining import joining_within

HEARTBEAT_SECONDS = 10
"""A process that says nothing for this long is taken for lost."""
LAST_SECONDS = 86_400
"""A process that has come to its end waits this long for the others, which may still write files; a lost one is noticed
by its silence."""
CLUSTERS = ("gcetpu", "gketpu", "slurm", "ompi")


class Peers(NamedTuple):
    """The address of process 0, the number of this process, and their count."""

    coordinator: str
    process: int
    processes: int


def peers_of(coordinator: str | None, process: int | None, processes: int | None) -> Peers | None:
    """Checks the flags of the command line; returns None if there are none.

    Raises:
      UserError: some flags are missing, or a number is out of range.
    """
    flags = {"--coordinator": coordinator, "--process": process, "--processes": processes}
    missing = [name for name, value in flags.items() if value is None]
    if len(missing) == len(flags):
        return None
    if coordinator is None or process is None or processes is None:
        raise UserError(f"{', '.join(missing)}: missing; set all of {', '.join(flags)}, or none")
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise UserError(f"--coordinator: got {coordinator!r}, expected HOST:PORT, such as 10.0.0.1:8476")
    if processes < 1:
        raise UserError(f"--processes: got {processes}, expected at least 1")
    if not 0 <= process < processes:
        raise UserError(f"--process: got {process}, expected 0 to {processes - 1}, as --processes is {processes}")
    return Peers(coordinator, process, processes)


def start(peers: Peers | None, *, join_seconds: float) -> None:
    """Joins the other processes; call it before the first use of a device.

    Without flags, a TPU pod, SLURM and Open MPI are detected; anywhere else, and for one process, it is a no-op.

    Args:
      peers: from `peers_of`.
      join_seconds: after this time the process ends with exit code 75, and says which processes came.

    Raises:
      LostProcessError: the other processes cannot be reached.
    """
    if peers is None and _cluster_processes() < 2:
        return
    if peers is not None and peers.processes == 1:
        return
    # Signals are the trainer's: JAX's own handler of SIGTERM would replace it.
    jax.config.update("jax_enable_preemption_service", False)
    # Programs that CPU devices run at the same time could wait for one another in two orders.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    address, number, count = (
        (None, None, None) if peers is None else (peers.coordinator, peers.process, peers.processes)
    )
    try:
        with joining_within(join_seconds):
            jax.distributed.initialize(
                address,
                num_processes=count,
                process_id=number,
                # The limit is kept here, with a message in place of an abort.
                initialization_timeout=int(join_seconds) + 60,
                heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
                shutdown_timeout_seconds=LAST_SECONDS,
            )
    except (RuntimeError, ValueError) as error:
        where = "" if peers is None else f" at {peers.coordinator}"
        reason = str(error).strip().splitlines()[0][:200]
        raise LostProcessError(
            f"--coordinator: cannot join the other processes{where}: {reason}; start all of them with the same address"
        ) from error


def stop() -> None:
    """Leaves the other processes; waits until all have come this far."""
    if coordination() is not None:
        jax.distributed.shutdown()


def process() -> int:
    """Returns the number of this process."""
    return 0 if coordination() is None else jax.process_index()


def processes() -> int:
    """Returns the number of processes."""
    return 1 if coordination() is None else jax.process_count()


def is_leader() -> bool:
    """Whether this process writes files and prints."""
    return process() == 0


def coordination() -> Any:
    """Returns the client of the coordination service; None in a run of one process."""
    from jax._src import distributed

    return distributed.global_state.client


def _cluster_processes() -> int:
    """Counts the processes that the environment of a TPU pod, SLURM or Open MPI names; 1 anywhere else."""
    from jax._src.clusters import ClusterEnv

    environments = (env for env in ClusterEnv._cluster_types if env.name in CLUSTERS and env.is_env_present())
    environment = next(environments, None)
    return 1 if environment is None else environment.get_process_count()
