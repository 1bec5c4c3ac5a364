"""The four placements of KL in the objective."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from train.config.types import (
    Count,
    Direction,
    Estimator,
    EstimatorOrExact,
    KLGradient,
    NonNegative,
    Positive,
    RolloutEstimator,
    Section,
    tag_defaults_to,
)


class FixedController(Section):
    type: Literal["fixed"]
    """`fixed` keeps the coefficient, `adaptive` steers the KL to a target."""


class AdaptiveController(Section):
    type: Literal["adaptive"]
    target: Positive
    """Adaptive: target of the mean KL per token, in nats."""
    horizon: Count
    """Adaptive: number of completions over which the coefficient may change by a factor of about e."""


Controller = Annotated[
    FixedController | AdaptiveController,
    Field(discriminator="type"),
    BeforeValidator(tag_defaults_to("type", "fixed")),
]


class RewardKL(Section):
    coef: NonNegative = 0.0
    """Coefficient of the KL subtracted from the per-token rewards; the initial one if adaptive."""
    estimator: EstimatorOrExact = "k1"
    """Estimator; `exact`: the KL over the whole vocabulary; `system/name`, as `verl/kl`, sets all it implies."""
    value_clip: Positive | None = None
    """Clip of each token's estimate, in nats; null: none."""
    controller: Controller = FixedController(type="fixed")
    """Controller of the coefficient."""


class LossKL(Section):
    coef: NonNegative = 0.0
    """Coefficient of the reference KL term of the loss."""
    estimator: EstimatorOrExact = "k3"
    """Estimator; `exact`: over the whole vocabulary; `system/name`, as `verl/low_var_kl`, sets all it implies."""
    direction: Direction = "reverse"
    """exact: `reverse` is KL(policy || reference), `forward` KL(reference || policy), at the sampled prefixes."""
    gradient: KLGradient = "k2"
    """`value`: of the estimate (`exact`: always); `k2`: straight-through, the gradient of KL(policy || reference)."""
    importance_corrected: bool = False
    """Multiply by the importance ratio to the old policy, which makes the term unbiased off-policy."""
    max_ratio: Positive | None = None
    """Cap of that ratio; null: none."""
    value_clip: Positive | None = None
    """Clip of each token's estimate, in nats; null: none."""

    @model_validator(mode="before")
    @classmethod
    def _exact_is_differentiated(cls, raw: Any) -> Any:
        """Lets `estimator: exact` stand alone: it is always differentiated itself."""
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
