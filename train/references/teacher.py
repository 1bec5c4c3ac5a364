"""The decoder of a saved reference: that of the policy, or one of another shape and the same vocabulary."""

import dataclasses
import hashlib
from pathlib import Path

from train.config import parse
from train.config.schema import Config
from train.config.yaml_text import parse_yaml
from train.data.tokenizers import load_tokenizer
from train.models import Decoder
from train.references.found import Form, run_of
from train.run.console import warn
from train.weights.huggingface.config import decoder_config
from train.weights.peft import base_model

TOKENIZER = "tokenizer.json"
# How a run holds its base, which its config allows with an adapter alone.
HELD = ("param_dtype", "quantization")


def teacher_model(form: Form, path: Path, policy: Decoder) -> Decoder:
    """The decoder of whole weights: of `config.json`, or of the run that saved them, else the policy's.

    It has no adapter and computes in the type that the policy computes in. That is what a folder's weights are held in
    as well: they are never updated, and would be rounded to it where they are used. They are never quantised.
    """
    dtype = policy.config.dtype
    if form == "folder":
        return Decoder(decoder_config(path, dtype=dtype, param_dtype=dtype))
    run, held = run_of(path), policy.config.param_dtype
    if run is not None:
        # The module builds the decoder of a run and looks for saved weights, which this package finds.
        from train.run.setup import make_model

        # Of its config no more than the decoder: files that it names elsewhere may be gone.
        raw, _ = parse_yaml((run / "config.yaml").read_text(encoding="utf-8"))
        section = raw.get("model", {})
        shape = {key: section[key] for key in section if key not in HELD} if isinstance(section, dict) else section
        config, _ = parse({"steps": 1, "model": shape})
        policy = make_model(config, load_tokenizer(config))
    return Decoder(dataclasses.replace(policy.config, lora=None, dtype=dtype, param_dtype=held, quantization=None))


def check_vocabulary(config: Config, path: Path, teacher: Decoder, policy: Decoder) -> None:
    """Raises ValueError unless both decoders give probabilities of the same tokens, whose heads end alike."""
    got, expected = teacher.config.vocab_size, policy.config.vocab_size
    if got != expected:
        raise ValueError(
            f"{path} has a vocabulary of {got} tokens, expected {expected} as the policy has: a KL compares the "
            "probabilities of the same tokens"
        )
    folder = config.model.path
    theirs, ours = path / TOKENIZER, Path(folder or "") / TOKENIZER
    if folder is not None and theirs.is_file() and ours.is_file() and _digest(theirs) != _digest(ours):
        raise ValueError(
            f"{theirs} differs from {ours}: the tokens of this reference are not those of the policy; expected the "
            "same file (if only its formatting differs, copy one over the other)"
        )
    cap, own = teacher.config.final_softcap, policy.config.final_softcap
    if cap != own and (config.exact_loss() or config.exact_reward()):
        raise ValueError(
            f"{path} caps its logits at {cap}, the policy at {own}; the exact KL has one cap for both (estimators from "
            "drawn tokens, such as k3, have not)"
        )


def check_base(config: Config, path: str | Path, field: str) -> None:
    """Warns if the PEFT folder that `field` of the config says names another base model than it will be attached to.

    Names alone are compared, by their last part: hubs and folders call the same weights differently. Shapes that do
    not fit are an error of their own.
    """
    named, folder = base_model(path), config.model.path
    if named is None or (folder is not None and _last(named) == _last(folder)):
        return
    ours = "a base that is no Hugging Face folder" if folder is None else folder
    warn(f"{field}: the adapter {path} says that it was trained on {named}; it will be attached to {ours}")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _last(name: str) -> str:
    return Path(name).name.casefold()
