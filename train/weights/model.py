"""Construction of the decoder from a config."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from train.config.checks.layout import divisions
from train.config.errors import UserError, field_errors, warn
from train.config.schema import Config
from train.data.tokenizers import Tokenizer
from train.models import Decoder, DecoderConfig, ExpertsConfig, LayerKind, LoraConfig, Rope
from train.weights.huggingface.config import decoder_config, pad_id


def make_model(config: Config, tokenizer: Tokenizer, *, folder_config: Mapping[str, Any] | None = None) -> Decoder:
    """Builds the decoder: from `config.json` of `model.path`, or from the `model` section and the tokenizer.

    Args:
      config: the config.
      tokenizer: its tokenizer.
      folder_config: stands for the `config.json` of a folder that is not here.

    Raises:
      UserError: `config.json` is missing, is not understood, or does not fit the tokenizer, mesh or lora section.
    """
    section = config.model
    lora = None if config.lora is None else LoraConfig(**config.lora.model_dump(exclude={"path"}))
    options = section.model_dump(include={"dtype", "param_dtype", "attention", "remat", "quantization"})
    if options["remat"] == "auto":
        # Chosen by the run context, which knows the memory.
        options["remat"] = "full"
    if section.path is None:
        if section.freeze_pad_embedding:
            raise UserError(
                "model.freeze_pad_embedding: got true, but without model.path there is no config.json with a "
                "pad_token_id; set it to false"
            )
        shape = section.shape()
        rope = Rope(shape.pop("rope_theta"))
        experts = shape.pop("experts")
        if experts is not None:
            with field_errors("model"):
                shape["experts"] = ExpertsConfig(**experts.model_dump())
            shape["pattern"] = (LayerKind(mlp="experts"),)
        with field_errors("config"):
            decoder = DecoderConfig(vocab_size=tokenizer.vocab_size, rope=rope, lora=lora, **shape, **options)
        return Decoder(_with_choice_bias(decoder, config))
    with field_errors(f"model.path {section.path}"):
        decoder = decoder_config(folder_config or section.path, lora=lora, **options)
        pad = pad_id(folder_config or section.path) if section.freeze_pad_embedding else None
    if section.freeze_pad_embedding and pad is None:
        raise UserError(
            f"model.freeze_pad_embedding: got true, but {section.path}/config.json has no pad_token_id; set it to false"
        )
    decoder = dataclasses.replace(decoder, constant_embedding=pad)
    lines = [f"{name}: {line}" for name, line, _ in divisions(dataclasses.asdict(decoder), config)]
    if tokenizer.vocab_size > decoder.vocab_size:
        lines.append(f"vocab_size: got {decoder.vocab_size}, but the tokenizer has {tokenizer.vocab_size} tokens")
    if lines:
        raise UserError(f"model.path {section.path}: {'; '.join(lines)}")
    return Decoder(_with_choice_bias(decoder, config))


def _with_choice_bias(decoder: DecoderConfig, config: Config) -> DecoderConfig:
    """Gives the routers the bias that `routing.bias_update_rate` moves."""
    if decoder.experts is None or config.routing.bias_update_rate == 0:
        return decoder
    return dataclasses.replace(decoder, experts=dataclasses.replace(decoder.experts, choice_bias=True))


def make_policy_model(
    config: Config, tokenizer: Tokenizer, *, folder_config: Mapping[str, Any] | None = None
) -> Decoder:
    """Builds the decoder that a config trains, as `make_model` does.

    Raises:
      UserError: as `make_model`; or a field of `routing` trains routers that the decoder does not have, or freezes.
    """
    model = make_model(config, tokenizer, folder_config=folder_config)
    section = config.routing
    fields = {"balance_coef": "0", "z_coef": "0", "bias_update_rate": "0", "freeze": "false"}
    fields |= {"verify": "false", "threshold": "0"}
    for name, default in fields.items():
        if getattr(section, name) and model.config.experts is None:
            got = str(getattr(section, name)).lower()
            raise UserError(f"routing.{name}: got {got}, but the model has no experts; expected {default}")
    if section.freeze and config.lora is not None:
        raise UserError(
            "routing.freeze: got true, but lora trains adapters alone; set it to false, and leave gate out of "
            "lora.targets"
        )
    return Decoder(dataclasses.replace(model.config, replay_threshold=section.threshold))


def trained_pad(config: Config) -> int | None:
    """Returns the padding token of the folder if this run trains its embedding, which transformers does not.

    None where the config says by `model.freeze_pad_embedding` whether it does.
    """
    section = config.model
    if section.path is None or config.lora is not None or section.freeze_pad_embedding is not None:
        return None
    return pad_id(section.path)


def warn_of_pad(pad: int | None, count: int, total: int, rows: str) -> None:
    """Warns if some rows, such as "prompts", have the token of `trained_pad`."""
    if count:
        warn(
            f"model.path: {count} of {total} {rows} have token {pad}, the pad_token_id of config.json, whose embedding "
            "transformers does not train; for the same updates set model.freeze_pad_embedding=true, else false"
        )


def unquantized(model: Decoder) -> Decoder:
    """Returns the decoder whose weights are trained, saved and read; `model` itself if nothing is quantized."""
    return Decoder(dataclasses.replace(model.config, quantization=None))
