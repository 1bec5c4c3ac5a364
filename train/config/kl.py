"""Where KL enters the objective."""

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
    """Adaptive: mean KL per token, in nats, that the coefficient is steered to."""
    horizon: Count
    """Adaptive: completions over which the coefficient may change by a factor of about e."""


Controller = Annotated[
    FixedController | AdaptiveController,
    Field(discriminator="type"),
    BeforeValidator(tag_defaults_to("type", "fixed")),
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
    direction: Direction = "reverse"
    """Exact: `reverse` is KL(policy || reference), `forward` KL(reference || policy), at the drawn prefixes."""
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
