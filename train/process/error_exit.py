"""How a command ends after an error: its message and exit code, alone or with the other processes of the run."""

import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from train.config.errors import GuardError, UserError
from train.config.user_functions import failure
from train.process.disk_problem import NEXT_STEP, REMOVED, disk_problem
from train.process.interrupt import INTERRUPTED

_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def known_ending(error: BaseException) -> tuple[str, int] | None:
    """Returns the message and the exit code for an error that is meant for users; None for any other."""
    if isinstance(error, UserError):
        return f"error: {error}", error.code
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", INTERRUPTED
    if isinstance(error, SystemExit):
        # A command ends by its own return value: code of the user, or a package, wanted to end the process.
        return f"error: {failure(error)}\nThe command was ended by sys.exit, before its end", UserError.code
    if not isinstance(error, Exception):
        return None
    problem = disk_problem(error)
    if problem is not None:
        return f"error: {problem}; {'start a new run' if problem.endswith(REMOVED) else NEXT_STEP}", 2
    problem = memory_problem(error)
    return None if problem is None else (f"error: {problem}", 2)


def memory_problem(error: Exception) -> str | None:
    """Describes an allocation that failed, on the host or on a device; None for every other error."""
    text = str(error).strip()
    first = text.splitlines()[0][:200] if text else "an allocation failed"
    if "RESOURCE_EXHAUSTED" in text:
        return f"out of memory: {first}; shorter lengths, more optim.micro_batches or fewer rollout.slots need less"
    if not isinstance(error, MemoryError):
        return None
    # On the host it is what was read or called there, and not the size of a batch.
    frames = traceback.extract_tb(error.__traceback__)
    outside = [frame for frame in frames if not frame.filename.startswith((*_LIBRARIES, "<"))]
    line = "".join(f" at {frame.filename}, line {frame.lineno}: {frame.line}" for frame in (outside or frames)[-1:])
    return f"out of memory on the host: {first}{line}"


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
