"""From `reference` of the config to a reference: found and checked from metadata, then loaded onto the mesh."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

import kljax
from train.config.errors import UserError
from train.config.schema import Config
from train.models import Decoder
from train.references.found import FORMS, Found, form_of, locate
from train.references.teacher import check_base, check_vocabulary, teacher_model
from train.rl.policy import abstract_adapter, abstract_params
from train.rl.reference import Reference
from train.weights.checkpoint import Checkpoints, check_saved
from train.weights.huggingface import check_folder, load_params
from train.weights.peft import check_adapter, load_adapter, read_peft_config

Tree = Any

# Sources that name a path: the part of a policy that lies there, and the forms it may have.
SAVED = {"adapter": "adapter", "checkpoint": "params"}
ALLOWED = {"adapter": ("peft", "orbax"), "checkpoint": ("folder", "orbax")}


def check_reference(config: Config, model: Decoder, mesh: Mesh, saved: Sequence[int]) -> None:
    """Finds what is wrong with the reference before anything starts or is written, from metadata alone.

    Args:
      saved: the steps that the run has checkpoints of; step 0 is there once RL begins.

    Raises:
      UserError: naming the field and what there is.
    """
    section = config.reference
    if not config.needs_reference():
        return
    if section.source == "step":
        check_saved(section.step, sorted({0, *saved}))
    if section.source in SAVED:
        with named("path"):
            found = find(config, model)
            if found.form == "peft":
                check_adapter(found.path, found.model)
                check_base(config, found.path, "reference.path")
            elif found.form == "folder":
                abstract_params(found.model, mesh)  # which says what of it the mesh does not divide
                check_folder(found.path, found.model)
            else:
                abstract = abstract_params if section.source == "checkpoint" else abstract_adapter
                kljax.check_tree(found.path, abstract(found.model, mesh), item=found.item)


def load_reference(
    config: Config,
    model: Decoder,
    mesh: Mesh,
    *,
    base: Tree,
    read_base: Callable[[], Tree],
    checkpoints: Checkpoints,
) -> Reference | None:
    """The reference, or None if nothing needs one; of one that follows the policy, what it starts from.

    With LoRA, `base` and `adapter` share the base arrays of the policy. Without LoRA the policy's own weights move, so
    `base` is read back from where the run saved it. A step of this run is read from its checkpoint.

    Args:
      base: the weights under the adapter of the policy, or None without one.
      read_base: reads the weights before RL from where the run has them.

    Raises:
      UserError: if what is asked for is not there or does not fit, naming the field and what there is.
    """
    section = config.reference
    if not config.needs_reference():
        return None
    with named("path" if section.source in SAVED else "source"):
        if section.source in SAVED:
            found = find(config, model)
            shared = found.model.config.lora is not None
            return _load(found, mesh, (read_base() if base is None else base) if shared else None)
        if section.source == "step":
            return Reference(model, _of_step(checkpoints.path(section.step), model, mesh, base))
        # An average starts as the policy is, whatever it is found from: nothing is read for it.
        own = base is not None or section.source == "ema"
        return Reference(model, kljax.Policy(base if own else read_base()))


def find(config: Config, model: Decoder) -> Found:
    """What lies at `reference.path`, and the decoder that runs it.

    Raises:
      FileNotFoundError, ValueError: if nothing is there, it is of another form, or of another vocabulary.
    """
    section = config.reference
    assert section.source in ("adapter", "checkpoint")
    form = form_of(Path(section.path))
    if form not in ALLOWED[section.source]:
        allowed = " or ".join(FORMS[name] for name in ALLOWED[section.source])
        other = "checkpoint" if section.source == "adapter" else "adapter"
        raise ValueError(
            f"{section.path} is {FORMS[form]}; expected {allowed} with reference.source {section.source} (or set "
            f"reference.source to {other})"
        )
    path, item = locate(section.path, SAVED[section.source])
    if form == "peft":
        # Whatever the policy's own adapter is like: this one brings its rank, its scale and its targets.
        shape = dataclasses.replace(model.config, lora=read_peft_config(path))
        return Found(form, path, None, Decoder(shape))
    if section.source == "adapter":
        return Found(form, path, item, model)
    teacher = teacher_model(form, path, model)
    check_vocabulary(config, path, teacher, model)
    return Found(form, path, item, teacher)


def pinned_steps(config: Config) -> list[int]:
    """The steps whose checkpoints the reference is read from."""
    return [config.reference.step] if config.reference.source == "step" else []


@contextmanager
def named(field: str) -> Iterator[None]:
    """Errors of what is read become errors of a field of the reference."""
    try:
        yield
    except (FileNotFoundError, ValueError) as error:
        raise UserError(f"reference.{field}: {error}") from error


def _load(found: Found, mesh: Mesh, base: Tree) -> Reference:
    """A saved reference; an adapter with the base that it belongs to."""
    if found.form == "peft":
        return Reference(found.model, kljax.Policy(base, load_adapter(found.path, found.model, mesh)))
    if found.form == "folder":
        return Reference(found.model, kljax.Policy(load_params(found.path, found.model, mesh)))
    if base is None:
        policy = kljax.checkpoint_reference(found.path, abstract_params(found.model, mesh), item=found.item)
    else:
        policy = kljax.adapter_reference(
            kljax.Policy(base), found.path, abstract_adapter(found.model, mesh), item=found.item
        )
    return Reference(found.model, policy)


def _of_step(path: Path, model: Decoder, mesh: Mesh, base: Tree) -> kljax.Policy:
    if model.config.lora is None:
        return kljax.checkpoint_reference(path, abstract_params(model, mesh), item="trainable.params")
    policy = kljax.Policy(base)
    return kljax.adapter_reference(policy, path, abstract_adapter(model, mesh), item="trainable.adapter")
