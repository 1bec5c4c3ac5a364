"""The policy loss and the advantage estimator: a section for each name, with the parameters of its function."""

from typing import TYPE_CHECKING, Any, Literal

from train.config.algorithms import (
    ADVANTAGES,
    ENTROPY_CONTROLLERS,
    LOSS_FUNCTIONS,
    Algorithm,
    UserFunction,
    make_union,
    make_variant,
)
from train.config.types import (
    Aggregation,
    Balance,
    Count,
    DegreesOfFreedom,
    EmptyRows,
    NonNegative,
    OldLogProbs,
    Positive,
    RejectedTokens,
)


class EntropyController(Algorithm):
    """The controller of the entropy coefficient; its fields are the parameters of the function of the library."""

    type: str
    """`fixed` keeps the coefficient, `adaptive` moves it in steps while the mean entropy is above or below a target."""


ENTROPY_CONTROLLER_VARIANTS: list[type[Any]] = [
    make_variant(EntropyController, name, target, hidden=("coef",)) for name, target in ENTROPY_CONTROLLERS.items()
]
DEFAULT_ENTROPY_CONTROLLER: EntropyController = ENTROPY_CONTROLLER_VARIANTS[0](type="fixed")

if TYPE_CHECKING:
    EntropyControllerSection = EntropyController
else:
    EntropyControllerSection = make_union(ENTROPY_CONTROLLER_VARIANTS, "fixed")


class Loss(Algorithm):
    """The policy loss, and the fields that every one has: its reduction, the entropy bonus, the value term."""

    type: str
    """Policy loss; `none`: no policy loss; `module:function`: yours; `system/name`, as `verl/cispo`: what it means."""
    aggregation: Aggregation = "token_mean"
    """Reduction of the per-token losses."""
    max_length: Count | None = None
    """seq_mean_token_sum_norm: the constant length that divides each sum; null: data.max_completion_length."""
    empty_rows: EmptyRows = "drop"
    """Whether a row without tokens counts in a mean over sequences."""
    old_log_probs: OldLogProbs = "trainer"
    """The policy of the ratio's denominator: `trainer`: before the first update; `sampler`: the recorded log-probs."""
    rejected_tokens: RejectedTokens = "drop"
    """Whether tokens that a correction rejects still count in the denominators."""
    unfinished: RejectedTokens = "count"
    """Whether completions that a limit ended are trained on; `drop`: their rewards count in their groups alone."""
    entropy_coef: NonNegative = 0.0
    """Coefficient of the entropy bonus; the initial one if adaptive."""
    entropy_aggregation: Aggregation | None = None
    """How the entropies of the tokens are reduced to the bonus; null: as the loss."""
    entropy_controller: EntropyControllerSection = DEFAULT_ENTROPY_CONTROLLER
    """Controller of that coefficient; it measures the mean entropy per token, in nats."""
    value_coef: NonNegative = 0.0
    """Coefficient of the value loss, if the advantage estimator reads values."""
    value_clip: Positive | None = None
    """Clip of a value's distance from the old value; null: none."""

    def has_entropy_term(self) -> bool:
        """Whether the entropy bonus is part of the objective: its coefficient is above 0, or can come there."""
        return self.entropy_coef > 0 or self.entropy_controller.type != DEFAULT_ENTROPY_CONTROLLER.type


class NoLoss(Loss):
    type: Literal["none"]


class Advantage(Algorithm):
    """The advantage estimator, and the steps after it."""

    type: str
    """Advantage estimator; `module:function`: yours; `system/name`, as `verl/grpo`: what the name means there."""
    empty_rows: EmptyRows = "count"
    """Whether the reward of a row without tokens counts in its group."""
    zeros: RejectedTokens = "count"
    """Whether tokens of advantage 0 are trained on; `drop` takes them out of every term and its denominators."""
    scale_by_mean: bool = False
    """Divide the advantages by their mean absolute value, which weighs tokens as the loss does."""
    balance: Balance = 0.0
    """scale_by_mean: first, advantages <= 0 times 1 - balance; if it is negative, those >= 0 times 1 + balance."""
    whiten: bool = False
    """Whiten the advantages over the whole batch."""
    whiten_ddof: DegreesOfFreedom = 1
    """Degrees of freedom that the variance of the whitening subtracts."""
    whiten_eps: NonNegative = 1e-8
    """Added to the variance of the whitening."""


class UserLoss(UserFunction, Loss):
    """A policy loss of the user."""

    type: Literal["custom"]


class UserAdvantage(UserFunction, Advantage):
    """An advantage estimator of the user."""

    type: Literal["custom"]


LOSS_VARIANTS: list[type[Any]] = [
    *(make_variant(Loss, name, target) for name, target in LOSS_FUNCTIONS.items()),
    NoLoss,
    UserLoss,
]
ADVANTAGE_VARIANTS: list[type[Any]] = [
    *(make_variant(Advantage, name, target) for name, target in ADVANTAGES.items()),
    UserAdvantage,
]
DEFAULT_LOSS: Loss = LOSS_VARIANTS[0](type="ppo")
DEFAULT_ADVANTAGE: Advantage = ADVANTAGE_VARIANTS[0](type="grpo")

if TYPE_CHECKING:
    LossSection = Loss
    AdvantageSection = Advantage
else:
    LossSection = make_union(LOSS_VARIANTS, "ppo")
    AdvantageSection = make_union(ADVANTAGE_VARIANTS, "grpo")
