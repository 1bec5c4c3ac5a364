"""A Hugging Face folder as the base of a run: on record with its digest, not copied, and found unchanged later."""

import json
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from train.config.errors import UserError
from train.models import Decoder
from train.weights.files import write_text_atomic
from train.weights.huggingface import folder_digest, load_params

Tree = Any
RECORD = "base.json"


def record_folder(root: Path, folder: str | Path) -> None:
    """Writes into the run directory `root` which folder its base is, and the digest of what is in it."""
    found = {"folder": str(Path(folder).absolute()), "digest": folder_digest(folder)}
    write_text_atomic(root / RECORD, json.dumps(found, indent=2) + "\n")


def has_record(root: Path) -> bool:
    """Whether the base of the run at `root` is a folder."""
    return (root / RECORD).is_file()


def recorded_base(root: Path, model: Decoder, mesh: Mesh) -> Tree:
    """The base of the run at `root`, loaded again from its folder.

    Raises:
      UserError: the folder is gone, or is not what the run began with; its weights would be others.
    """
    record = json.loads((root / RECORD).read_text(encoding="utf-8"))
    folder = record["folder"]
    try:
        digest = folder_digest(folder)
        if digest != record["digest"]:
            raise UserError(
                f"model.path: {folder} is not what {root} began with: its digest is {digest}, that of the run "
                f"{record['digest']} ({root / RECORD}); put the weights back, or start a new run"
            )
        return load_params(folder, model, mesh)
    except (FileNotFoundError, ValueError) as error:
        raise UserError(f"model.path: {error}; {root} began with the weights in {folder}") from error
