"""Output of a run: progress, the table before and after RL, the summary file."""

import json
import math
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from train.config.accelerator import idle_accelerator
from train.config.errors import warn
from train.config.installation import shell_command
from train.config.types import XlaFlags
from train.distributed.peers import is_leader
from train.process.xla_flags import flags_line
from train.rl.kl_metrics import KL_ESTIMATE, KL_EXACT

# Without a bar, a line follows the last one after this time at the latest, and names a phase that takes as long.
LINE_SECONDS = 20.0
PHASE_SECONDS = 5.0

# `advance(note)` counts one step; `start(label, total, done)` opens a bar and returns its `advance`.
Advance = Callable[[str], None]
# `with phase(text):` tells what a run is doing, if it takes long.
Phase = Callable[[str], AbstractContextManager[Any]]


class Start(NamedTuple):
    """How a run reports its progress: a bar with a step for each `advance`, and phases without steps."""

    bar: Callable[[str, int, int], Advance]
    phase: Phase = nullcontext

    def __call__(self, label: str, total: int, done: int) -> Advance:
        """Opens a bar of `total` steps, of which `done` are over already."""
        return self.bar(label, total, done)


# Names of rewards and paths stand as they are, also with brackets or colons.
PLAIN: Mapping[str, Any] = {"markup": False, "emoji": False, "highlight": False}

# metric, name in the table, format
ROWS = (
    ("accuracy", "held-out accuracy, sampled (%)", ".1f"),
    ("accuracy_greedy", "held-out accuracy, greedy (%)", ".1f"),
    (KL_ESTIMATE, "KL(policy || reference) (nats/token)", ".4g"),
    (KL_EXACT, "exact KL(policy || reference) (nats/token)", ".4g"),
    ("rollout_kl", "rollout KL (nats/token)", ".2e"),
)


def print_devices(console: Console, xla_flags: XlaFlags) -> None:
    """Prints the devices of all processes, the release of JAX and the flags of an accelerator's compiler.

    Warns if an accelerator of this machine is idle.
    """
    kinds = Counter(device.device_kind for device in jax.devices())
    listed = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    console.print(f"devices: {listed}; JAX {jax.__version__}")
    if (line := flags_line(xla_flags)) is not None:
        console.print(line)
    if jax.default_backend() == "cpu" and "cpu" not in os.environ.get("JAX_PLATFORMS", ""):
        warning = idle_accelerator()
        if warning is not None:
            warn(warning)


def default_console() -> Console:
    """Opens standard output, with control codes only if it is a terminal, whatever FORCE_COLOR says.

    Of several processes, the leader alone prints.
    """
    piped: dict[str, Any] = {} if sys.stdout.isatty() else {"force_terminal": False, "soft_wrap": True}
    return Console(**PLAIN, **piped, quiet=not is_leader())


def _print_line(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True)
    # A log that is read through a pipe must not lag by a buffer.
    console.file.flush()


def _start_lines(console: Console, every: int) -> Start:
    def start(label: str, total: int, done: int) -> Advance:
        count = done
        printed = time.monotonic()

        def advance(note: str) -> None:
            nonlocal count, printed
            count += 1
            if count % every == 0 or count == total or time.monotonic() - printed > LINE_SECONDS:
                _print_line(console, f"{label} {count}/{total}  {note}".rstrip())
                printed = time.monotonic()

        return advance

    @contextmanager
    def phase(text: str) -> Iterator[None]:
        timer = threading.Timer(PHASE_SECONDS, _print_line, (console, f"{text} ..."))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    return Start(start, phase)


def _start_bars(bars: Progress) -> Start:
    def start(label: str, total: int, done: int) -> Advance:
        task = bars.add_task(label, total=total, completed=done, note="")
        return lambda note: bars.update(task, advance=1, note=note)

    @contextmanager
    def phase(text: str) -> Iterator[None]:
        task = bars.add_task(text, total=None, note="")
        try:
            yield
        finally:
            bars.remove_task(task)

    return Start(start, phase)


@contextmanager
def progress(console: Console, *, every: int = 10) -> Iterator[Start]:
    """Shows progress: bars on a terminal, else a line every `every` steps, at the last one, and after 20 seconds.

    Yields:
      `start(label, total, done)`, where `done` steps are over already (a resumed run). It returns `advance(note)`:
      call it once a step; the note is shown behind the bar.
    """
    if not console.is_terminal or console.is_dumb_terminal:
        yield _start_lines(console, every)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", markup=False),
    )
    with Progress(*columns, console=console) as bars:
        yield _start_bars(bars)


def _cell(values: Mapping[str, float | None], metric: str, spec: str) -> str:
    if metric not in values:
        return "-"
    return "not finite" if values[metric] is None else format(values[metric], spec)


def print_comparison(console: Console, before: Mapping[str, float | None], after: Mapping[str, float | None]) -> None:
    """Prints accuracy and KL before and after RL; leaves out a metric that neither side has.

    Args:
      console: where to print.
      before: `accuracy` (percent), `kl_reference`, `rollout_kl` (nats per token) and others of `ROWS`, each optional.
          None stands for a number that is not finite.
      after: the same.
    """
    table = Table("", "before", "after")
    for column in table.columns[1:]:
        column.justify = "right"
    for metric, name, spec in ROWS:
        if metric in before or metric in after:
            table.add_row(name, _cell(before, metric, spec), _cell(after, metric, spec))
    if table.rows:
        console.print(table)


def print_next_commands(console: Console, root: Path, *, evaluates: bool = True) -> None:
    """Prints where a finished run lies, its picture, and commands that take it further; `evaluates`: train.eval too."""
    commands = {
        f"{shell_command(f'train.{module}')} {arguments}": purpose
        for module, arguments, purpose in (
            ("report", f"{root} --open", "curves, rollouts and tokens on one page"),
            *([("eval", f"{root}", "the policy on the held-out prompts")] if evaluates else []),
            ("export", f"{root} --to exports/{root.name}", "weights for transformers and vLLM"),
        )
    }
    width = max(map(len, commands))
    lines = [f"  {command:{width}}  # {purpose}" for command, purpose in commands.items()]
    console.print("\n".join([f"done: {root}, with curves.png", "next:", *lines]), soft_wrap=True)


def print_evaluation(console: Console, title: str, results: Mapping[str, Any], temperature: float) -> None:
    """Prints one evaluation: the mean of every reward, `accuracy` in percent first.

    Args:
      console: where to print.
      title: what was evaluated.
      results: `sampled` and `greedy`, each a mapping from names to numbers.
      temperature: the sampling temperature.
    """
    table = Table("", f"temperature {temperature:g}", "greedy", title=title, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    names = sorted(results["sampled"], key=lambda name: (name != "accuracy", name))
    for name in names:
        label, spec = ("accuracy (%)", ".2f") if name == "accuracy" else (name, ".4g")
        table.add_row(label, *(_cell(results[kind], name, spec) for kind in ("sampled", "greedy")))
    console.print(table)


def _without_nan(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nan(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def summary_text(summary: Mapping[str, Any]) -> str:
    """Returns a summary as JSON with sorted keys; NaN and infinity become null."""
    return json.dumps(_without_nan(summary), indent=2, sort_keys=True, allow_nan=False) + "\n"
