"""How a command ends after an error: its message and exit code, alone or with the other processes of the run."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from train.config.errors import GuardError, UserError
from train.process.disk_problem import NEXT_STEP, REMOVED, disk_problem
from train.process.interrupt import INTERRUPTED


def known_ending(error: BaseException) -> tuple[str, int] | None:
    """Returns the message and the exit code for an error that is meant for users; None for any other."""
    if isinstance(error, UserError):
        return f"error: {error}", error.code
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", INTERRUPTED
    problem = disk_problem(error) or memory_problem(error) if isinstance(error, Exception) else None
    if problem is None:
        return None
    return f"error: {problem}; {'start a new run' if problem.endswith(REMOVED) else NEXT_STEP}", 2


def memory_problem(error: Exception) -> str | None:
    """Describes an allocation that failed, on the host or on a device; None for every other error."""
    text = str(error).strip()
    if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in text:
        return None
    first = text.splitlines()[0][:200] if text else "an allocation failed"
    return f"out of memory: {first}; shorter lengths, more optim.micro_batches or fewer rollout.slots need less"


@contextmanager
def ending_alone() -> Iterator[None]:
    """Ends this process at once for an error inside the block that the other processes do not raise too.

    Whatever waits for the others after such an error, as orbax does to complete a save, would wait for ever. An error
    that follows from the loss of another process gives way to that loss. One process raises all errors as they are.
    """
    # Imported late, so that an error in the config shows before JAX starts.
    from train.distributed import exchange, peer_watch, peers

    try:
        yield
    except BaseException as error:
        # The guard judges numbers that are the same in every process.
        if peers.processes() == 1 or exchange.was_raised_together(error) or isinstance(error, GuardError):
            raise
        reason = peer_watch.cause(error) or error
        text, code = known_ending(reason) or ("".join(traceback.format_exception(error)).rstrip(), 1)
        peer_watch.leave(text, code, reason)
