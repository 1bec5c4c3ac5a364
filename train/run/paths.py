"""Where the files of a run lie."""

from pathlib import Path

from train.config.storage import COMMIT_FILE, is_address


class RunPaths:
    """Paths below `root`, the directory `<output>/<name>` of a run.

    Attributes:
      base: the weights before RL; `base_record` stands for a base that is a folder.
      damaged: checkpoints that could not be read.
      reference: the record of the references of the run.
      inputs: the digests of the files that the config names.
      nonfinite: the batches of skipped updates.
      rollouts: recorded rollouts with the values of every token, a file a step.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = root / "config.yaml"
        self.base = root / "base"
        self.base_record = root / "base.json"
        self.damaged = root / "damaged"
        self.checkpoints = root / "checkpoints"
        self.reference = root / "reference.json"
        self.inputs = root / "inputs.json"
        self.metrics = root / "metrics.jsonl"
        self.nonfinite = root / "nonfinite"
        self.rollouts = root / "rollouts"
        self.summary = root / "summary.json"

    def steps(self) -> list[int]:
        """Lists the steps that have a checkpoint, in order, without opening any."""
        steps = (
            [path.parent for path in self.checkpoints.glob(f"*/{COMMIT_FILE}")]
            if is_address(self.root)
            else self.checkpoints.glob("*")
        )
        return sorted(int(path.name) for path in steps if path.name.isdigit())

    def has_base(self) -> bool:
        """Whether the weights before RL are saved here, as a whole."""
        return (self.base / COMMIT_FILE).is_file() if is_address(self.root) else self.base.is_dir()
