"""The optimizer, its learning rate over time, and how a rollout batch is split into updates."""

from typing import TYPE_CHECKING, Any, Literal

from train.config.algorithms import OPTIMIZERS, Algorithm, make_union, make_variant
from train.config.types import Count, CountOrZero, Fraction, Positive, Section


class Optimizer(Algorithm):
    """The optimizer; its fields are the parameters of the function of optax."""

    type: str
    """Optimizer, a function of optax; muon leaves embeddings and norms to Adam."""


class Schedule(Algorithm):
    """The learning rate after the warm-up."""

    type: str
    """Learning rate after the warm-up: constant, or a fall to `end` of it: linear, cosine, or wsd, after a plateau."""


class ConstantSchedule(Schedule):
    type: Literal["constant"]


class LinearSchedule(Schedule):
    type: Literal["linear"]
    decay_steps: Count
    """linear, cosine, wsd: updates over which the learning rate falls."""
    end: Fraction = 0.1
    """linear, cosine, wsd: the last learning rate, as a fraction of the highest."""


class CosineSchedule(Schedule):
    type: Literal["cosine"]
    decay_steps: Count
    end: Fraction = 0.1


class WsdSchedule(Schedule):
    type: Literal["wsd"]
    stable_steps: CountOrZero
    """wsd: updates at the highest learning rate, between warm-up and decay."""
    decay_steps: Count
    end: Fraction = 0.1


OPTIMIZER_VARIANTS: list[type[Any]] = [make_variant(Optimizer, name, target) for name, target in OPTIMIZERS.items()]
SCHEDULE_VARIANTS: list[type[Any]] = [ConstantSchedule, LinearSchedule, CosineSchedule, WsdSchedule]
DEFAULT_OPTIMIZER: Optimizer = OPTIMIZER_VARIANTS[0](type="adamw")
DEFAULT_SCHEDULE = ConstantSchedule(type="constant")

if TYPE_CHECKING:
    OptimizerSection = Optimizer
    ScheduleSection = ConstantSchedule | LinearSchedule | CosineSchedule | WsdSchedule
else:
    OptimizerSection = make_union(OPTIMIZER_VARIANTS, "adamw")
    ScheduleSection = make_union(SCHEDULE_VARIANTS, "constant")


class Optim(Section):
    optimizer: OptimizerSection = DEFAULT_OPTIMIZER
    """The optimizer, also of the warm start."""
    learning_rate: Positive = 3e-4
    """Highest learning rate of RL."""
    warmup_steps: CountOrZero = 0
    """Updates of the linear warm-up; the first update has a rate above 0."""
    schedule: ScheduleSection = DEFAULT_SCHEDULE
    """The learning rate after the warm-up."""
    max_grad_norm: Positive = 1.0
    """Clips the global norm of the gradient."""
    host_memory: bool = False
    """Keep the optimizer's moments in the memory of the host, and bring one layer at a time to the devices."""
    updates_per_batch: Count = 1
    """Optimizer updates per rollout batch; completions of one prompt stay together where the numbers allow it."""
    epochs: Count = 1
    """Passes over each rollout batch."""
    micro_batches: Count = 1
    """Micro-batches of an update; changes memory, not the result."""
    share_prompts: bool = True
    """Run a prompt through the model once for all of its completions; changes speed and memory, not the result."""
    packing: bool = False
    """Pack several completions into a row, so that the layers do not pay for padding; changes speed, not the result."""
    packed_tokens: Count | None = None
    """Slots of a packed row, at least data.max_tokens; null: as many. Longer rows hold more completions of a prompt."""
    share_prefixes: bool = False
    """Run all tokens with which packed completions of a prompt begin alike once, as in trees; changes speed, not the
    result."""
