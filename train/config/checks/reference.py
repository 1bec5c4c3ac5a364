"""The reference, and the base it starts from."""

from collections.abc import Iterator

from train.config.checks.problem import Problem, missing_path, problem
from train.config.schema import Config
from train.config.storage import is_address, small_file


def _reference(config: Config) -> Iterator[Problem]:
    reference = config.reference
    if reference.source == "adapter" and config.lora is None and not _is_peft(reference.path):
        yield problem(
            "got adapter, but the model has none; set lora.rank (and lora.alpha, lora.targets) as they were when it "
            "was saved, or name a PEFT folder, which brings them, or use reference.source base, step or checkpoint",
            "reference.source",
            "lora",
        )
    if reference.source == "step" and reference.step > config.steps:
        yield problem(
            f"got {reference.step}, but the run ends at steps {config.steps}; expected at most that",
            "reference.step",
            "steps",
        )
    if reference.monitor == "exact" and config.kl.loss.direction == "forward":
        yield problem(
            "got exact, but kl.loss.direction forward has an update compute KL(reference || policy), and it computes "
            "one direction; expected true, which measures KL(policy || reference) by k3, or kl.loss.direction=reverse",
            "reference.monitor",
            "kl.loss.direction",
        )
    if reference.source in ("adapter", "checkpoint"):
        yield from missing_path("reference.path", reference.path)


def _is_peft(path: str) -> bool:
    """As `train.weights.peft.is_peft`, which a config is checked without: it loads JAX."""
    try:
        return bool(small_file(path, "adapter_config.json").is_file())
    except Exception:
        # A store that does not answer says so when it is read.
        if not is_address(path):
            raise
        return True


def _warm_start(config: Config) -> Iterator[Problem]:
    if config.warm_start.checkpoint is not None:
        yield from missing_path("warm_start.checkpoint", config.warm_start.checkpoint)


CHECKS = (_reference, _warm_start)
