"""Loading the reference policy that the config names: checked from metadata first, then read onto the mesh."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

import kljax
from train.config.errors import UserError
from train.config.plan import Plan, follows_policy
from train.config.schema import Config
from train.distributed import on_leader
from train.models import Decoder
from train.references.find import PARTS, SavedReference, find_reference, warn_of_other_base
from train.references.follow import frozen_part, start_following
from train.references.record import is_recorded, record_reference, reference_fingerprint
from train.rl.policy import abstract_adapter, abstract_params
from train.rl.reference import Reference
from train.rl.state import TrainState
from train.weights.huggingface import check_folder, load_params
from train.weights.orbax import RunCheckpoints, check_saved
from train.weights.peft import check_adapter, load_adapter

Tree = Any


def check_reference(config: Config, model: Decoder, mesh: Mesh, saved: Sequence[int]) -> None:
    """Checks the reference from metadata alone, before anything starts or is written.

    Args:
      saved: the steps that the run has checkpoints of; step 0 exists once RL begins.

    Raises:
      UserError: naming the field and what there is.
    """
    section = config.reference
    if not Plan.of(config).reference:
        return
    if section.source == "step":
        check_saved(section.step, sorted({0, *saved}))
    if section.source in PARTS:
        with _field_errors("path"):
            found = find_reference(config, model)
            if found.format == "peft":
                check_adapter(found.path, found.model)
                warn_of_other_base(config, found.path, "reference.path")
            elif found.format == "folder":
                abstract_params(found.model, mesh)  # raises where the mesh does not divide a size
                check_folder(found.path, found.model)
            else:
                abstract = abstract_params if section.source == "checkpoint" else abstract_adapter
                kljax.check_tree(found.path, abstract(found.model, mesh), item=found.item)


def start_reference(
    config: Config,
    model: Decoder,
    mesh: Mesh,
    state: TrainState,
    *,
    base: Tree,
    read_base: Callable[[], Tree],
    checkpoints: RunCheckpoints,
    record: Path,
) -> tuple[Reference | None, TrainState, np.ndarray | None]:
    """Loads, or continues, the reference of a run.

    A reference that follows the policy continues from the saved state. A reference that the config names for the
    first time is loaded, and starts to follow from there.

    Args:
      base: the weights under the policy's adapter, or None without one.
      read_base: reads the weights before RL.
      record: the file where the run records its references.

    Returns:
      The reference (its frozen part, if it follows the policy), the state with the part that follows, and the
      fingerprint of the frozen part.

    Raises:
      UserError: the reference is missing, does not fit, or differs from the recorded one.
    """
    if not Plan.of(config).reference:
        return None, dataclasses.replace(state, reference=None), None
    if state.reference is not None and on_leader("references", lambda: is_recorded(record, config)):
        reference: Reference | None = frozen_part(model, base, state.trainable)
    else:
        reference = load_reference(config, model, mesh, base=base, read_base=read_base, checkpoints=checkpoints)
        following = None
        if reference is not None and follows_policy(config):
            reference, following = start_following(config, reference, state.trainable)
        state = dataclasses.replace(state, reference=following)
    fingerprint = reference_fingerprint(reference)
    step = int(state.step)
    on_leader("references", lambda: record_reference(record, config, fingerprint, step))
    return reference, state, fingerprint


def load_reference(
    config: Config,
    model: Decoder,
    mesh: Mesh,
    *,
    base: Tree,
    read_base: Callable[[], Tree],
    checkpoints: RunCheckpoints,
) -> Reference | None:
    """Loads the reference policy, or returns None if no term uses it. For an average, this is the initial one.

    With LoRA, `base` and `adapter` references share the base arrays of the policy. Without LoRA the policy's own
    weights move, so `base` is read back from the run directory. A step of this run is read from its checkpoint.

    Args:
      base: the weights under the policy's adapter, or None without one.
      read_base: reads the weights before RL from the run directory.

    Raises:
      UserError: the reference is missing or does not fit; the message names the field and what there is.
    """
    section = config.reference
    if not Plan.of(config).reference:
        return None
    with _field_errors("path" if section.source in PARTS else "source"):
        if section.source in PARTS:
            found = find_reference(config, model)
            shared = found.model.config.lora is not None
            base = (read_base() if base is None else base) if shared else None
            return _load_saved(found, mesh, base, config.model.allow_nonfinite)
        if section.source == "step":
            return Reference(model, _load_step(checkpoints.path(section.step), model, mesh, base))
        # An average starts at the policy, so nothing is read for it.
        in_memory = base is not None or section.source == "ema"
        return Reference(model, kljax.Policy(base if in_memory else read_base()))


def pinned_steps(config: Config) -> list[int]:
    """Lists the steps whose checkpoints the reference reads, which must not be deleted."""
    return [config.reference.step] if config.reference.source == "step" else []


@contextmanager
def _field_errors(field: str) -> Iterator[None]:
    """Turns errors of reading into a `UserError` that names the field of the reference."""
    try:
        yield
    except (FileNotFoundError, ValueError) as error:
        raise UserError(f"reference.{field}: {error}") from error


def _load_saved(saved: SavedReference, mesh: Mesh, base: Tree, allow_nonfinite: bool) -> Reference:
    """Loads a saved reference; `base` holds the weights under it if it is an adapter."""
    if saved.format == "peft":
        adapter = load_adapter(saved.path, saved.model, mesh, allow_nonfinite=allow_nonfinite)
        return Reference(saved.model, kljax.Policy(base, adapter))
    if saved.format == "folder":
        params = load_params(saved.path, saved.model, mesh, allow_nonfinite=allow_nonfinite)
        return Reference(saved.model, kljax.Policy(params))
    if base is None:
        policy = kljax.checkpoint_reference(saved.path, abstract_params(saved.model, mesh), item=saved.item)
    else:
        policy = kljax.adapter_reference(
            kljax.Policy(base), saved.path, abstract_adapter(saved.model, mesh), item=saved.item
        )
    return Reference(saved.model, policy)


def _load_step(path: Path, model: Decoder, mesh: Mesh, base: Tree) -> kljax.Policy:
    """Loads the policy of an earlier step of this run."""
    if model.config.lora is None:
        return kljax.checkpoint_reference(path, abstract_params(model, mesh), item="trainable.params")
    policy = kljax.Policy(base)
    return kljax.adapter_reference(policy, path, abstract_adapter(model, mesh), item="trainable.adapter")
