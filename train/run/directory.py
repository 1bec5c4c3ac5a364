"""The directory of one run, and the rules for starting and resuming it. Files of other runs are never overwritten."""

import itertools
import secrets
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, chdir, contextmanager
from pathlib import Path
from typing import Any

from train.config.errors import UserError
from train.config.json_text import flat
from train.config.load import dump_yaml, load
from train.config.rollout import OpenAISourceSection
from train.config.schema import Config
from train.config.types import RematSetting
from train.distributed.exchange import on_leader, run_together
from train.run.inputs import check_inputs, write_inputs
from train.run.lock import claim, locked
from train.run.metrics import read_metrics
from train.run.paths import RunPaths
from train.storage.paths import as_path
from train.weights.files import check_sealed_text, write_sealed_text

ID_LINE = "# id of the run: "
CONFIG_HINT = "restore it from a copy, or delete its first line if the change is wanted"

SAMPLER = ("type", "model", "sync", "in_flight")
"""Fields of a server that say with which weights tokens are drawn."""
SERVER = tuple(name for name in OpenAISourceSection.model_fields if name not in SAMPLER)
ENDPOINT = ("host", "port", "reward_key_env", "reward_key_file")
PAD_FIELD = "model.freeze_pad_embedding"
# Fields that may differ when a run is resumed. None of them changes an update, except the reference and the
# guard, which a user switches on purpose: to a later step of the run, for example. A server may have moved, and the
# devices may be others, which changes how numbers round.
MAY_CHANGE = (
    "steps",
    "output",
    "eval",
    "checkpoint",
    "reference",
    "guard",
    "report",
    "mesh",
    "compile_cache",
    "model.remat",
    "xla_flags",
    "profile",
    "log",
    "optim.host_memory",
    "rewards.workers",
    "rewards.timeout",
    "rollout.record",
    "rollout.mesh",
    "rollout.in_place",
    "rollout.source.max_reference_mib",
    *(f"rollout.source.{name}" for name in (*SERVER, *ENDPOINT)),
)


class RunDirectory(RunPaths):
    """The directory of a run, `<output>/<name>`, with its checks."""

    @classmethod
    def of(cls, config: Config) -> "RunDirectory":
        """Returns the directory of the run of this name, whether or not it exists."""
        return cls(as_path(config.output, "output").absolute() / config.name)

    @property
    def run_id(self) -> str | None:
        """The id that ties base and checkpoints to the run; None for a run of version 0.2."""
        with self.config.open(encoding="utf-8", errors="replace") as file:
            lines = [line.rstrip("\n") for line in itertools.islice(file, 2)]
        return next((line.removeprefix(ID_LINE) for line in lines if line.startswith(ID_LINE)), None)

    @property
    def identity(self) -> dict[str, str]:
        """The id as a value to save beside arrays; empty for a run without one."""
        return {} if self.run_id is None else {"run": self.run_id}

    def check_origin(self, path: Path, saved: Mapping[str, Any]) -> None:
        """Raises `UserError` if the values saved beside a base are not of this run."""
        if self.identity and saved.get("run") != self.run_id:
            raise UserError(
                f"{path} is of another run: its id is {saved.get('run')}, that of {self.root} {self.run_id}; move it "
                "away, and restore that of this run from a copy"
            )

    def write_config(self, config: Config, run_id: str | None) -> None:
        """Writes the config, sealed, with the id of the run."""
        line = "" if run_id is None else f"{ID_LINE}{run_id}\n"
        write_sealed_text(self.config, line + dump_yaml(config))

    def check_config(self) -> None:
        """Raises `UserError` if the config is not the one that the run wrote."""
        check_sealed_text(self.config, CONFIG_HINT)

    def check_base(self) -> None:
        """Raises `UserError` if RL has begun, but the base is gone."""
        begun = [path.name for path in (self.reference, self.summary, self.damaged) if path.exists()]
        begun += [f"{self.checkpoints.name}/{step}" for step in self.steps()]
        if begun and not self.has_base() and not self.base_record.is_file():
            raise UserError(
                f"--resume: {self.base} is gone, although the run has {', '.join(begun)}; restore it or "
                f"{self.base_record.name} from a copy, or start a new run"
            )

    def check_files(self) -> None:
        """Raises `UserError` if something else than a file has the name of a file of the run."""
        curves = self.root / "curves.png"
        for path in (self.metrics, self.summary, self.reference, self.base_record, self.inputs, curves):
            if path.exists() and not path.is_file():
                raise UserError(f"--resume: {path} is no regular file; move it away, or restore the file from a copy")

    def check_checkpoints(self) -> None:
        """Raises `UserError` if RL has made a step, but all checkpoints are gone, also the one before RL."""
        if self.steps() or not self.metrics.is_file():
            return
        if steps := [record["step"] for record in read_metrics(self.metrics) if record["phase"] == "train"]:
            raise UserError(
                f"--resume: {self.checkpoints} has no checkpoint, although {self.metrics} has step {steps[-1]}; "
                f"restore one from a copy, move {self.metrics.name} away to begin again, or start a new run"
            )


