"""The settings of every stage of an update.

A recipe is immutable: a cause is a recipe with other settings, and a replay remembers its results by them.
"""

import dataclasses
from typing import Any

Arguments = tuple[tuple[str, Any], ...]


@dataclasses.dataclass(frozen=True)
class MaskRule:
    """Which tokens are trained: the tokens of the completions, with the changes of the header or of a fault.

    Attributes:
      tools: whether the tokens of a tool's answer are in it; None changes nothing.
      truncated: whether rows without an end-of-sequence token, cut at the limit, are in it; None changes nothing.
      shift: how many positions to the right it is moved.
      prompt: whether the tokens of the prompt are in it.
      left: whether padding on the left of the prompt is in it.
      pad: whether padding behind the completion is in it.
      extra: the number of tokens behind the completion that are in it.
      last: which rows have their last token in it: "all", "cut" (only rows without an end-of-sequence token), "none".
      first: whether the first token of each row is in it.
    """

    tools: bool | None = None
    truncated: bool | None = None
    shift: int = 0
    prompt: bool = False
    left: bool = False
    pad: bool = False
    extra: int = 0
    last: str = "all"
    first: bool = True


@dataclasses.dataclass(frozen=True)
class LogProbRecipe:
    """How log-probs follow from logits.

    Attributes:
      temperature: divides the logits.
      softcap: bound of the logits, `cap * tanh(z / cap)`, before the temperature; None does not bound.
      logit_scale: multiplies the logits first.
      vocab_size: number of real ids; the columns after it are padding. None counts all columns.
      top_p: mass of the set that is renormalised over; None takes the whole vocabulary.
      forward: dtype of the forward pass, if the logits are of a pass of their own, without padding; None if they are
        the ones that were scored.
      shift: how many positions later than its own a token's logits are read.
      logits_dtype: dtype that logits are rounded to before the softmax; None keeps the recorded one.
      moved: how many positions to the right the log-probs are moved.
      source: an array that takes their place; None scores the logits.
    """

    temperature: float = 1.0
    softcap: float | None = None
    logit_scale: float = 1.0
    vocab_size: int | None = None
    top_p: float | None = None
    forward: str | None = None
    shift: int = 0
    logits_dtype: str | None = None
    moved: int = 0
    source: str | None = None


@dataclasses.dataclass(frozen=True)
class Ratio:
    """The importance ratio `exp(log_probs - old)` of the policy loss and of the KL term.

    Attributes:
      old: the array of the policy in the denominator.
      shift: how many positions to the right that array is moved.
      swapped: whether it is `exp(old - log_probs)`.
    """

    old: str = "old_log_probs"
    shift: int = 0
    swapped: bool = False


@dataclasses.dataclass(frozen=True)
class Kl:
    """The KL term: `scale * estimate_kl(...)`, its coefficient and its place.

    Attributes:
      estimator: as in `estimate_kl`.
      gradient: the same.
      max_ratio: the same.
      log_ratio_clip: the same.
      value_clip: the same.
      corrected: whether it is multiplied by the importance ratio.
      ratio: which ratio that is: of the "token", or of the "row", in the geometric mean or as a "product".
      detached: whether that ratio is a constant.
      scale: a constant factor of the estimate.
      coef: the coefficient.
      place: "loss", "reward" (summed over the row) or "advantage" (less than the mean of the batch, as in ART).
      policy: the array of the policy.
      reference: the array of the reference.
      shift: how many positions to the right the reference is moved.
      swapped: whether the direction is KL(ref || pi).
      early: whether a KL in the reward is taken off before the rewards are compared, where the system does so after.
      centered: whether a KL in the advantage has its mean taken off.
    """

    estimator: str = "k3"
    gradient: str = "value"
    max_ratio: float | None = None
    log_ratio_clip: float | None = None
    value_clip: float | None = None
    corrected: bool = False
    ratio: str = "token"
    detached: bool = False
    scale: float = 1.0
    coef: float = 0.0
    place: str = "loss"
    policy: str = "log_probs"
    reference: str = "ref_log_probs"
    shift: int = 0
    swapped: bool = False
    early: bool = False
    centered: bool = True


@dataclasses.dataclass(frozen=True)
class RecipeStep:
    """A call of the library by the arguments that differ from the header's.

    Attributes:
      arguments: keyword arguments that override the header's; None leaves an argument at its default.
      scale: factor of the result.
      swapped: whether the two policies of a correction are exchanged.
      weights: power of the correction's weights, in the correction or in a policy loss.
      shift: how many positions to the right the sampler is moved in a correction.
      normalized: whether the weights of a correction are divided by their mean over the batch.
      policy: the array of the numerator of a correction; None takes that of the header.
      flipped: whether advantages and result are negated, so that the smaller of two losses is taken.
      summed: whether the ratio of a row is the product of its ratios, not their geometric mean.
      outside: a ratio beyond the clips of a loss is at its "bound", or its token is left out, "masked"; "clipped" takes
        the clipped surrogate alone.
      weight_gradient: whether the clipped ratio of CISPO is differentiated, too.
    """

    arguments: Arguments = ()
    scale: float = 1.0
    swapped: bool = False
    weights: int = 1
    shift: int = 0
    normalized: bool = False
    policy: str | None = None
    flipped: bool = False
    summed: bool = False
    outside: str = "bound"
    weight_gradient: bool = False


