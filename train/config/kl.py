"""The four placements of KL in the objective."""

from typing import TYPE_CHECKING, Any, Literal

from pydantic import model_validator

from train.config.algorithms import CONTROLLERS, KL_SCHEDULES, Algorithm, make_union, make_variant
from train.config.types import (
    Aggregation,
    Direction,
    EmptyRows,
    Estimator,
    EstimatorOrExact,
    KLGradient,
    Level,
    NonNegative,
    Positive,
    RolloutEstimator,
    Section,
)


class KLSchedule(Algorithm):
    """A KL coefficient over the RL steps, from `coef` on; its fields are the parameters of the function of optax."""

    type: str
    """scheduled: how the coefficient goes on from `coef`; steps are RL steps."""


class KLController(Algorithm):
    """The controller of a KL coefficient; its fields are the parameters of the function of the library."""

    type: str
    """`fixed` keeps the coefficient, `adaptive` and `pi` steer the mean KL per token to a target, in nats."""


KL_SCHEDULE_VARIANTS: list[type[Any]] = [
    make_variant(KLSchedule, name, target) for name, target in KL_SCHEDULES.items()
]

if TYPE_CHECKING:
    KLScheduleSection = KLSchedule
else:
    KLScheduleSection = make_union(KL_SCHEDULE_VARIANTS, "linear")


class ScheduledController(KLController):
    type: Literal["scheduled"]
    schedule: KLScheduleSection
    """scheduled: the schedule of optax that the coefficient follows."""


CONTROLLER_VARIANTS: list[type[Any]] = [
    ScheduledController if name == "scheduled" else make_variant(KLController, name, target, hidden=("coef",))
    for name, target in CONTROLLERS.items()
]
DEFAULT_CONTROLLER: KLController = CONTROLLER_VARIANTS[0](type="fixed")

if TYPE_CHECKING:
    ControllerSection = KLController
else:
    ControllerSection = make_union(CONTROLLER_VARIANTS, "fixed")


class RewardKL(Section):
    coef: NonNegative = 0.0
    """Coefficient of the KL subtracted from the per-token rewards; the initial one if adaptive. 0: off."""
    estimator: EstimatorOrExact = "k1"
    """Estimator; `exact`: the KL over the whole vocabulary; `system/name`, as `verl/kl`, sets all it implies."""
    value_clip: Positive | None = None
    """Clip of each token's estimate, in nats; null: none."""
    controller: ControllerSection = DEFAULT_CONTROLLER
    """Controller of the coefficient."""


class LossKL(Section):
    coef: NonNegative = 0.0
    """Coefficient of the reference KL term of the loss. 0: off; the KL is then measured with reference.monitor=true."""
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
    importance_level: Level = "token"
    """That ratio: of the token, of its sequence (the product), or geometric (their geometric mean, as TRL's GSPO)."""
    log_ratio_clip: Positive | None = None
    """Clip of the log-ratio before the estimate, in nats; null: none."""
    value_clip: Positive | None = None
    """Clip of each token's estimate, in nats; null: none."""
    aggregation: Aggregation | None = None
    """Reduction of this term; null: that of the loss."""
    empty_rows: EmptyRows = "drop"
    """Whether a row without tokens counts in a mean over sequences, if the term has its own reduction."""
    controller: ControllerSection = DEFAULT_CONTROLLER
    """Controller of the coefficient; it steers the mean of the estimates over the tokens."""

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
    controller: ControllerSection = DEFAULT_CONTROLLER
    """Controller of the coefficient."""


KLTerm = RewardKL | LossKL | AdvantageKL
"""A placement of the KL to the reference."""


class RolloutKL(Section):
    coef: NonNegative = 0.0
    """Coefficient of the KL between the trainer's and the sampler's log-probs."""
    estimator: RolloutEstimator = "k2"
    """Estimator of the rollout KL."""
    gradient: KLGradient = "value"
    """`value`: of the estimate; `k2`: straight-through, the gradient of KL(policy || sampler)."""
    log_ratio_clip: Positive | None = None
    """Clip of the log-ratio before the estimate, in nats; null: none."""
    value_clip: Positive | None = None
    """Clip of each token's estimate, in nats; null: none."""


class KL(Section):
    reward: RewardKL = RewardKL()
    """KL to the reference, in the reward."""
    loss: LossKL = LossKL()
    """KL to the reference, as a term of the loss."""
    advantage: AdvantageKL = AdvantageKL()
    """KL to the reference, as a centred adjustment of the advantages."""
    rollout: RolloutKL = RolloutKL()
    """KL between the trainer and the sampler, as a term of the loss."""

    def terms(self) -> dict[str, KLTerm]:
        """Returns the placements of the KL to the reference by name."""
        return {"reward": self.reward, "loss": self.loss, "advantage": self.advantage}
