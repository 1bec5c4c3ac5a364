"""The reference policy of the KL."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from train.config.types import Count, CountOrZero, Decay, PathText, Section, tag_defaults_to


class BaseReference(Section):
    source: Literal["base"]
    """`base`: adapter off, or the weights before RL; `step`: of this run; others: saved, or an average."""
    refresh_every: Count | None = None
    """base, step: replace the reference by the policy every so many steps; null: never."""
    monitor: bool = False
    """Compute the reference KL as a metric even if no coefficient needs it."""


class StepReference(Section):
    source: Literal["step"]
    step: CountOrZero
    """step: the step of this run that is the reference; 0 is the policy before RL."""
    refresh_every: Count | None = None
    monitor: bool = False


class AdapterReference(Section):
    source: Literal["adapter"]
    path: PathText
    """adapter: a PEFT folder or orbax directory; checkpoint: a Hugging Face folder or orbax directory."""
    monitor: bool = False


class CheckpointReference(Section):
    source: Literal["checkpoint"]
    path: PathText
    monitor: bool = False


class EmaReference(Section):
    source: Literal["ema"]
    decay: Decay = 0.99
    """ema: weight of the old average after each step; the new policy has the rest."""
    monitor: bool = False


ReferenceSection = Annotated[
    BaseReference | StepReference | AdapterReference | CheckpointReference | EmaReference,
    Field(discriminator="source"),
    BeforeValidator(tag_defaults_to("source", "base")),
]
