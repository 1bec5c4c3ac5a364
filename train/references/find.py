"""Finding a saved reference: its format, where its weights lie, and the decoder that runs it."""

import dataclasses
from pathlib import Path
from typing import Literal

from train.config.errors import warn
from train.config.load import parse
from train.config.schema import Config
from train.config.storage import is_address
from train.config.yaml_text import parse_yaml
from train.data.tokenizers import load_tokenizer
from train.models import Decoder
from train.storage.paths import as_path
from train.weights.files import check_sealed_text
from train.weights.huggingface.config import decoder_config
from train.weights.model import make_model
from train.weights.orbax import ITEM
from train.weights.peft import base_model, read_peft_config

Format = Literal["orbax", "folder", "peft"]
FORMATS = {
    "orbax": "an orbax checkpoint",
    "folder": "a Hugging Face folder of whole weights",
    "peft": "a PEFT folder of an adapter",
}
# By `reference.source`: the part of a policy that `reference.path` holds, and its possible formats.
PARTS = {"adapter": "adapter", "checkpoint": "params"}
ALLOWED = {"adapter": ("peft", "orbax"), "checkpoint": ("folder", "orbax")}
TOKENIZER = "tokenizer.json"
# How a run stores its base, which a config allows with an adapter only.
STORAGE_FIELDS = ("param_dtype", "quantization")


@dataclasses.dataclass(frozen=True)
class SavedReference:
    """A reference on disk.

    Attributes:
      format: who wrote it.
      path: the directory to read.
      item: dotted path inside an orbax checkpoint, or None for all of it.
      model: the decoder that runs it.
    """

    format: Format
    path: Path
    item: str | None
    model: Decoder


def find_reference(config: Config, model: Decoder) -> SavedReference:
    """Finds the weights at `reference.path` and builds the decoder that runs them.

    Raises:
      FileNotFoundError, ValueError: nothing is there, or its format or vocabulary does not fit.
    """
    section = config.reference
    assert section.source in ("adapter", "checkpoint")
    form = format_of(as_path(section.path))
    if form not in ALLOWED[section.source]:
        allowed = " or ".join(FORMATS[name] for name in ALLOWED[section.source])
        other = "checkpoint" if section.source == "adapter" else "adapter"
        raise ValueError(
            f"{section.path} is {FORMATS[form]}; expected {allowed} with reference.source {section.source} (or set "
            f"reference.source to {other})"
        )
    path, item = locate(section.path, PARTS[section.source])
    if form == "peft":
        # The adapter brings its own rank, scale and targets, whatever the policy's are.
        shape = dataclasses.replace(model.config, lora=read_peft_config(path))
        return SavedReference(form, path, None, Decoder(shape))
    if section.source == "adapter":
        return SavedReference(form, path, item, model)
    teacher = teacher_model(form, path, model)
    check_vocabulary(config, path, teacher, model)
    return SavedReference(form, path, item, teacher)


def format_of(path: Path) -> Format:
    """Tells who wrote a directory; anything that neither PEFT nor Hugging Face wrote is taken for orbax.

    Raises:
      FileNotFoundError: there is no such directory.
      ValueError: it is the directory of a whole run, or of its checkpoints; the message lists the steps.
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
    """Locates `params` or `adapter` in an orbax directory: saved alone, or inside a checkpoint of a run."""
    directory = as_path(path)
    if (directory / ITEM).is_dir():
        directory = directory / ITEM
    return directory, f"trainable.{part}" if directory.name == ITEM else None


def run_directory_of(path: Path) -> Path | None:
    """Returns the directory of the run that saved a base or a checkpoint, or None if it lies in no run."""
    parents = list(path.absolute().parents)
    # An address has the store itself and the root above its bucket.
    parents = parents[:-2] if is_address(path) else parents
    return next((parent for parent in parents[:3] if (parent / "config.yaml").is_file()), None)


def teacher_model(form: Format, path: Path, policy: Decoder) -> Decoder:
    """Builds the decoder of whole weights: from `config.json`, or from the run that saved them, else the policy's.

    It has no adapter and computes in the policy's dtype. A folder's weights are stored in that dtype too: they are
    never updated, and would be rounded to it where they are used. They are never quantized.
    """
    dtype = policy.config.dtype
    if form == "folder":
        return Decoder(decoder_config(path, dtype=dtype, param_dtype=dtype))
    run = run_directory_of(path)
    param_dtype = policy.config.param_dtype
    if run is not None:
        # Only what makes the decoder is read: files that the rest of the config names may be gone.
        check_sealed_text(run / "config.yaml", "restore it from a copy")
        raw, _ = parse_yaml((run / "config.yaml").read_text(encoding="utf-8"))
        section = raw.get("model", {})
        if isinstance(section, dict):
            section = {key: value for key, value in section.items() if key not in STORAGE_FIELDS}
        routing = {key: value for key, value in (raw.get("routing") or {}).items() if key == "bias_update_rate"}
        config, _ = parse({"steps": 1, "model": section, "routing": routing})
        policy = make_model(config, load_tokenizer(config))
    return Decoder(
        dataclasses.replace(policy.config, lora=None, dtype=dtype, param_dtype=param_dtype, quantization=None)
    )


def check_vocabulary(config: Config, path: Path, teacher: Decoder, policy: Decoder) -> None:
    """Raises ValueError unless both decoders give probabilities of the same tokens."""
    got = teacher.config.vocab_size
    expected = policy.config.vocab_size
    if got != expected:
        raise ValueError(
            f"{path} has a vocabulary of {got} tokens, expected {expected} as the policy has: a KL compares the "
            "probabilities of the same tokens"
        )
    folder = config.model.path
    reference_file = path / TOKENIZER
    policy_file = Path(folder or "") / TOKENIZER
    if (
        folder is not None
        and reference_file.is_file()
        and policy_file.is_file()
        and reference_file.read_bytes() != policy_file.read_bytes()
    ):
        raise ValueError(
            f"{reference_file} differs from {policy_file}: the tokens of this reference are not those of the policy; "
            "expected the same file (if only its formatting differs, copy one over the other)"
        )


def warn_of_other_base(config: Config, path: str | Path, field: str) -> None:
    """Warns if the PEFT folder that `field` names was trained on another base model than it will be attached to.

    Only the last part of the names is compared: hubs and folders call the same weights differently. Shapes that do
    not fit are an error of their own.
    """
    named = base_model(path)
    folder = config.model.path
    if named is None or (folder is not None and _last_part(named) == _last_part(folder)):
        return
    base = "a base that is no Hugging Face folder" if folder is None else folder
    warn(f"{field}: the adapter {path} says that it was trained on {named}; it will be attached to {base}")


def _last_part(name: str) -> str:
    return Path(name).name.casefold()
