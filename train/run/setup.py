"""What a run starts from: the model, the base weights and the first state."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optax
from jax.sharding import Mesh

from train.config.checks.layout import divisions
from train.config.errors import UserError
from train.config.schema import Config
from train.data.prompts import Supervised
from train.data.tokenizers import Tokenizer
from train.models import Decoder, DecoderConfig, LoraConfig, Rope
from train.models.int8 import quantise_params
from train.models.sharding import make_mesh, replicated
from train.references import check_base, locate
from train.rl.keys import purpose_key
from train.rl.objective import make_controller
from train.rl.policy import abstract_params, init_adapter, init_params, init_value_head
from train.rl.state import TrainState, initial_state
from train.rollouts.lag import first_past
from train.run.directory import RunDirectory
from train.run.metrics import MetricsWriter
from train.run.report import Start
from train.run.setting import Setting
from train.run.warm_start import warm_start
from train.weights.base import has_record, record_folder, recorded_base
from train.weights.checkpoint import restore_base, save_base
from train.weights.huggingface import check_folder, load_params
from train.weights.huggingface.config import decoder_config
from train.weights.peft import check_adapter, load_adapter

Tree = Any


def make_model(config: Config, tokenizer: Tokenizer) -> Decoder:
    """The decoder that the config describes: of `model.path`, or with the vocabulary of the tokenizer.

    Raises:
      UserError: `config.json` of the folder is missing, is not understood, or does not fit tokenizer, mesh or lora.
    """
    section = config.model
    lora = None if config.lora is None else LoraConfig(**config.lora.model_dump(exclude={"path"}))
    how = section.model_dump(include={"dtype", "param_dtype", "attention", "remat", "quantization"})
    if section.path is None:
        shape = section.shape()
        rope = Rope(shape.pop("rope_theta"))
        return Decoder(DecoderConfig(vocab_size=tokenizer.vocab_size, rope=rope, lora=lora, **shape, **how))
    with _named(f"model.path {section.path}"):
        found = decoder_config(section.path, lora=lora, **how)
    lines = [f"{name}: {line}" for name, line in divisions(dataclasses.asdict(found), config.mesh)]
    if tokenizer.vocab_size > found.vocab_size:
        lines.append(f"vocab_size: got {found.vocab_size}, but the tokenizer has {tokenizer.vocab_size} tokens")
    if lines:
        raise UserError(f"model.path {section.path}: {'; '.join(lines)}")
    return Decoder(found)


def config_mesh(config: Config) -> Mesh:
    """The mesh of the config; raises `UserError` if this machine has too few devices."""
    try:
        return make_mesh(**config.mesh.model_dump())
    except ValueError as error:
        raise UserError(str(error)) from error


def restored_base(directory: RunDirectory, model: Decoder, mesh: Mesh) -> Tree:
    """The base of a run that is continued: as it was saved, or from the folder that the run began with."""
    if has_record(directory.root):
        return recorded_base(directory.root, model, mesh)
    return _restored(directory.base, model, mesh, "base")


def before_quantisation(model: Decoder) -> Decoder:
    """The decoder whose weights are trained, saved and read: the very model where it quantises nothing."""
    return Decoder(dataclasses.replace(model.config, quantization=None))


def _held(model: Decoder, params: Tree) -> Tree:
    """Weights as the model holds them; what is given is used up where that is another type."""
    return params if model.config.quantization is None else quantise_params(params)


def _restored(path: Path, model: Decoder, mesh: Mesh, field: str, *, item: str | None = None) -> Tree:
    """Weights that orbax saved, which are those before quantisation."""
    saved = restore_base(path, abstract_params(before_quantisation(model), mesh), field, item=item)
    return _held(model, saved)


def has_base(directory: RunDirectory) -> bool:
    """Whether the base of a run is complete, so that it can be continued."""
    return directory.base.is_dir() or has_record(directory.root)


def check_start(config: Config, model: Decoder) -> None:
    """Raises `UserError`, from metadata alone, if weights that the config starts from are not there, or do not fit."""
    if config.model.path is not None and config.warm_start.checkpoint is None:
        with _named("model.path"):
            check_folder(config.model.path, model)
    if config.lora is not None and config.lora.path is not None:
        with _named("lora.path"):
            check_adapter(config.lora.path, model)
            check_base(config, config.lora.path, "lora.path")


def saved_base(config: Config, model: Decoder, mesh: Mesh) -> Tree | None:
    """The weights that the config starts from, as the model holds them, if they are saved ones and not newly drawn."""
    if config.warm_start.checkpoint is not None:
        path, item = locate(config.warm_start.checkpoint, "params")
        return _restored(path, model, mesh, "warm_start.checkpoint", item=item)
    if config.model.path is not None:
        with _named("model.path"):
            return load_params(config.model.path, model, mesh)
    return None


def first_adapter(config: Config, model: Decoder, mesh: Mesh) -> Tree:
    """The adapter that a config with LoRA starts from: that of `lora.path`, or a new one that changes nothing yet."""
    if config.lora is None or config.lora.path is None:
        return init_adapter(model, purpose_key(config.seed, "adapter"), mesh)
    with _named("lora.path"):
        return load_adapter(config.lora.path, model, mesh)


@contextmanager
def _named(field: str) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, ValueError) as error:
        raise UserError(f"{field}: {error}") from error


def new_base(setting: Setting, directory: RunDirectory, *, bars: Start, writer: MetricsWriter) -> Tree:
    """The base of a new run: saved weights, or newly drawn ones, after the warm start. Saved once it is complete.

    Those of a folder of Hugging Face that are not trained first are not copied: the run remembers where they are. What
    is saved is what the weights were before they were quantised.
    """
    config, mesh, section = setting.config, setting.mesh, setting.config.warm_start
    if config.model.path is not None and section.checkpoint is None and not section.trains():
        params = saved_base(config, setting.model, mesh)
        record_folder(directory.root, config.model.path)
        return params
    model = before_quantisation(setting.model)
    params = saved_base(config, model, mesh)
    if params is None:
        params = init_params(model, purpose_key(config.seed, "params"), mesh)
    if section.trains():
        params = _imitated(dataclasses.replace(setting, model=model), params, bars=bars, writer=writer)
    save_base(directory.base, params)
    return _held(setting.model, params)


def _imitated(setting: Setting, params: Tree, *, bars: Start, writer: MetricsWriter) -> Tree:
    """The weights after the warm start on the solutions of the task."""
    config, section = setting.config, setting.config.warm_start
    data = Supervised(
        setting.prompts.examples,
        setting.tokenizer,
        prompt_length=config.data.max_prompt_length,
        completion_length=config.data.max_completion_length,
        batch_size=section.batch_size,
        seed=config.seed,
    )
    advance = bars("warm start", section.steps, 0)

    def report(step: int, values: dict[str, float]) -> None:
        writer.write("warm_start", step, values)
        advance(f"loss {values['loss']:.3f}")

    return warm_start(setting, params, data, report)


def first_state(
    config: Config, model: Decoder, mesh: Mesh, base: Tree, optimizer: optax.GradientTransformation
) -> TrainState:
    """The state before RL. Without LoRA the base weights become the trainable ones; with it they stay what they are."""
    trainable: dict[str, Tree] = {"params": base}
    if config.lora is not None:
        trainable = {"adapter": first_adapter(config, model, mesh)}
    if config.has_value_head():
        trainable["value_head"] = init_value_head(model, purpose_key(config.seed, "value_head"), mesh)
    state = initial_state(trainable, optimizer, make_controller(config), replicated(mesh))
    return dataclasses.replace(state, past=first_past(trainable, config.rollout.policy_lag))
