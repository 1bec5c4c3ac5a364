"""One fault that a run, a command or a reader is put through, and its outcome."""

import contextlib
import dataclasses
import io
import pathlib
import traceback
from collections.abc import Callable, Iterator, Sequence

from train.config.errors import UserError

OUTCOMES = {
    "refused": "a clear message that names what is wrong, and nothing lost",
    "repaired": "noticed and said; the rest is used, and the run goes on",
    "identical": "not needed, or put right: the results are those without the fault",
    "silent": "other results without a word",
    "traceback": "an error that is not meant for users",
    "unfinished": "the check itself did not end, or ended in an error: nothing is known",
}
BAD = ("silent", "traceback", "unfinished")


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault of one area.

    Attributes:
      area: the row of the table that it counts in.
      name: what is done.
      run: does it, in an empty directory of its own, and returns one of `OUTCOMES`.
      harmless: why another outcome than "refused" or "repaired" is right, if it is.
    """

    area: str
    name: str
    run: Callable[[pathlib.Path], str]
    harmless: str = ""

    def fails(self, outcome: str) -> bool:
        """Whether an outcome is a failure; that of an unfinished check always is."""
        return outcome in BAD and (not self.harmless or outcome == "unfinished")


@dataclasses.dataclass(frozen=True)
class Finished:
    """A command that has ended.

    Attributes:
      code: the exit code; 1 with a traceback.
      text: what it printed, on both streams.
    """

    code: int
    text: str

    @property
    def traceback(self) -> bool:
        """Whether an error came out that is not meant for users."""
        return "Traceback (most recent call last)" in self.text


def run_command(main: Callable[[Sequence[str]], int | None], *arguments: str) -> Finished:
    """Runs the `main()` of a command in this process, as the interpreter would: what it raises is its end."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            code = main(list(arguments)) or 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            if isinstance(end.code, str):
                output.write(end.code)
        except BaseException:
            traceback.print_exc(file=output)
            code = 1
    return Finished(code, output.getvalue())


def refused(finished: Finished, *words: str) -> str:
    """Returns "refused" if a command ended with code 2 and a message with all the words, and no traceback."""
    if finished.traceback:
        return "traceback"
    clear = finished.code == 2 and all(word in finished.text for word in words)
    return "refused" if clear else "silent"


def raised(call: Callable[[], object], *words: str, error: type[Exception] = UserError) -> str:
    """Returns "refused" if a call raises the error with all the words in its message."""
    try:
        call()
    except error as caught:
        return "refused" if all(word in str(caught) for word in words) else "silent"
    except Exception:
        return "traceback"
    return "silent"


def damaged(
    make: Callable[[pathlib.Path], pathlib.Path],
    check: Callable[[pathlib.Path], object],
    label: str,
    change: Callable[[pathlib.Path], object],
    *words: str,
) -> Callable[[pathlib.Path], str]:
    """Makes a fault of a folder that must be refused once it is changed.

    Args:
      make: puts the undamaged folder into a directory and returns it.
      check: reads the folder as a run does.
      label: the field that the message names.
      change: damages the folder.
      words: what the message says too.
    """

    def run(directory: pathlib.Path) -> str:
        path = make(directory)
        change(path)
        return raised(lambda: check(path), label, *words)

    return run


def count(faults: Sequence[Fault], directory: pathlib.Path) -> Iterator[tuple[Fault, str]]:
    """Runs the faults one after the other and yields the outcome of each.

    A check that times out or fails is printed and counts as "unfinished": the others still have their outcomes.
    """
    for number, fault in enumerate(faults):
        folder = directory / f"fault-{number}"
        folder.mkdir()
        try:
            outcome = fault.run(folder)
        except Exception:
            traceback.print_exc()
            outcome = "unfinished"
        yield fault, outcome
