"""Everything about a run that does not change while it runs."""

import dataclasses
from typing import Any

import optax
from jax.sharding import Mesh

import kljax
from train.config.schema import Config
from train.data import Prompts
from train.models import Decoder
from train.tasks import Example, Task
from train.tokenizer import ByteTokenizer

Tree = Any


@dataclasses.dataclass(frozen=True)
class Setting:
    """The config, and what was built from it.

    Attributes:
      base: weights that the policy shares with the reference, with LoRA; else None.
      reference: what the KL is measured against, or None.
      held_out: the examples of an evaluation.
    """

    config: Config
    mesh: Mesh
    model: Decoder
    optimizer: optax.GradientTransformation
    tokenizer: ByteTokenizer
    task: Task
    prompts: Prompts
    held_out: list[Example]
    base: Tree = None
    reference: kljax.Policy | None = None
