"""Joining and leaving the other processes, and how many there are."""

import os
import socket
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from train.config.errors import LostProcessError, UserError

HEARTBEAT_SECONDS = 10
"""A process that says nothing for this long is taken for lost."""
VARIABLES = {
    "--coordinator": "JAX_COORDINATOR_ADDRESS",
    "--process": "JAX_PROCESS_ID",
    "--processes": "JAX_NUM_PROCESSES",
}
"""The variables of the environment that stand for the flags, as launchers on Kubernetes set them."""
POD_INDEX = "JOB_COMPLETION_INDEX"
"""The number of a pod of an Indexed Job or a JobSet."""


class Peers(NamedTuple):
    """The address of process 0, the number of this process, and their count."""

    coordinator: str
    process: int
    processes: int


def peers_of(
    coordinator: str | None,
    process: int | None,
    processes: int | None,
    environment: Mapping[str, str] = os.environ,
) -> Peers | None:
    """Checks the flags of the command line, or else the variables of the environment that stand for them.

    Returns:
      None if nothing names the other processes: JAX may still detect a cluster.

    Raises:
      UserError: some flags are missing, or a number is out of range.
    """
    flags = {"--coordinator": coordinator, "--process": process, "--processes": processes}
    if processes == 1 and coordinator is None and process is None:
        return Peers("", 0, 1)
    missing = [name for name, value in flags.items() if value is None]
    if len(missing) == len(flags):
        return _peers_of_variables(environment)
    if coordinator is None or process is None or processes is None:
        raise UserError(f"{', '.join(missing)}: missing; set all of {', '.join(flags)}, or none")
    return _checked(Peers(coordinator, process, processes), {name: name for name in flags})


def _peers_of_variables(environment: Mapping[str, str]) -> Peers | None:
    """Reads the variables; where JAX has to find the count of processes, returns None."""
    address, count = (environment.get(VARIABLES[flag]) for flag in ("--coordinator", "--processes"))
    if count == "1":
        return Peers("", 0, 1)
    if address is None or count is None:
        return None
    named_by = VARIABLES["--process"] if VARIABLES["--process"] in environment else POD_INDEX
    if named_by not in environment:
        raise UserError(
            f"{VARIABLES['--process']}: missing beside {VARIABLES['--coordinator']} and {VARIABLES['--processes']}; "
            f"set it to the number of the process, from 0 (in an Indexed Job {POD_INDEX} is enough)"
        )
    numbers = {}
    for name in (named_by, VARIABLES["--processes"]):
        if not environment[name].isdigit():
            raise UserError(f"{name}: got {environment[name]!r}, expected a number")
        numbers[name] = int(environment[name])
    peers = Peers(address, numbers[named_by], numbers[VARIABLES["--processes"]])
    return _checked(peers, {**VARIABLES, "--process": named_by})


def _checked(peers: Peers, names: Mapping[str, str]) -> Peers:
    """Returns the peers if their values are possible; `names` are those that an error has for the flags."""
    host, _, port = peers.coordinator.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise UserError(
            f"{names['--coordinator']}: got {peers.coordinator!r}, expected HOST:PORT, such as 10.0.0.1:8476"
        )
    count = names["--processes"]
    if peers.processes < 1:
        raise UserError(f"{count}: got {peers.processes}, expected at least 1")
    if not 0 <= peers.process < peers.processes:
        raise UserError(
            f"{names['--process']}: got {peers.process}, expected 0 to {peers.processes - 1}, as {count} is "
            f"{peers.processes}"
        )
    return peers


def start(peers: Peers | None, *, join_seconds: float) -> None:
    """Joins the other processes; call it before the first use of a device.

    Without flags and variables JAX detects the cluster: a TPU pod, SLURM, Open MPI, or Kubernetes with `jax[k8s]`.
    Anywhere else, and for one process, it is a no-op.

    Args:
      peers: from `peers_of`.
      join_seconds: after this time the process ends with exit code 75, and says which processes came.

    Raises:
      LostProcessError: the other processes cannot be reached.
      UserError: the environment has variables of other processes, but does not tell how to join them.
    """
    if peers is None and _cluster_processes() < 2:
        _check_alone(os.environ)
        return
    if peers is not None and peers.processes == 1:
        return
    # Signals are the trainer's: JAX's own handler of SIGTERM would replace it, and end no command before RL.
    jax.config.update("jax_enable_preemption_service", False)
    # The loss of a process is told, in place of an abort of all.
    jax.config.update("jax_enable_recoverability", True)
    # Programs that CPU devices run at the same time could wait for one another in two orders.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    address, number, count = (
        (None, None, None) if peers is None else (peers.coordinator, peers.process, peers.processes)
    )
    # JAX waits inside one call, and aborts without a reason.
    late = threading.Timer(join_seconds, _end_waiting, (join_seconds,))
    late.daemon = True
    late.start()
    try:
        jax.distributed.initialize(
            address,
            num_processes=count,
            process_id=number,
            initialization_timeout=int(join_seconds) + 60,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        )
    except (RuntimeError, ValueError) as error:
        where = "" if peers is None else f" at {peers.coordinator}"
        reason = str(error).strip().splitlines()[0][:200]
        raise LostProcessError(
            f"--coordinator: cannot join the other processes{where}: {reason}; start all of them with the same address"
        ) from error
    finally:
        late.cancel()


def _end_waiting(seconds: float) -> None:
    """Ends this process: the others have not joined in time."""
    from jax._src.distributed import global_state

    address = global_state.coordinator_address
    count = global_state.num_processes
    if address is None:
        problem = "the environment has not named the other processes"
    elif global_state.process_id == 0:
        problem = f"not all of {count} processes have joined {address}"
    else:
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
            problem = f"process 0 at {address} waits for others"
        except OSError as error:
            problem = f"process 0 at {address} cannot be reached ({error.strerror or error})"
    advice = "start all processes at about the same time, or raise the limit"
    os.write(2, f"error: --join-timeout: {problem} after {seconds:g} s; {advice}\n".encode())
    os._exit(LostProcessError.code)


def stop() -> None:
    """Leaves the other processes; the leader, in which the service runs, waits until all have left."""
    service = coordination()
    if service is None:
        return
    if is_leader():
        # JAX answers when every process that is still there has asked: none of them asks any more.
        service.get_live_nodes(list(range(processes())))
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
    """Counts the processes of the cluster that JAX detects; 1 without one.

    A pod that no Indexed Job numbers is alone, which the detection of JAX takes for an error.
    """
    from jax._src.clusters import ClusterEnv

    detected = (
        env
        for env in ClusterEnv._cluster_types
        if not env.opt_in_only_method
        and (env.__name__ != "K8sCluster" or POD_INDEX in os.environ)
        and env.is_env_present()
    )
    environment = next(detected, None)
    return 1 if environment is None else environment.get_process_count()


def _check_alone(environment: Mapping[str, str]) -> None:
    """Raises `UserError` if the environment names other processes, which this one would not join."""
    named = [name for name in (*VARIABLES.values(), POD_INDEX) if name in environment]
    if named:
        missing = [name for name in VARIABLES.values() if name not in environment]
        raise UserError(
            f"{', '.join(named)}: set, but {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not, and JAX "
            "detects no cluster, so this process would train alone; set all three (or give jax[k8s] the right to read "
            "pods), or --processes 1 to train alone"
        )
