"""Where the files of a run lie; the supervisor looks here too, without JAX."""

import dataclasses
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class RunPaths:
    """Paths below `<output>/<name>`."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def base(self) -> Path:
        """The weights before RL."""
        return self.root / "base"

    @property
    def base_record(self) -> Path:
        """The record of a base that is a folder."""
        return self.root / "base.json"

    @property
    def damaged(self) -> Path:
        """Checkpoints that could not be read."""
        return self.root / "damaged"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def reference(self) -> Path:
        """The record of the references of the run."""
        return self.root / "reference.json"

    @property
    def inputs(self) -> Path:
        """The digests of the files that the config names."""
        return self.root / "inputs.json"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def nonfinite(self) -> Path:
        """The batches of skipped updates."""
        return self.root / "nonfinite"

    @property
    def rollouts(self) -> Path:
        """Recorded rollouts with the values of every token, a file a step."""
        return self.root / "rollouts"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    def steps(self) -> list[int]:
        """Lists the steps that have a checkpoint, in order, without opening any."""
        return sorted(int(path.name) for path in self.checkpoints.glob("*") if path.name.isdigit())
