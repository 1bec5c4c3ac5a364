"""The reference policy: what the KL is measured against."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from train.config.types import Count, CountOrZero, Decay, Section, Text, tag_defaults_to


class BaseReference(Section):
    source: Literal["base"]
    """`base`: adapter off, or the weights before RL; `step`: a step of this run; `ema`: an average; or a saved one."""
    refresh_every: Count | None = None
    """Base, step: the reference becomes a copy of the policy every so many steps; null: it stays what it is."""
    monitor: bool = False
    """Compute the reference KL as a metric even if no coefficient needs it."""


class StepReference(Section):
    source: Literal["step"]
    step: CountOrZero
    """Step: the step of this run that is the reference; 0 is the policy before RL."""
    refresh_every: Count | None = None
    monitor: bool = False


class AdapterReference(Section):
    source: Literal["adapter"]
    path: Text
    """Adapter: a PEFT folder, or what orbax saved; checkpoint: a Hugging Face folder, or what orbax saved."""
    monitor: bool = False


class CheckpointReference(Section):
    source: Literal["checkpoint"]
    path: Text
    monitor: bool = False


class EmaReference(Section):
    source: Literal["ema"]
    decay: Decay = 0.99
    """Ema: weight of the old average after each step; the policy as it then is has the rest."""
    monitor: bool = False


Reference = Annotated[
    BaseReference | StepReference | AdapterReference | CheckpointReference | EmaReference,
    Field(discriminator="source"),
    BeforeValidator(tag_defaults_to("source", "base")),
]
