"""Loading the reference policy that the config names: checked from metadata first, then read onto the mesh."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

import kljax
from kljax.checkpoint import named_leaves
from train.config.errors import field_errors
from train.config.plan import AVERAGES, Plan, follows_policy
from train.config.schema import Config
from train.distributed.exchange import on_leader
from train.models import Decoder
from train.models.parameters import abstract_adapter, abstract_params
from train.references.find import PARTS, SavedReference, find_reference, warn_of_other_base
from train.references.follow import start_following
from train.references.record import is_recorded, record_reference, reference_fingerprint
from train.rl.policy import ScoredPolicy
from train.rl.reference import FrozenWeights
from train.rl.state import TrainState, nonfinite_name
from train.weights.huggingface import check_folder, load_params
from train.weights.orbax import RunCheckpoints, check_saved
from train.weights.peft import check_adapter, load_adapter

Tree = Any


def check_reference(plan: Plan, model: Decoder, mesh: Mesh, steps: Sequence[int]) -> SavedReference | None:
    """Checks the reference from metadata alone, before anything starts or is written.

    Args:
      steps: the steps that the run has checkpoints of; step 0 exists once RL begins.

    Returns:
      The weights at `reference.path`; None if the config names none, or no term uses them.

    Raises:
      UserError: naming the field and what there is.
    """
    config = plan.config
    section = plan.config.reference
    if not plan.reference:
        return None
    if section.source == "step":
        check_saved(section.step, sorted({0, *steps}))
    if section.source not in PARTS:
        return None
    with field_errors("reference.path"):
        saved = find_reference(config, model)
        if saved.format == "peft":
            check_adapter(saved.path, saved.model)
            warn_of_other_base(config, saved.path, "reference.path")
        elif saved.format == "folder":
            abstract_params(saved.model, mesh)  # raises where the mesh does not divide a size
            check_folder(saved.path, saved.model)
        else:
            abstract = abstract_params if section.source == "checkpoint" else abstract_adapter
            kljax.check_tree(saved.path, abstract(saved.model, mesh), item=saved.item)
    return saved


def start_reference(
    plan: Plan,
    model: Decoder,
    mesh: Mesh,
    state: TrainState,
    *,
    base: Tree,
    saved: SavedReference | None,
    read_base: Callable[[], Tree],
    checkpoints: RunCheckpoints,
    record: Path,
) -> tuple[FrozenWeights, TrainState, np.ndarray | None]:
    """Loads, or continues, the reference of a run.

    A reference that follows the policy continues from the saved state. A reference that the config names for the
    first time is loaded, and starts to follow from there.

    Args:
      base: the weights under the trained adapter, or None without one.
      saved: the weights at `reference.path`, as `check_reference` returns them.
      read_base: reads the weights before RL.
      record: the file where the run records its references.

    Returns:
      The base and the reference (its frozen part, if it follows the policy), the state with the part that follows, and
      the fingerprint of the frozen part.

    Raises:
      UserError: the reference is missing, does not fit, or differs from the recorded one.
    """
    config = plan.config
    if not plan.reference:
        return FrozenWeights(base, None), dataclasses.replace(state, reference=None), None
    # A reference that follows the policy has no frozen weights but the base that it shares.
    reference: ScoredPolicy | None = ScoredPolicy(model, kljax.Policy(None))
    if state.reference is None or not on_leader("references", lambda: is_recorded(record, config)):
        loaded = load_reference(plan, model, mesh, saved=saved, read_base=read_base, checkpoints=checkpoints)
        moving = None
        if loaded is not None and follows_policy(config):
            moving = start_following(config, loaded, state.trainable)
        else:
            reference = loaded
        state = dataclasses.replace(state, reference=moving)
    frozen = FrozenWeights(base, reference)
    fingerprint = reference_fingerprint(frozen)
    step = int(state.step)
    on_leader("references", lambda: record_reference(record, config, fingerprint, step))
    return frozen, state, fingerprint


def load_reference(
    plan: Plan,
    model: Decoder,
    mesh: Mesh,
    *,
    saved: SavedReference | None,
    read_base: Callable[[], Tree],
    checkpoints: RunCheckpoints,
) -> ScoredPolicy | None:
    """Loads the reference policy, or returns None if no term uses it. For an average, this is the initial one.

    With LoRA it shares the frozen base of the policy, unless it is a checkpoint of whole weights. Without LoRA the
    policy's own weights move, so the base is read back from the run directory. A step of this run is read from its
    checkpoint.

    Args:
      saved: the weights at `reference.path`, as `check_reference` returns them; None for other sources.
      read_base: reads the weights before RL from the run directory.

    Raises:
      UserError: the reference is missing or does not fit; the message names the field and what there is.
    """
    config = plan.config
    section = plan.config.reference
    if not plan.reference:
        return None
    with field_errors("reference.source" if saved is None else "reference.path"):
        if saved is not None:
            base = read_base() if section.source == "adapter" and model.config.lora is None else None
            return ScoredPolicy(saved.model, _load_saved(saved, mesh, base, config.model.allow_nonfinite))
        if section.source == "step":
            part = "params" if model.config.lora is None else "adapter"
            path = checkpoints.path(section.step)
            return ScoredPolicy(model, _load_orbax(path, f"trainable.{part}", model, mesh, None))
        # An average starts at the policy, so nothing is read for it.
        in_memory = model.config.lora is not None or section.source in AVERAGES
        return ScoredPolicy(model, kljax.Policy(None if in_memory else read_base()))


def pinned_steps(config: Config) -> list[int]:
    """Lists the steps whose checkpoints the reference reads, which must not be deleted."""
    return [config.reference.step] if config.reference.source == "step" else []


def _load_saved(saved: SavedReference, mesh: Mesh, base: Tree, allow_nonfinite: bool) -> kljax.Policy:
    """Loads a saved reference; `base` holds the weights under it if it is an adapter that does not share them."""
    if saved.format == "peft":
        return kljax.Policy(base, load_adapter(saved.path, saved.model, mesh, allow_nonfinite=allow_nonfinite))
    if saved.format == "folder":
        return kljax.Policy(load_params(saved.path, saved.model, mesh, allow_nonfinite=allow_nonfinite))
    policy = _load_orbax(saved.path, saved.item, saved.model, mesh, base)
    if not allow_nonfinite:
        _check_finite(saved.path, policy)
    return policy


def _check_finite(path: Path, policy: kljax.Policy) -> None:
    """Raises ValueError naming the first array of a policy that is not finite."""
    name = nonfinite_name(named_leaves({"params": policy.params, "adapter": policy.adapter}))
    if name is not None:
        raise ValueError(f"{path}: {name} has numbers that are not finite; set model.allow_nonfinite to use them")


def _load_orbax(path: Path, item: str | None, model: Decoder, mesh: Mesh, base: Tree) -> kljax.Policy:
    """Loads what the policy of a model trains: its weights, or an adapter on `base`."""
    if model.config.lora is None:
        return kljax.checkpoint_reference(path, abstract_params(model, mesh), item=item)
    return kljax.adapter_reference(kljax.Policy(base), path, abstract_adapter(model, mesh), item=item)
