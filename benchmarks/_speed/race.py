"""Runs the contenders against each other: agreement first, then time in interleaved rounds, then memory."""

import contextlib
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import numpy as np

from benchmarks._sides import ROOT, Remote
from benchmarks._speed import environments
from benchmarks._speed.work import Work, make_sequences, save

# The contender that `--against` adds: kljax as another checkout of this repository has it.
OTHER = "other"
TITLES = {
    "kljax": "kljax",
    OTHER: "kljax of the other checkout",
    "tunix": "Tunix",
    "transformers": "transformers `generate`",
}
# Of log-probs, in nats: rounding of float32 through the layers leaves 1e-5.
TOLERANCE = 1e-3
# Of what one update changes, relative: AdamW's first step is the sign of a gradient, also of one that is rounding.
LEARNED_TOLERANCE = 0.05
# Fresh processes of each checkout that compile.
STARTS = 3
NOTHING: Mapping[str, str] = MappingProxyType({})
# What glibc's malloc keeps of freed buffers for the next ones is resident: a second run would seem to need none. Where
# each buffer is mapped by itself, what is resident is what is held; it costs time, so that no clock runs then.
RETURNED_AT_ONCE: Mapping[str, str] = MappingProxyType(
    {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
)


@dataclasses.dataclass
class Result:
    """What is known of a contender.

    Attributes:
      name: a key of `TITLES`.
      problem: why nothing more is known, or None.
      failed: whether that is an error, and not what was to be expected.
      seconds: of each round, (wall-clock, CPU), by part.
      first: seconds of the first run in fresh processes, (wall-clock, CPU), by part: it compiles.
      peaks: bytes that a part adds to the resident set.
      score: largest difference of a log-prob from kljax's, nats.
      learned: difference of the first update's effect on log-probs from kljax's on the same batch, relative.
    """

    name: str
    problem: str | None = None
    failed: bool = False
    seconds: dict[str, list[tuple[float, float]]] = dataclasses.field(default_factory=dict)
    first: dict[str, list[tuple[float, float]]] = dataclasses.field(default_factory=dict)
    peaks: dict[str, int] = dataclasses.field(default_factory=dict)
    score: float | None = None
    learned: float | None = None

    def compiling(self, part: str, cpu: bool) -> float | None:
        """Fewest seconds of the first run of a part."""
        return min((one[cpu] for one in self.first.get(part, [])), default=None)

    def best(self, part: str, cpu: bool) -> float | None:
        """Fewest seconds of a part; "all" is the sum of the parts in each round."""
        rounds = list(zip(*self.seconds.values(), strict=True)) if part == "all" else None
        if rounds is not None:
            return min((sum(one[cpu] for one in each) for each in rounds), default=None)
        return min((one[cpu] for one in self.seconds.get(part, [])), default=None)


@dataclasses.dataclass
class Measured:
    """All that is known of one size."""

    work: Work
    results: dict[str, Result]


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to measure at each size.

    Attributes:
      part: "rollout", or "step" for a rollout and the update on it.
      names: of the contenders; kljax is always one.
      envs: directory of the environments, or None.
      rounds: of the race.
      threads: of each process; 0 leaves them as they are.
      peak: whether memory is measured.
      against: another checkout of this repository that `OTHER` runs in, or None.
    """

    part: str
    names: tuple[str, ...]
    envs: pathlib.Path | None
    rounds: int = 10
    threads: int = 2
    peak: bool = True
    against: pathlib.Path | None = None


def measure(work: Work, plan: Plan) -> tuple[Measured, dict[str, str]]:
    """Everything about one size, and the versions of the libraries."""
    results = {name: Result(name) for name in plan.names}
    versions: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        directory = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        save(work, directory)
        sides: dict[str, Remote] = {}
        for name, result in results.items():
            with _noted(result):
                sides[name] = stack.enter_context(process(name, work, directory, plan))
                found = sides[name].ask(do="versions")
                versions |= {f"{key} (other)": value for key, value in found.items()} if name == OTHER else found
                _log(f"{name}: compares log-probs")
                sides[name].ask(do="score", path=str(directory / f"{name}.npy"))
                result.score = _apart(directory, name)
        if plan.part == "step":
            _learn(results, sides, work, directory)
        _race(results, sides, plan)
        if plan.against is not None:
            _log("compares the time to compile")
            _compile(results, work, directory, plan)
        for name, result in _possible(results) if plan.peak else ():
            with _noted(result), process(name, work, directory, plan, RETURNED_AT_ONCE) as side:
                _log(f"{name}: measures memory")
                side.ask(do="run", part=plan.part)
                result.peaks = side.ask(do="peak", part=plan.part)
    return Measured(work, results), versions


@contextlib.contextmanager
def process(
    name: str, work: Work, directory: pathlib.Path, plan: Plan, settings: Mapping[str, str] = NOTHING
) -> Iterator[Remote]:
    """A process of a contender that has loaded the weights of the directory; ended on the way out.

    Args:
      settings: environment variables.
    """
    python, root = pathlib.Path(sys.executable), ROOT
    if name == OTHER:
        assert plan.against is not None
        root = plan.against.absolute()
    elif name != "kljax":
        why = environments.why_not(plan.envs, name)
        if why is not None:
            raise MissingError(why)
        assert plan.envs is not None
        python = environments.interpreter(plan.envs, name)
    # The first run has to compile, whatever a cache of compiled programs holds.
    fixed = {"PYTHONDONTWRITEBYTECODE": "1", "JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    environment = {**os.environ, **fixed, **settings}
    command = [str(python), "-m", "benchmarks._speed.worker", "kljax" if name == OTHER else name]
    _log(f"{name}: starts")
    with subprocess.Popen(
        command, cwd=root, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as running:
        remote = Remote(running)
        try:
            remote.ask(do="load", work=dataclasses.asdict(work), directory=str(directory), threads=plan.threads)
            yield remote
        finally:
            assert running.stdin is not None
            running.stdin.close()


class MissingError(RuntimeError):
    """An environment that was not made: a row that says so, and no error of the command."""


def errors(measured: Measured) -> list[str]:
    """What went wrong, a line each."""
    found = [f"{one.name}: {one.problem}" for one in measured.results.values() if one.failed]
    for one in measured.results.values():
        if one.score is not None and not one.score <= TOLERANCE:
            found.append(f"{one.name}: log-probs differ from kljax's by {one.score:.1e}, allowed are {TOLERANCE:.0e}")
        if one.learned is not None and not one.learned <= LEARNED_TOLERANCE:
            found.append(f"{one.name}: its update differs from kljax's by {one.learned:.1%} of its effect")
    return found


def _apart(directory: pathlib.Path, name: str) -> float:
    found, ours = (np.load(directory / f"{one}.npy") for one in (name, "kljax"))
    return float(np.max(np.abs(found - ours)))


def _learn(results: dict[str, Result], sides: dict[str, Remote], work: Work, directory: pathlib.Path) -> None:
    """Compares the first update of another trainer with that of kljax on the same batch."""
    for name, result in _possible(results):
        if name == "kljax":
            continue
        path = directory / f"{name}.npz"
        with _noted(result):
            _log(f"{name}: compares one update")
            if name == OTHER:
                _learn_fixed_batch(sides[name], work, path)
            else:
                sides[name].ask(do="learn", path=str(path))
            sides["kljax"].ask(do="learn", path=str(path))
            before = np.load(directory / "kljax.npy")
            with np.load(path) as file:
                theirs, ours = file["score"] - before, file["ours"] - before
            result.learned = float(np.linalg.norm(theirs - ours) / np.linalg.norm(ours))


def _learn_fixed_batch(side: Remote, work: Work, path: pathlib.Path) -> None:
    """Makes the first update of kljax on a batch that is the same in every checkout."""
    tokens, advantages = make_sequences(work), np.resize(np.array([1, -1], np.float32), work.rows)
    np.savez(path, tokens=tokens, advantages=advantages, score=np.zeros(()))
    side.ask(do="learn", path=str(path))
    with np.load(path) as file:
        learned = file["ours"]
    np.savez(path, tokens=tokens, advantages=advantages, score=learned)


def _compile(results: dict[str, Result], work: Work, directory: pathlib.Path, plan: Plan) -> None:
    """Times the first run, which compiles, in fresh processes of both checkouts; the fastest start counts."""
    for index in range(STARTS):
        for name in ("kljax", OTHER)[:: 1 if index % 2 else -1]:
            with _noted(results[name]), process(name, work, directory, plan) as side:
                for part, seconds in side.ask(do="run", part=plan.part).items():
                    results[name].first.setdefault(part, []).append(tuple(seconds))


def _race(results: dict[str, Result], sides: dict[str, Remote], plan: Plan) -> None:
    """Runs every contender once a round, each round from another one on; the first runs compile and do not count."""
    for index in range(plan.rounds + 1):
        names = [name for name, _ in _possible(results)]
        start = index % max(len(names), 1)
        for name in names[start:] + names[:start]:
            with _noted(results[name]):
                seconds = sides[name].ask(do="run", part=plan.part)
                if index:
                    for part, one in seconds.items():
                        results[name].seconds.setdefault(part, []).append(tuple(one))
        _log(f"round {index} of {plan.rounds}")


def _possible(results: dict[str, Result]) -> list[tuple[str, Result]]:
    return [(name, result) for name, result in results.items() if result.problem is None]


@contextlib.contextmanager
def _noted(result: Result) -> Iterator[None]:
    """A contender that fails is a row that says so; the others go on."""
    try:
        yield
    except Exception as error:
        result.problem = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        result.failed = not isinstance(error, MissingError)
        if not result.failed:
            result.problem = str(error)
        _log(f"{result.name}: {result.problem}")


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def as_json(measured: Measured) -> dict[str, object]:
    """Plain data, the single rounds included."""
    return json.loads(json.dumps({"work": dataclasses.asdict(measured.work), "results": [
        dataclasses.asdict(one) for one in measured.results.values()
    ]}))  # fmt: skip
