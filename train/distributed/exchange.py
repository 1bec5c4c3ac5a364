"""Small values of the host between processes: exchange, agreement, and errors that end all of them.

Values travel through the coordination service of JAX, in the same order in every process. No device takes part.
"""

import json
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from flax.serialization import msgpack_restore, msgpack_serialize

from train.config.errors import UserError
from train.distributed.peers import coordination, is_leader, process, processes

T = TypeVar("T")
POLL_MILLISECONDS = 500
"""A wait ends this often, so that signals are heard."""
ABSENT = "no such field"
FAILED = "kljax/failed"
STOPPING = "kljax/stopping"
READING = {error.__name__: error for error in (FileNotFoundError, ValueError)}
"""Errors of reading, which callers turn into one that names a field."""
_STATE = {"rounds": 0}


class ProcessError(UserError):
    """Another process failed, with an error that the user may not be able to fix; the exit code is that of it."""

    def __init__(self, text: str, code: int = UserError.code) -> None:
        super().__init__(text)
        self.code = code


def agree(label: str, value: Any) -> None:
    """Checks that a JSON value is the same in every process; an object is compared field by field.

    Raises:
      UserError: in every process, naming two processes that differ, their values, and the field of an object.
    """
    values = exchange_json(label, value)
    for number, differing in enumerate(values):
        if differing == values[0]:
            continue
        first = values[0]
        other = differing
        if isinstance(first, dict) and isinstance(other, dict):
            names = sorted(first.keys() | other.keys())
            label = next(name for name in names if first.get(name, ABSENT) != other.get(name, ABSENT))
            first = first.get(label, ABSENT)
            other = other.get(label, ABSENT)
        raise _mark(
            UserError(
                f"{label}: process 0 has {short(first)}, process {number} has {short(other)}; start all processes with "
                "the same command, config, files and release of the package"
            )
        )


def any_of(label: str, flag: bool) -> bool:
    """Whether a flag is set in any process."""
    return any(exchange_json(label, bool(flag)))


def is_stopping(flag: bool) -> bool:
    """Whether a flag is set in this process, or was when another process asked; no process waits for another."""
    service = coordination()
    if service is None:
        return flag
    if flag:
        service.key_value_set(f"{STOPPING}/{process()}", "", allow_overwrite=True)
    return flag or bool(service.key_value_dir_get(STOPPING))


def raise_together(label: str, error: Exception | None) -> None:
    """Raises the first error of any process in every process, naming the process; a no-op if there is none."""
    if processes() == 1:
        if error is not None:
            raise error
        return
    report = None if error is None else {"kind": type(error).__name__, "text": str(error)}
    reports = exchange_json(label, report)
    first = next((number for number, failed in enumerate(reports) if failed is not None), None)
    if first is None:
        return
    if error is not None and not isinstance(error, UserError):
        raise _mark(error)
    kind = reports[first]["kind"]
    text = reports[first]["text"]
    raise _mark(_user_error(kind, f"process {first} of {processes()}: {text}")) from error


def was_raised_together(error: BaseException) -> bool:
    """Whether every process raised an error at this place, so that none waits for another."""
    cause: BaseException | None = error
    while cause is not None and not hasattr(cause, "raised_together"):
        cause = cause.__cause__
    return cause is not None


def run_together(label: str, function: Callable[[], T]) -> T:
    """Calls a function in every process; an error of one process is raised in all."""
    result = None
    error = None
    try:
        result = function()
    except Exception as caught:
        if was_raised_together(caught):
            raise
        error = caught
    raise_together(label, error)
    return result  # type: ignore[return-value]


def on_leader(label: str, function: Callable[[], T]) -> T:
    """Calls a function in the leader while the others wait; all return its JSON value, or raise its error."""
    return of_leader(label, run_together(label, function if is_leader() else lambda: None))  # type: ignore[return-value]


def of_leader(label: str, value: T) -> T:
    """Returns the JSON value of the leader in every process: hosts of other kinds may round what each computed."""
    return value if processes() == 1 else exchange_json(label, value)[0]


def exchange_json(label: str, value: Any) -> list[Any]:
    """Sends a JSON value to all processes; returns the values of all, by process number."""
    return [json.loads(part) for part in exchange(label, json.dumps(value).encode())]


def exchange(label: str, value: bytes) -> list[bytes]:
    """Sends bytes to all processes; returns the bytes of all, by process number.

    The leader collects the values and sends them on, so the work grows with the number of processes, not its square.

    Raises:
      RuntimeError: the processes are not at the same place of the program.
      ProcessError: a process has failed.
    """
    return _round(label, value, to_all=True)


def send_to_leader(label: str, value: bytes) -> list[bytes]:
    """Sends bytes to the leader; returns the bytes of all processes there, by process number, and elsewhere none."""
    return _round(label, value, to_all=False)


def _round(label: str, value: bytes, *, to_all: bool) -> list[bytes]:
    if processes() == 1:
        return [value]
    service = coordination()
    number = _STATE["rounds"]
    _STATE["rounds"] += 1
    prefix = f"kljax/{number}"
    if not is_leader():
        service.key_value_set_bytes(f"{prefix}/{process()}", msgpack_serialize({"label": label, "value": value}))
        answer = msgpack_restore(_wait(f"{prefix}/all"))
        labels = answer["labels"]
        values = answer["values"]
    else:
        received = [msgpack_restore(_wait(f"{prefix}/{peer}")) for peer in range(1, processes())]
        labels = [label, *(part["label"] for part in received)]
        values = [value, *(part["value"] for part in received)]
        answer = {"labels": labels, "values": values if to_all else []}
        service.key_value_set_bytes(f"{prefix}/all", msgpack_serialize(answer))
        # Every process has read the values of the round before, since it has sent those of this one.
        service.key_value_delete(f"kljax/{number - 1}/")
    if len(set(labels)) > 1:
        raise RuntimeError(f"the processes are at different places of the program: {', '.join(labels)}")
    return values


def rounds_begun() -> int:
    """Returns how many exchanges this process has begun; the same number in every process that is as far."""
    return _STATE["rounds"]


def report_failure(text: str, code: int) -> None:
    """Tells the other processes that this one ends with an error and an exit code, so that none waits for it."""
    if coordination() is not None:
        coordination().key_value_set(f"{FAILED}/{process()}", json.dumps([text, code]))


def failed_process(service: Any, count: int) -> ProcessError | None:
    """Returns the error of a process that has reported a failure; None if there is none."""
    for key, report in service.key_value_dir_get(FAILED):
        text, code = json.loads(report)
        return ProcessError(f"process {key.rpartition('/')[2]} of {count} failed: {text}", code)
    return None


def _mark(error: Exception) -> Exception:
    error.raised_together = True  # type: ignore[attr-defined]
    return error


def _wait(key: str) -> bytes:
    """Waits for a value of another process, in short steps that signals can end."""
    service = coordination()
    while True:
        try:
            return service.blocking_key_value_get_bytes(key, POLL_MILLISECONDS)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
        failed = failed_process(service, processes())
        if failed is not None:
            raise failed


def _user_error(kind: str, text: str) -> Exception:
    """Makes an error of the kind that another process raised; `ProcessError` stands for kinds without a class here."""
    if kind in READING:
        return READING[kind](text)
    waiting: list[type[UserError]] = [UserError]
    for known in waiting:
        waiting += known.__subclasses__()
        if known.__name__ == kind and known.__init__ is UserError.__init__:
            return known(text)
    return ProcessError(f"{text} ({kind})")


def short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:197]}..."
