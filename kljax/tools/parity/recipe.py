"""The settings of every stage of an update.

A recipe is immutable: a cause is a recipe with other settings, and a replay remembers its results by them.
"""

import dataclasses
from typing import Any

Arguments = tuple[tuple[str, Any], ...]


@dataclasses.dataclass(frozen=True)
class MaskRule:
    """Which tokens are trained: tokens of the completion, or with faults.

    Attributes:
      shift: how many positions to the right the mask is moved.
      prompt: prompt tokens in it: "none", "all", or "predicted", all but the first.
      left: whether padding on the left of the prompt is in it.
      pad: whether padding behind the completion is in it.
      extra: the number of tokens behind the completion that are in it.
      before: the number of tokens before the completion that are in it.
      last: which rows have their last token in it: "all", "cut" (only rows without an end-of-sequence token), "none".
      cut: whether rows without an end-of-sequence token, cut at the limit, are in it.
      first: whether the first token of each row is in it.
      size: the number of tokens of a row that are in it; None takes all.
      tail: the number of tokens at the end of a row that are in it; None takes all.
      inside: whether tokens within rows are in it that the record leaves out, from the mask or from the gradient.
      final: whether the last row is in it.
      longest: whether it starts behind the longest prompt of the batch.
    """

    shift: int = 0
    prompt: str = "none"
    left: bool = False
    pad: bool = False
    extra: int = 0
    before: int = 0
    last: str = "all"
    cut: bool = True
    first: bool = True
    size: int | None = None
    tail: int | None = None
    inside: bool = True
    final: bool = True
    longest: bool = False


@dataclasses.dataclass(frozen=True)
class LogProbRecipe:
    """How log-probs follow from logits.

    Attributes:
      temperature: divides the logits.
      softcap: bound of the logits, `cap * tanh(z / cap)`, before the temperature; None does not bound.
      logit_scale: multiplies the logits first.
      vocab_size: number of real ids; the columns after it are padding. None counts all columns.
      top_p: mass of the set that is renormalised over; None takes the whole vocabulary.
      top_k: the number of largest logits that are summed over, besides that of the token; None takes all.
      without: an id that is left out of the sum, but for the token's own; None leaves none out.
      shift: how many positions later than its own a token's logits are read.
      adapter: whether the adapter is on; off gives the log-probs of the other policy.
      logits_dtype: dtype that logits are rounded to before the softmax; None keeps the recorded one.
      moved: how many positions to the right the log-probs are moved.
      rows: the order of the rows, a key of `ROW_ORDERS`.
      source: an array that takes their place; None scores the logits.
      scale: a factor, such as that of bits in place of nats.
    """

    temperature: float = 1.0
    softcap: float | None = None
    logit_scale: float = 1.0
    vocab_size: int | None = None
    top_p: float | None = None
    top_k: int | None = None
    without: int | None = None
    shift: int = 0
    adapter: bool = True
    logits_dtype: str | None = None
    moved: int = 0
    rows: str = "same"
    source: str | None = None
    scale: float = 1.0


