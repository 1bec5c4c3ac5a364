"""The directory of one run, and the rules for starting and resuming it. Files of other runs are never overwritten."""

import dataclasses
from pathlib import Path

from train.config.errors import UserError
from train.config.load import dump_yaml, load
from train.config.schema import Config
from train.weights.files import write_text_atomic

# Fields that may differ when a run is resumed. None of them changes an update, except the reference and the
# guard, which a user switches on purpose: to a later step of the run, for example. A server may have moved.
SERVER = tuple(
    f"rollout.source.{name}"
    for name in (
        "url",
        "folder",
        "api_key_env",
        "api_key_file",
        "timeout",
        "max_response_bytes",
        "retries",
        "concurrency",
    )
)
MAY_CHANGE = ("steps", "output", "eval", "checkpoint", "reference", "guard", "rollout.record", *SERVER)


@dataclasses.dataclass(frozen=True)
class RunDirectory:
    """Paths below `<output>/<name>`."""

    root: Path

    @classmethod
    def of(cls, config: Config) -> "RunDirectory":
        """Returns the directory of the run of this name, whether or not it exists."""
        return cls(Path(config.output) / config.name)

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def base(self) -> Path:
        """The weights before RL."""
        return self.root / "base"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def reference(self) -> Path:
        """The record of the references of the run."""
        return self.root / "reference.json"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def nonfinite(self) -> Path:
        """The batches of skipped updates."""
        return self.root / "nonfinite"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    def steps(self) -> list[int]:
        """Lists the steps that have a checkpoint, in order, without opening any."""
        return sorted(int(path.name) for path in self.checkpoints.glob("*") if path.name.isdigit())


def start_run(config: Config) -> RunDirectory:
    """Makes the directory `<output>/<name>`, or `<name>-2`, `<name>-3`, ... if that name is taken.

    The config is written with the name of the directory, so that `--resume` finds it.
    """
    first = RunDirectory.of(config).root
    root, number = first, 2
    while root.exists() and not (root.is_dir() and not any(root.iterdir())):
        root, number = first.with_name(f"{config.name}-{number}"), number + 1
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"output: cannot create {root}: {error.strerror}") from error
    run = RunDirectory(root)
    write_text_atomic(run.config, dump_yaml(config.model_copy(update={"name": root.name})))
    return run


def resume_run(config: Config) -> RunDirectory:
    """Opens the directory of the run that `--resume` continues.

    Raises:
      UserError: there is no such run, or the config differs in fields that change the result; the message names each.
    """
    run = RunDirectory.of(config)
    if not run.config.is_file():
        raise UserError(f"--resume: there is no run at {run.root}; leave the flag out to start one")
    before, now = (_flat(c.model_dump(mode="json")) for c in (load(run.config).config, config))
    differing = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    wrong = [key for key in differing if not any(f"{key}.".startswith(f"{free}.") for free in MAY_CHANGE)]
    if wrong:
        listed = "; ".join(f"{key}: the run has {before.get(key)!r}, got {now.get(key)!r}" for key in wrong)
        raise UserError(f"--resume: the config differs from that of {run.root}: {listed}")
    write_text_atomic(run.config, dump_yaml(config))
    return run


def _flat(value: object, prefix: str = "") -> dict[str, object]:
    if not isinstance(value, dict):
        return {prefix: value}
    flat: dict[str, object] = {}
    for key, inner in value.items():
        flat |= _flat(inner, f"{prefix}.{key}" if prefix else key)
    return flat
