"""From `reference` of the config to a reference policy, laid out as the policy is; and proof that it never moved."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import kljax
from train.checkpoint import ITEM, Checkpoints, check_saved
from train.config.schema import Config
from train.errors import UserError
from train.models import Decoder
from train.policy import abstract_adapter, abstract_params, stored_head

Tree = Any

# Sources that name a path, and the part of a policy that lies there.
SAVED = {"adapter": "adapter", "checkpoint": "params"}


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
    if section.source in ("checkpoint", "adapter"):
        with _named("path"):
            path, item = locate(section.path, SAVED[section.source])
            abstract = abstract_params if section.source == "checkpoint" else abstract_adapter
            kljax.check_tree(path, abstract(model, mesh), item=item)


def load_reference(
    config: Config, model: Decoder, mesh: Mesh, *, base: Tree, base_path: Path, checkpoints: Checkpoints
) -> kljax.Policy | None:
    """The reference policy, or None if nothing needs one.

    With LoRA, `base` and `adapter` share the base arrays of the policy. Without LoRA the policy's own weights move, so
    `base` is read back from where the run saved it. A step of this run is read from its checkpoint.

    Raises:
      UserError: if what is asked for is not there or does not fit, naming the field and what there is.
    """
    if not config.needs_reference():
        return None
    section = config.reference
    with _named("path" if section.source in SAVED else "source"):
        if section.source == "checkpoint":
            path, item = locate(section.path, "params")
            return kljax.checkpoint_reference(path, abstract_params(model, mesh), item=item)
        if section.source == "adapter":
            path, item = locate(section.path, "adapter")
            return kljax.adapter_reference(kljax.Policy(base), path, abstract_adapter(model, mesh), item=item)
        if section.source == "step":
            return _step_reference(checkpoints.path(section.step), model, mesh, base)
        if config.lora is not None:
            return kljax.Policy(base, None)
        return kljax.checkpoint_reference(base_path, abstract_params(model, mesh))


def reference_head(config: Config, model: Decoder, reference: kljax.Policy | None) -> jax.Array | None:
    """The LM head that the exact KL needs, as it is stored; None if nothing needs it or it is the policy's, frozen."""
    exact = config.exact_loss() or config.exact_reward()
    return stored_head(model, reference.params) if reference and exact and not config.shares_head() else None


def pinned_steps(config: Config) -> list[int]:
    """The steps whose checkpoints the reference is read from."""
    return [config.reference.step] if config.reference.source == "step" else []


def locate(path: str, part: str) -> tuple[Path, str | None]:
    """Where `params` or `adapter` lies in a directory: on its own, or inside a checkpoint of a run."""
    directory = Path(path)
    if (directory / ITEM).is_dir():
        directory = directory / ITEM
    return directory, f"trainable.{part}" if directory.name == ITEM else None


@contextmanager
def _named(field: str) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, ValueError) as error:
        raise UserError(f"reference.{field}: {error}") from error


def _step_reference(path: Path, model: Decoder, mesh: Mesh, base: Tree) -> kljax.Policy:
    if model.config.lora is None:
        return kljax.checkpoint_reference(path, abstract_params(model, mesh), item="trainable.params")
    policy = kljax.Policy(base)
    return kljax.adapter_reference(policy, path, abstract_adapter(model, mesh), item="trainable.adapter")


def reference_fingerprint(reference: kljax.Policy | None) -> np.ndarray | None:
    """A checksum of every weight of the reference, on the host."""
    return None if reference is None else np.asarray(jax.jit(kljax.fingerprint)(reference))


def assert_unchanged(reference: kljax.Policy | None, before: np.ndarray | None) -> None:
    """Raises RuntimeError if a single bit of the reference differs from when `before` was taken."""
    after = reference_fingerprint(reference)
    if before is None or after is None:
        return
    if not np.array_equal(before, after):
        raise RuntimeError("the reference policy changed during the run: every KL that was measured against it is void")
