"""Where KL enters the objective, and what it is measured against."""

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from train.config.types import (
    Count,
    CountOrZero,
    Estimator,
    EstimatorOrExact,
    KLGradient,
    NonNegative,
    Positive,
    RolloutEstimator,
    Section,
    Text,
)


def _tag_defaults_to(key: str, tag: str) -> Callable[[Any], Any]:
    """Lets a section be changed in part (`reference.monitor=true`) without repeating which variant it is."""
    return lambda value: {key: tag, **value} if isinstance(value, dict) else value


class FixedController(Section):
    type: Literal["fixed"]
    """`fixed` keeps the coefficient, `adaptive` steers the KL to a target."""


class AdaptiveController(Section):
    type: Literal["adaptive"]
    target: Positive
    """Adaptive: mean KL per token, in nats, that the coefficient is steered to."""
    horizon: Count
    """Adaptive: completions over which the coefficient may change by a factor of about e."""


Controller = Annotated[
    FixedController | AdaptiveController,
    Field(discriminator="type"),
    BeforeValidator(_tag_defaults_to("type", "fixed")),
]


class RewardKL(Section):
    coef: NonNegative = 0.0
    """Coefficient of the KL that is subtracted from the per-token rewards; with a controller, its initial value."""
    estimator: EstimatorOrExact = "k1"
    """Estimator of the KL in the reward, or `exact`, over the vocabulary; `verl/kl` sets what that name implies."""
    value_clip: Positive | None = None
    """Bound of each token's estimate, in nats; null: none."""
    controller: Controller = FixedController(type="fixed")
    """How the coefficient changes during the run."""


class LossKL(Section):
    coef: NonNegative = 0.0
    """Coefficient of the reference KL term of the loss."""
    estimator: EstimatorOrExact = "k3"
    """Value of the term; `exact`: over the vocabulary; `system/name`, as `verl/low_var_kl`, sets all it implies."""
    gradient: KLGradient = "k2"
    """`value` differentiates it (`exact`: always), `k2` is straight-through with the gradient of KL(policy || ref)."""
    importance_corrected: bool = False
    """Multiply by the ratio of the policy to the policy that sampled, which makes the term exact off-policy."""
    max_ratio: Positive | None = None
    """Upper bound of that ratio; null: none."""
    value_clip: Positive | None = None
    """Bound of each token's estimate, in nats; null: none."""

    @model_validator(mode="before")
    @classmethod
    def _exact_is_differentiated(cls, raw: Any) -> Any:
        """So that `estimator: exact` alone is enough: it has one gradient, its own."""
        exact = isinstance(raw, dict) and raw.get("estimator") == "exact"
        return {"gradient": "value", **raw} if exact else raw


class AdvantageKL(Section):
    coef: NonNegative = 0.0
    """Coefficient of the centred adjustment `coef * (mean_kl - kl)` of the advantages."""
    estimator: Estimator = "k1"
    """Estimator of the KL in the adjustment."""


class RolloutKL(Section):
    coef: NonNegative = 0.0
    """Coefficient of the KL between the trainer's and the sampler's log-probs."""
    estimator: RolloutEstimator = "k2"
    """Estimator of the rollout KL."""


class KL(Section):
    reward: RewardKL = RewardKL()
    """KL to the reference, in the reward."""
    loss: LossKL = LossKL()
    """KL to the reference, as a term of the loss."""
    advantage: AdvantageKL = AdvantageKL()
    """KL to the reference, as a centred adjustment of the advantages."""
    rollout: RolloutKL = RolloutKL()
    """KL between the trainer and the sampler, as a term of the loss."""


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
    BeforeValidator(_tag_defaults_to("source", "base")),
]