@dataclasses.dataclass(frozen=True)
class Ratio:
    """The importance ratio `exp(log_probs - old)`.

    Attributes:
      old: the array of the policy in the denominator.
      shift: how many positions to the right that array is moved.
      rows: the order of its rows, a key of `ROW_ORDERS`.
      own: the micro-batch whose old policy is the policy itself: "none", "first" or "last".
      swapped: whether it is `exp(old - log_probs)`.
      factor: of its logarithm.
      dtype: that its logarithm is rounded to; None keeps it.
      log_ratio_clip: largest size of its logarithm, whose gradient is 0 outside; None does not clip.
      recorded: whether the recorded ratio takes its place, after a fault without a cause.
    """

    old: str = "old_log_probs"
    shift: int = 0
    rows: str = "same"
    own: str = "none"
    swapped: bool = False
    factor: float = 1.0
    dtype: str | None = None
    log_ratio_clip: float | None = None
    recorded: bool = False


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
      ratio: which ratio that is: of the "token", of the "row" in the geometric mean, to the "sampler", or "inverse".
      level: "token", or "row": the estimate is that of the mean log-probs of a row.
      scale: a constant factor of the estimate.
      offset: added to the estimate.
      floor: the smallest estimate; None does not bound.
      dtype: that the log-ratio is rounded to; None keeps it.
      weighted: whether the rollout correction's weights multiply it in the loss.
      trusted: whether the loss has it only where its ratio is within the clips.
      coef: the coefficient.
      place: "loss", "reward" (summed over the row) or "advantage" (less than the mean of the batch, as in ART).
      policy: the array of the policy.
      reference: the array of the reference.
      shift: how many positions to the right the reference is moved.
      swapped: whether the direction is KL(ref || pi).
      padded: whether a KL in the reward is summed over padding, too.
      at_end: whether the last token of a row has its whole KL in the reward.
      per_length: whether a KL in the reward is divided by the tokens of its row.
      moved: how many positions to the right a KL in the reward is moved.
      detached: whether the importance ratio is a constant.
      bound: largest size of the estimate before its importance ratio, in place of `value_clip`; None does not bound.
      early: whether a KL in the reward is taken off before the rewards are compared, where the system does so after.
      centered: whether a KL in the advantage has its mean taken off.
      mean: the tokens of that mean, of the "batch" or of the "row".
      mean_eps: added to the number of tokens of that mean; None takes that of the reduction.
    """

    estimator: str = "k3"
    gradient: str = "value"
    max_ratio: float | None = None
    log_ratio_clip: float | None = None
    value_clip: float | None = None
    corrected: bool = False
    ratio: str = "token"
    level: str = "token"
    scale: float = 1.0
    offset: float = 0.0
    floor: float | None = None
    dtype: str | None = None
    weighted: bool = False
    trusted: bool = False
    coef: float = 0.0
    place: str = "loss"
    policy: str = "log_probs"
    reference: str = "ref_log_probs"
    shift: int = 0
    swapped: bool = False
    padded: bool = False
    at_end: bool = False
    per_length: bool = False
    moved: int = 0
    detached: bool = False
    bound: float | None = None
    early: bool = False
    centered: bool = True
    mean: str = "batch"
    mean_eps: float | None = None


@dataclasses.dataclass(frozen=True)
class RecipeStep:
    """A call of the library by the arguments that differ from the header's.

    Attributes:
      arguments: keyword arguments that override the header's; None leaves an argument at its default.
      scale: factor of the result.
      swapped: whether the two policies of a ratio are exchanged.
      weights: power of the correction's weights, in the correction or in a policy loss.
      shift: how many positions to the right the sampler is moved in a correction.
      rows: the order of the rows of the sampler in a correction, or of the advantages; a key of `ROW_ORDERS`.
      dtype: that the log-ratio of a correction is rounded to; None keeps it.
      prefix: whether a weight of a correction is the product of the ratios up to its token.
      end: the weight of the last token of each row: "own", "one", or "unsampled", with 0 as the sampler's log-prob.
      veto: rows with a token whose ratio is below it have the weight 0.
      rejects: whether tokens of weight 0 are in no sum and no divisor of the loss.
      normalized: the tokens whose mean the weights of a correction are divided by: "none", "batch", "row", or "rows",
        the mean of the means of rows, or all "columns"; "free" divides by the mean of the batch before the bounds.
      policy: the array of the numerator of a correction; None takes that of the header.
      flipped: whether advantages and result are negated, so that the smaller of two losses is taken.
      added: factor of the terms that a policy loss adds to itself, such as the KL term of prime-rl.
      row_ratio: how a loss per row reduces log-ratios: "mean", "sum", or "padded mean", over the padded length.
      columns: whether token t has the advantage of row t.
      moved: how many positions to the right the advantages of tokens are moved.
      recorded: whether recorded weights multiply the loss, where the header has no correction.
      max_drift: rows of negative advantage whose mean of `old - log_probs` is above it are masked; None masks none.
      max_mismatch: rows whose mean size of `old - rollout` is above it are masked; None masks none.
      max_row_distance: rows whose geometric mean of old policy over sampler is further from 1 are masked; None masks
        none.
      outside: a ratio beyond the clips of a loss is at its "bound", or its token is left out: "masked", or
        "masked side" where PPO has no gradient. "clipped" takes the clipped surrogate alone.
      dual_both: whether the dual clip bounds the loss of positive advantages, too.
      trust: the array whose probabilities a trust region is around; None takes the old policy.
      weight_gradient: whether the clipped ratio of CISPO is differentiated, too.
    """

    arguments: Arguments = ()
    scale: float = 1.0
    swapped: bool = False
    weights: int = 1
    shift: int = 0
    rows: str = "same"
    dtype: str | None = None
    prefix: bool = False
    end: str = "own"
    veto: float = 0.0
    rejects: bool = False
    normalized: str = "none"
    policy: str | None = None
    flipped: bool = False
    added: float = 1.0
    row_ratio: str = "mean"
    columns: bool = False
    moved: int = 0
    recorded: bool = False
    max_drift: float | None = None
    max_mismatch: float | None = None
    max_row_distance: float | None = None
    outside: str = "bound"
    dual_both: bool = False
    trust: str | None = None
    weight_gradient: bool = False


@dataclasses.dataclass(frozen=True)
class AdvantageStep(RecipeStep):
    """From rewards to advantages.

    Attributes:
      groups: rows of a group, a key of `GROUPINGS`.
      members: rows whose rewards make the statistics of a group, a key of `MEMBERS`.
      root: whether epsilon is added to the variance, not to the standard deviation.
      rewards: what is compared: "recorded" rewards, or a key of `REWARDS`.
      reward_rows: the order of the rows of the rewards, a key of `ROW_ORDERS`.
      length_penalty: times the length over that of the longest completion, off the reward.
      buffer: tokens before the longest completion in which the reward falls by 1; None has no such penalty.
      whiten: what the advantages are normalised over once more: "none", "tokens", "rows", "centered" over tokens, or
        "mean absolute", which divides by that of the tokens.
      whiten_ddof: of the standard deviation of `whiten`.
      whiten_eps: added to that standard deviation.
      per_length: whether they are divided by the length of their row.
      discount: factor per token that follows in the row.
      clip: largest magnitude; None does not clip.
      low: the smallest advantage; None does not clip.
      high: the largest one; None does not clip.
      negative: factor of negative advantages.
      sign: whether only their sign is left.
      skip: a function of the library whose step is left out.
      whitening: parts of the system's own whitening: "both", "center", "scale", "mean added back", or "padded", whose
        mean is over padding, too.
      whiten_over: the rows that the system's own whitening is of: the "batch", or a key of `WHITENED_TOGETHER`.
      center: what is subtracted from a reward, a key of `CENTERS`.
      divisor: what divides a centered reward, a key of `DIVISORS`.
      floor: the smallest divisor, before epsilon.
      reward_scale: factor of the rewards.
      reward_clip: largest magnitude of a reward; None does not clip.
      reward_at: the token that has the reward of a row: "last", "before last", "first", "last column" or "every".
      cut_penalty: subtracted from the reward of rows that are cut at the limit.
      cut_reward: the reward of rows that are cut at the limit; None keeps it.
      kl_coef: of a KL in the reward besides the header's KL term.
      kl_estimator: of that KL.
      values_shift: how many positions to the right the values of GAE are moved.
      returns: whether they are the returns, to which the values are added.
      bootstrap: whether the last value follows a row that is cut at the limit, in GAE.
      forward: whether returns are summed from the first token.
      offset: added to each advantage.
      place: the tokens that have an advantage: "all", or the "last" of a row.
    """

    groups: str = "recorded"
    members: str = "all"
    root: bool = False
    rewards: str = "recorded"
    reward_rows: str = "same"
    length_penalty: float = 0.0
    buffer: float | None = None
    whiten: str = "none"
    whiten_ddof: int = 1
    whiten_eps: float = 1e-8
    per_length: bool = False
    discount: float = 1.0
    clip: float | None = None
    low: float | None = None
    high: float | None = None
    negative: float = 1.0
    sign: bool = False
    skip: str | None = None
    whitening: str = "both"
    whiten_over: str = "batch"
    center: str = "mean"
    divisor: str = "std"
    floor: float = 0.0
    reward_scale: float = 1.0
    reward_clip: float | None = None
    reward_at: str = "last"
    cut_penalty: float = 0.0
    cut_reward: float | None = None
    kl_coef: float = 0.0
    kl_estimator: str = "k1"
    values_shift: int = 0
    returns: bool = False
    bootstrap: bool = False
    forward: bool = False
    offset: float = 0.0
    place: str = "all"


@dataclasses.dataclass(frozen=True)
class ReductionRecipe:
    """From values per token to a scalar.

    Attributes:
      mode: as in `token_weights`.
      max_length: the same.
      empty_rows: the same.
      denominator: the same.
      groups: the ids of "prompt_mean": "group_ids" or "micro_batch_ids".
      eps_batch: added to the number of tokens of the batch.
      eps_row: added to the number of tokens of a row.
      micro_batches: number of equal micro-batches whose means are combined; 1 is the whole batch, 0 the recorded ones.
      split: the rows of a micro-batch: "contiguous" ones, or every n-th, "strided".
      size: rows of a micro-batch where a smaller last one is left out; 0 leaves none out.
      repeated: number of rows at the start that stand twice.
      parts: how they are combined: "mean", "sum", or "rows", a mean weighted by their rows.
      scale: a constant factor.
      rows: rows that count: "all", "spread" (groups of equal rewards are dropped), or "positive" (rows without a
        positive advantage are dropped).
      divisor: rule of the mask that the divisors count; None takes the mask of the sums.
      summed: rule of the mask that the sums are of, where the divisors keep theirs.
      longest: whether `max_length` is the longest row of each micro-batch.
      length_power: a row is divided by this power of its length once more; 0 does not divide.
      offset: added to the loss.
    """

    mode: str = "token_mean"
    max_length: float | None = None
    empty_rows: str = "drop"
    denominator: float | None = None
    groups: str = "group_ids"
    eps_batch: float = 0.0
    eps_row: float = 0.0
    micro_batches: int = 1
    split: str = "contiguous"
    size: int = 0
    repeated: int = 0
    parts: str = "mean"
    scale: float = 1.0
    rows: str = "all"
    length_power: float = 0.0
    divisor: MaskRule | None = None
    summed: MaskRule = MaskRule()
    longest: bool = False
    offset: float = 0.0


@dataclasses.dataclass(frozen=True)
class Entropy:
    """The entropy bonus: `-coef` times the entropy per token, reduced as the policy loss.

    Attributes:
      coef: its coefficient; a negative one is a penalty.
      source: "recorded" entropy, which has no gradient in the log-probs, or "sampled": `-log_probs`, which has.
    """

    coef: float = 0.0
    source: str = "recorded"


@dataclasses.dataclass(frozen=True)
class Gradient:
    """How the loss is differentiated.

    Attributes:
      scale: a constant factor.
      through_kl: whether the KL term has a gradient.
      through_policy: whether the policy loss has one.
      norm: the largest norm of the gradient, which is scaled down to it; None does not bound.
      part_norm: the largest norm of the gradient of each micro-batch; None does not bound.
      clip: the largest magnitude of a number of it; None does not clip.
      micro_batch: the only micro-batch that has one, "first" or "last"; "all" have.
    """

    scale: float = 1.0
    through_kl: bool = True
    through_policy: bool = True
    norm: float | None = None
    part_norm: float | None = None
    clip: float | None = None
    micro_batch: str = "all"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The settings of all stages, in the order of the data.

    `rounding` is a stage and a dtype: from that stage on, results are rounded to that dtype.
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
        """Returns the recipe with other settings of one stage.

        Args:
          stage: an attribute of the recipe that is not None.
          settings: attributes of that stage with their new values.
        """
        changes: dict[str, Any] = {stage: dataclasses.replace(getattr(self, stage), **settings)}
        return dataclasses.replace(self, **changes)
