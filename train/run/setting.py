"""Everything about a run that does not change while it runs."""

import dataclasses
from typing import Any

import optax
from jax.sharding import Mesh

from train.config.schema import Config
from train.data.prompts import Prompts
from train.data.tasks import Example, Task
from train.data.tokenizers import Tokenizer
from train.models import Decoder
from train.references import Reference

Tree = Any


@dataclasses.dataclass(frozen=True)
class Setting:
    """The config, and what was built from it.

    Attributes:
      base: weights that the policy shares with the reference, with LoRA; else None.
      reference: what the KL is measured against, or None; of one that follows the policy, the half that stays.
      held_out: the examples of an evaluation.
    """

    config: Config
    mesh: Mesh
    model: Decoder
    optimizer: optax.GradientTransformation
    tokenizer: Tokenizer
    task: Task
    prompts: Prompts
    held_out: list[Example]
    base: Tree = None
    reference: Reference | None = None
