"""A finished or interrupted run, read without training: its config and the policy of one of its steps."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from jax.sharding import Mesh

import kljax
from train.config.errors import UserError
from train.config.load import load
from train.config.schema import Config
from train.config.schema import Mesh as MeshSection
from train.models import Decoder
from train.models.parameters import abstract_adapter, abstract_params
from train.run.base_weights import load_base
from train.run.directory import RunDirectory
from train.run.setup import config_mesh
from train.storage.paths import as_path
from train.weights.orbax import ITEM, restore_base


@dataclasses.dataclass(frozen=True)
class SavedRun:
    """A run directory, wherever it lies by now, and the config in it."""

    directory: RunDirectory
    config: Config

    @classmethod
    def at(cls, path: str | Path, overrides: Sequence[str] = ()) -> "SavedRun":
        """Opens the run in a directory, with `key=value` overrides on top of its config.

        Raises:
          UserError: there is no run, or its config cannot be read or was changed on disk.
        """
        directory = RunDirectory(as_path(path))
        if not directory.config.is_file():
            raise UserError(f"{path} is not the directory of a run: it has no {directory.config.name}")
        directory.check_config()
        return cls(directory, load(directory.config, overrides).config)

    def step(self, wanted: int | None) -> int:
        """Returns `wanted`, or the last step if None; raises `UserError` listing the steps that exist."""
        steps = self.directory.steps()
        if not steps:
            raise UserError(f"--step: the run {self.directory.root} has no checkpoint yet")
        if wanted is not None and wanted not in steps:
            listed = ", ".join(map(str, steps))
            raise UserError(f"--step: got {wanted}, but the run {self.directory.root} has steps {listed}")
        return steps[-1] if wanted is None else wanted

    def policy(self, model: Decoder, mesh: Mesh, step: int) -> kljax.Policy:
        """Loads the policy after a step: its weights, or with LoRA base and adapter, without a value head.

        Raises:
          UserError: naming the file that cannot be read or does not fit the config.
        """
        path = self.directory.checkpoints / str(step) / ITEM
        if model.config.lora is None:
            return kljax.Policy(
                restore_base(path, abstract_params(model, mesh), f"step {step}", item="trainable.params")
            )
        abstract = abstract_adapter(model, mesh)
        adapter = restore_base(path, abstract, f"step {step}", item="trainable.adapter")
        return kljax.Policy(load_base(self.directory, model, mesh), adapter)


def fitting(config: Config) -> Config:
    """Puts the config on one device if this machine has fewer than its mesh; the numbers are the same."""
    try:
        config_mesh(config)
    except UserError:
        rollout = config.rollout.model_copy(update={"mesh": None})
        return config.model_copy(update={"mesh": MeshSection(), "rollout": rollout})
    return config
