"""The reference policy: what the KL is measured against."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from train.config.types import CountOrZero, Section, Text, tag_defaults_to


class BaseReference(Section):
    source: Literal["base"]
    """`base`: adapter off, or the weights after the warm start; `step`: a step of this run; or a saved one."""
    monitor: bool = False
    """Compute the reference KL as a metric even if no coefficient needs it."""


class StepReference(Section):
    source: Literal["step"]
    step: CountOrZero
    """Step: the step of this run that is the reference; 0 is the policy before RL."""
    monitor: bool = False


class AdapterReference(Section):
    source: Literal["adapter"]
    path: Text
    """Adapter, checkpoint: the directory that orbax saved."""
    monitor: bool = False


class CheckpointReference(Section):
    source: Literal["checkpoint"]
    path: Text
    monitor: bool = False


Reference = Annotated[
    BaseReference | StepReference | AdapterReference | CheckpointReference,
    Field(discriminator="source"),
    BeforeValidator(tag_defaults_to("source", "base")),
]
