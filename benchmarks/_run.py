"""Measures one size: agreement first, then memory, then time, all contenders in the same rounds."""

import contextlib
import dataclasses
import pathlib
import sys
from collections.abc import Iterable, Iterator, Mapping

from benchmarks import _rates, _torch_env
from benchmarks._inputs import Options, Size, make_inputs
from benchmarks._jax_contenders import Contenders
from benchmarks._measure import save_outputs
from benchmarks._results import Measured, Rates, Result
from benchmarks._rows import choose_rows
from benchmarks._sides import Local, RemoteError, Side, worker


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to measure at each size.

    Attributes:
      options: shared with the other processes.
      rounds: of the race; 0 leaves it out.
      names: of the contenders, or None for all.
      torch_env: directory of PyTorch's environment, or None.
      peak: whether peak memory is measured, in a fresh process for each contender.
    """

    options: Options
    rounds: int
    names: tuple[str, ...] | None = None
    torch_env: pathlib.Path | None = None
    peak: bool = True


def measure(size: Size, plan: Plan, scratch: pathlib.Path) -> tuple[Measured, dict[str, str]]:
    """Everything about one size, and the versions of the libraries; the directory is for arrays."""
    results = {row.name: Result(row) for row in choose_rows(plan.options.device, plan.names)}
    _log(f"{size}: makes the inputs")
    inputs = make_inputs(size)
    inputs.save(scratch)
    local = Local(Contenders(inputs, plan.options))
    with contextlib.ExitStack() as stack:
        sides, versions = _sides(local, plan, scratch, results, stack)
        _agree(local, sides, scratch, results)
        _memory(local, plan, scratch, results)
        rates = _race(local, sides, plan.rounds, size, results) if plan.rounds else None
    return Measured(size, results, rates), versions


def _sides(
    local: Local, plan: Plan, scratch: pathlib.Path, results: Mapping[str, Result], stack: contextlib.ExitStack
) -> tuple[dict[str, Side], dict[str, str]]:
    """The processes by framework. The rows of one that cannot be had say why."""
    sides: dict[str, Side] = {"jax": local}
    versions = local.contenders.versions()
    theirs = [result for result in results.values() if result.row.framework == "torch"]
    why = _torch_env.why_not(plan.torch_env)
    if theirs and why is None:
        _log("starts PyTorch's process")
        try:
            remote = stack.enter_context(worker("torch", scratch, plan.options, plan.torch_env))
            versions |= remote.ask(do="versions")
            sides["torch"] = remote
        except RemoteError as error:
            why = str(error)
            for result in theirs:
                result.failed = True
    for result in theirs:
        result.problem = why
    return sides, versions


def _agree(local: Local, sides: Mapping[str, Side], scratch: pathlib.Path, results: Mapping[str, Result]) -> None:
    """Compares every row with its baseline, whose outputs are kept in the directory."""
    for name in {result.row.baseline: None for result in results.values()}:
        _log(f"keeps the outputs of {name}")
        with _noted(results[name]):
            save_outputs(local.contenders, name, scratch)
    for name, result in _possible(results):
        if results[result.row.baseline].problem is None:
            _log(f"compares {name}")
            with _noted(result):
                side = sides[result.row.framework]
                result.agreement = side.compare(name, scratch, result.row.baseline)


def _memory(local: Local, plan: Plan, scratch: pathlib.Path, results: Mapping[str, Result]) -> None:
    """Temporary memory by the compiler, and peak memory of a fresh process."""
    for name, result in _possible(results):
        if result.row.framework == "jax":
            result.temp_bytes = local.contenders.temp_bytes(name)
        if plan.peak:
            _log(f"measures the memory of {name}")
            with _noted(result), worker(result.row.framework, scratch, plan.options, plan.torch_env) as fresh:
                result.peak_bytes = fresh.ask(do="peak", name=name)


def _race(local: Local, sides: Mapping[str, Side], rounds: int, size: Size, results: Mapping[str, Result]) -> Rates:
    """Times everything once a round, each round from another start on, so that no row always follows the same one."""
    rates: dict[str, list[float]] = {name: [] for name in _rates.RATES}
    for name in rates:
        local.time(name)  # compiles
    for index in range(rounds):
        _log(f"round {index + 1} of {rounds}")
        names = [*rates, *(name for name, _ in _possible(results))]
        start = index * len(names) // rounds
        for name in names[start:] + names[:start]:
            if name in rates:
                rates[name].append(local.time(name)[0])
                continue
            with _noted(results[name]):
                wall, cpu = sides[results[name].row.framework].time(name)
                results[name].wall.append(wall)
                results[name].cpu.append(cpu)
    return _rates_of(local.contenders, size, {name: min(times) for name, times in rates.items()}, results.get("tile"))


def _rates_of(contenders: Contenders, size: Size, seconds: Mapping[str, float], tile_result: Result | None) -> Rates:
    """Operations and bytes per second, of the machine and of kljax."""
    tile = _rates.tile_of(size, contenders.options, contenders.device.device_kind)
    flops = _rates.matmul_flops(size, tile)
    ours = None if tile_result is None else tile_result.best_wall
    itemsize = 2 if contenders.options.dtype == "bf16" else 4
    return Rates(
        tile=tile,
        matmuls={name: flops / seconds[name] for name in _rates.MATMULS},
        mixed=_rates.matmul_rate(flops, seconds),
        reached=None if ours is None else 4 * size.flops / ours,
        copied=_rates.copy_bytes(size) / seconds["copy"],
        moved=None if ours is None else _rates.traffic(size, tile, itemsize) / ours,
    )


def _possible(results: Mapping[str, Result]) -> Iterable[tuple[str, Result]]:
    """The rows that nothing has happened to."""
    return [(name, result) for name, result in results.items() if result.problem is None]


@contextlib.contextmanager
def _noted(result: Result) -> Iterator[None]:
    """A contender that fails, out of memory for one, is a row that says so; the others go on."""
    try:
        yield
    except Exception as error:
        result.problem = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        result.failed = True
        _log(f"{result.row.name}: {result.problem}")


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