@dataclasses.dataclass(frozen=True)
class AdvantageStep(RecipeStep):
    """From rewards to advantages.

    Attributes:
      groups: rows of a group, a key of `advantages.GROUPINGS`.
      center: what is subtracted from a reward, a key of `advantages.CENTERS`; "mean" is the header's own.
      root: whether epsilon is added to the variance, not to the standard deviation.
      whiten: what the advantages are normalised over once more: "none", "tokens" or "rows".
      whiten_ddof: of the standard deviation of `whiten`.
      whiten_eps: added to that standard deviation.
      per_length: whether they are divided by the length of their row.
      discount: factor per token that follows in the row.
      clip: largest magnitude; None does not clip.
      skip: a function of the library whose step is left out.
      reward_scale: factor of the rewards.
      kl_coef: of a KL in the reward besides the header's KL term.
      kl_estimator: of that KL.
    """

    groups: str = "recorded"
    center: str = "mean"
    root: bool = False
    whiten: str = "none"
    whiten_ddof: int = 1
    whiten_eps: float = 1e-8
    per_length: bool = False
    discount: float = 1.0
    clip: float | None = None
    skip: str | None = None
    reward_scale: float = 1.0
    kl_coef: float = 0.0
    kl_estimator: str = "k1"


@dataclasses.dataclass(frozen=True)
class ReductionRecipe:
    """From values per token to a scalar.

    Attributes:
      mode: as in `token_weights`.
      max_length: the same.
      empty_rows: the same.
      denominator: the same; None takes the recorded `divisor` where tokens are counted.
      share: the part of the recorded `divisor` that falls to the rows of the dump.
      groups: the ids of "prompt_mean": "group_ids" or "micro_batch_ids".
      eps_batch: added to the number of tokens of the batch.
      eps_row: added to the number of tokens of a row.
      micro_batches: number of equal micro-batches whose means are combined; 1 is the whole batch, 0 the recorded ones.
      parts: how they are combined: "mean", "sum", or "rows", a mean weighted by their rows.
      scale: a constant factor.
      rows: rows that count: "all", or "spread" (groups of equal rewards are dropped).
    """

    mode: str = "token_mean"
    max_length: float | None = None
    empty_rows: str = "drop"
    denominator: float | None = None
    share: float = 1.0
    groups: str = "group_ids"
    eps_batch: float = 0.0
    eps_row: float = 0.0
    micro_batches: int = 1
    parts: str = "mean"
    scale: float = 1.0
    rows: str = "all"


@dataclasses.dataclass(frozen=True)
class Entropy:
    """Terms of the recorded entropy, which has no gradient in the log-probs.

    Attributes:
      coef: of the bonus, `-coef` times the entropy; a negative one is a penalty.
      reduction: of the bonus: "loss", as the policy loss, or "token_mean", the mean over the tokens of a micro-batch.
      quantile: the share of tokens, of highest entropy in a micro-batch, that have a policy loss and a bonus.
    """

    coef: float = 0.0
    reduction: str = "loss"
    quantile: float = 1.0


@dataclasses.dataclass(frozen=True)
class Gradient:
    """How the loss is differentiated.

    Attributes:
      scale: a constant factor.
      through_kl: whether the KL term has a gradient.
      through_policy: whether the policy loss has one.
    """

    scale: float = 1.0
    through_kl: bool = True
    through_policy: bool = True


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The settings of all stages, in the order of the data.

    `mask_rule` makes the recorded mask, `mask` is the rule of the loss on top of it. `rounding` is a stage and a dtype:
    from that stage on, results are rounded to that dtype.
    """

    mask_rule: MaskRule = MaskRule()
    log_probs: LogProbRecipe = LogProbRecipe()
    reference: LogProbRecipe = LogProbRecipe()
    mask: MaskRule = MaskRule()
    ratio: Ratio = Ratio()
    correction: RecipeStep | None = None
    kl: Kl | None = None
    advantage: AdvantageStep | None = None
    loss: RecipeStep | None = None
    entropy: Entropy = Entropy()
    reduction: ReductionRecipe = ReductionRecipe()
    kl_reduction: ReductionRecipe | None = None
    kl_mask: MaskRule = MaskRule()
    gradient: Gradient = Gradient()
    rounding: tuple[tuple[str, str], ...] = ()

    def changed(self, stage: str, **settings: Any) -> "Recipe":
        """Returns the recipe with other settings of one stage."""
        changes: dict[str, Any] = {stage: dataclasses.replace(getattr(self, stage), **settings)}
        return dataclasses.replace(self, **changes)