@contextmanager
def open_run(config: Config, *, resume: bool, start: Path | None = None) -> Iterator[RunDirectory]:
    """Starts or continues a run, and holds the lock of its directory inside the block.

    Args:
      config: of the run.
      resume: whether a run goes on.
      start: the working directory when the command began; None: the one of now.

    Raises:
      UserError: as `start_run` and `resume_run`, or another process writes the run.
    """
    with ExitStack() as lock:
        # Code of the user may have left the working directory, from which the paths of the config begin.
        with chdir(start or Path.cwd()):
            if resume:
                directory = existing_run(config)
            else:
                directory = RunDirectory(as_path(on_leader("run directory", lambda: str(start_run(config).root))))
            on_leader("run directory", lambda: lock.enter_context(locked(directory.root)))
            if resume:
                on_leader("run directory", lambda: str(resume_run(config).root))
        run_together("run directory", lambda: _check_shared(directory))
        yield directory


def _check_shared(directory: RunDirectory) -> None:
    """Raises `UserError` unless this process sees the files of the leader."""
    if not directory.config.is_file():
        raise UserError(
            f"output: {directory.root.absolute()} is not there, although process 0 made it; let output name a "
            "directory that all processes see"
        )


def start_run(config: Config) -> RunDirectory:
    """Makes the directory `<output>/<name>`, or `<name>-2`, `<name>-3`, ... if that name is taken.

    Two processes that start at one moment get two names. The config is written with the name of the directory, so that
    `--resume` finds it.

    Raises:
      UserError: the directory cannot be made.
    """
    first = RunDirectory.of(config).root
    root = first
    number = 2
    try:
        while not claim(root):
            root = first.with_name(f"{config.name}-{number}")
            number = number + 1
        run = RunDirectory(root)
        run.write_config(config.model_copy(update={"name": root.name}), secrets.token_hex(8))
        write_inputs(run.inputs, config)
    except OSError as error:
        raise UserError(f"output: cannot create {root}: {error.strerror}") from error
    return run


def existing_run(config: Config) -> RunDirectory:
    """Returns the directory of the run that `--resume` continues; raises `UserError` if there is no such run."""
    run = RunDirectory.of(config)
    if run.config.is_file():
        return run
    if run.steps():
        raise UserError(f"--resume: {run.config} is gone, although the run has checkpoints; restore it from a copy")
    raise UserError(f"--resume: there is no run at {run.root}; leave the flag out to start one")


def resume_run(config: Config) -> RunDirectory:
    """Opens the directory of the run that `--resume` continues.

    Raises:
      UserError: there is no such run; a file of it is something else, its config was changed, its base or all
        its checkpoints are gone; or the config differs in fields that change the result, or the files that they name
        do, each of which the message names.
    """
    run = existing_run(config)
    run.check_files()
    run.check_config()
    run.check_base()
    run.check_checkpoints()
    before = _compared_fields(load(run.config).config)
    now = _compared_fields(config)
    differing = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    wrong = [key for key in differing if not any(f"{key}.".startswith(f"{free}.") for free in MAY_CHANGE)]
    if wrong:
        listed = "; ".join(f"{key}: the run has {before.get(key)!r}, got {now.get(key)!r}" for key in wrong)
        raise UserError(f"--resume: the config differs from that of {run.root}: {listed}")
    check_inputs(run.inputs, config, differing=differing)
    run.write_config(config, run.run_id)
    return run


def recorded_remat(run: RunDirectory) -> RematSetting:
    """Returns `model.remat` of a run, as it was resolved when the run began.

    Raises:
      UserError: the config is not the one that the run wrote.
    """
    run.check_config()
    return load(run.config).config.model.remat


def _compared_fields(config: Config) -> dict[str, object]:
    """Lists the values that a resumed run has to keep, by dotted name."""
    fields = flat_fields(config)
    # null warns, and trains as false does.
    return {**fields, PAD_FIELD: bool(fields.get(PAD_FIELD))}


def flat_fields(config: Config) -> dict[str, object]:
    """Lists the values of a config by dotted name."""
    return flat(config.model_dump(mode="json"))
