"""What lies at a path that the config names, told from the files that are there."""

import dataclasses
from pathlib import Path
from typing import Literal

from train.models import Decoder
from train.weights.checkpoint import ITEM

Form = Literal["orbax", "folder", "peft"]
FORMS = {
    "orbax": "what orbax saved",
    "folder": "a Hugging Face folder of whole weights",
    "peft": "a PEFT folder of an adapter",
}


@dataclasses.dataclass(frozen=True)
class Found:
    """A saved reference.

    Attributes:
      form: who wrote it.
      path: the directory to read.
      item: dotted path inside what orbax saved, or None for all of it.
      model: the decoder that runs it.
    """

    form: Form
    path: Path
    item: str | None
    model: Decoder


def form_of(path: Path) -> Form:
    """Who wrote a directory; what is neither PEFT's nor Hugging Face's is left to orbax to judge.

    Raises:
      FileNotFoundError: if there is no such directory.
      ValueError: for the directory of a whole run, or of its checkpoints, listing the steps there are.
    """
    if not path.is_dir():
        raise FileNotFoundError(f"no readable checkpoint at {path}: there is no such directory")
    if (path / "adapter_config.json").is_file():
        return "peft"
    if (path / "config.json").is_file() or any(path.glob("*.safetensors*")):
        return "folder"
    checkpoints = path if path.name == "checkpoints" else path / "checkpoints"
    if checkpoints.is_dir():
        steps = sorted(int(entry.name) for entry in checkpoints.iterdir() if entry.name.isdigit())
        listed = ", ".join(map(str, steps)) or "none"
        raise ValueError(f"{path} holds the checkpoints of a run; name one as {checkpoints}/STEP, of steps {listed}")
    return "orbax"


def locate(path: str, part: str) -> tuple[Path, str | None]:
    """Where `params` or `adapter` lies in a directory that orbax saved: on its own, or inside a checkpoint of a run."""
    directory = Path(path)
    if (directory / ITEM).is_dir():
        directory = directory / ITEM
    return directory, f"trainable.{part}" if directory.name == ITEM else None


def run_of(path: Path) -> Path | None:
    """The directory of the run that saved a base or a checkpoint, which holds its config; None where there is none."""
    parents = path.absolute().parents
    return next((parent for parent in parents[:3] if (parent / "config.yaml").is_file()), None)
