"""The metrics of a run: group, meaning, healthy and sick values of each, and the field to turn.

TensorBoard and the page of a run order metrics by group; docs/metrics.md is made from the table.
"""

import re
from typing import NamedTuple

from train.rl.kl_metrics import KL_ESTIMATE, KL_EXACT, largest_of


class MetricEntry(NamedTuple):
    """A metric, or several with a number in their name.

    Attributes:
      name: with N or K in place of a number.
      meaning: its formula in words; means are over the tokens of a step unless it says otherwise.
      healthy, sick: values, and for the latter what to do.
    """

    group: str
    name: str
    meaning: str
    healthy: str
    sick: str

    def matches(self, metric: str) -> bool:
        """Whether a logged name is of this metric."""
        return bool(re.fullmatch(re.sub(r"(?<=_)[NK](?=_|$)", r"\\d+", self.name), metric))


GLOSSARY = (
    # What the task wants.
    MetricEntry(
        "reward",
        "reward",
        "mean over the rollouts of the scalar reward, before any KL is taken off",
        "rises and levels off",
        "near 1 while `accuracy` falls: the verifier is fooled; raise `kl.loss.coef`. Constant: all rewards of a group "
        "are equal; take easier or harder problems, or raise `rollout.samples_per_prompt`",
    ),
    MetricEntry(
        "reward",
        "correct",
        "share of the rollouts that the task judges right",
        "as `accuracy` / 100",
        "well above `accuracy`: the policy learns the training prompts by heart",
    ),
    MetricEntry(
        "reward",
        "accuracy",
        "percent of the held-out prompts answered right, sampled at `temperature`, with the same keys each time",
        "rises; of 512 prompts at 50 %, chance moves it by 2 points",
        "falls while `reward` rises: see `reward`. Falls with it: lower `optim.learning_rate`",
    ),
    MetricEntry(
        "reward",
        "accuracy_greedy",
        "the same with the most probable token at each position",
        "at or above `accuracy`",
        "falls while `accuracy` rises: the distribution gets sharper around wrong answers",
    ),
    MetricEntry(
        "reward",
        "finished",
        "share of the completions that ended by themselves and not at the limit of their length",
        "near 1",
        "falls: raise `data.max_completion_length`, or reward short answers",
    ),
    MetricEntry(
        "reward",
        "completion_length",
        "mean tokens of a completion",
        "settles",
        "grows to the limit, or shrinks to a few tokens: the reward or `loss.aggregation` pays for length",
    ),
    # How far the policy is from its reference, and from itself before the update.
    MetricEntry(
        "kl",
        KL_ESTIMATE,
        "mean of k3, an estimate of KL(policy || reference), in nats per token",
        "grows slowly; mostly below 1",
        "above `guard.max_kl`: look at `kl_reference_max` first, since one token the policy nearly dropped makes it "
        "jump; then raise `kl.loss.coef` or lower `optim.learning_rate`",
    ),
    MetricEntry(
        "kl",
        largest_of(KL_ESTIMATE),
        "largest k3 at one token",
        "below 1,000",
        "above `guard.max_token_kl`: set `reference.monitor: exact`, and `kl.loss.estimator: exact` if it is trained",
    ),
    MetricEntry(
        "kl",
        KL_EXACT,
        "mean of KL(policy || reference) over the whole vocabulary at each position, in nats",
        "as `kl_reference`, without its jumps",
        "as `kl_reference`",
    ),
    MetricEntry(
        "kl",
        largest_of(KL_EXACT),
        "the largest of these at one position",
        "below 10",
        "as `kl_reference`; the log names the token",
    ),
    MetricEntry(
        "kl",
        "kl_reference_forward",
        "mean of KL(reference || policy) over the whole vocabulary, with `kl.loss.direction: forward`",
        "as `kl_reference`",
        "as `kl_reference`",
    ),
    MetricEntry(
        "kl",
        "kl_reward",
        "mean of the KL that is taken off the rewards, before its coefficient",
        "as `kl_reference`",
        "far from the target of an adaptive controller: change the horizon of `kl.reward.controller`",
    ),
    MetricEntry(
        "kl", "kl_coef", "coefficient of the KL in the reward", "moves slowly", "grows for ever: the target is too low"
    ),
    MetricEntry(
        "kl",
        "kl_loss",
        "the KL term of the loss: the sum of token weight times estimate, before its coefficient",
        "grows slowly",
        "as `kl_reference`",
    ),
    MetricEntry(
        "kl",
        "kl_loss_per_token",
        "mean of the estimate that steers the controller of the KL in the loss",
        "near the target",
        "as `kl_reward`",
    ),
    MetricEntry("kl", "kl_loss_coef", "coefficient of the KL in the loss", "moves slowly", "as `kl_coef`"),
    MetricEntry(
        "kl",
        "kl_advantage",
        "mean estimate that the centred adjustment of the advantages subtracts from each token's",
        "as `kl_reference`",
        "as `kl_reference`, with `kl.advantage.coef`",
    ),
    MetricEntry("kl", "kl_advantage_coef", "coefficient of the adjustment", "moves slowly", "as `kl_coef`"),
    MetricEntry(
        "kl",
        "ppo_kl",
        "mean of log pi_old - log pi: how far the updates of a step have moved the policy, k1 of KL(old || policy)",
        "0 in the first update of a batch, then below 0.02",
        "above 0.1: lower `optim.learning_rate` or `optim.updates_per_batch`",
    ),
    # How far the sampler, and what it sampled, is from the policy that is trained.
    MetricEntry(
        "mismatch",
        "rollout_kl",
        "mean of k3 of KL(sampler || policy) during the updates",
        "below 1e-9 in float32, below 1e-3 in bfloat16, without a lag; else as `ppo_kl`",
        "grows: a lag, another dtype, or other weights in the server; correct it (`correction`) or lower "
        "`rollout.policy_lag`",
    ),
    MetricEntry(
        "mismatch",
        "rollout_log_prob_error",
        "largest |log-prob of the sampler - log-prob of the trainer| of a sampled token before the first update",
        "1e-5 in float32, below 0.5 in bfloat16",
        "above 1: other weights, another template or temperature, or a cut of the vocabulary that was not recorded",
    ),
    MetricEntry(
        "mismatch", "mismatch_k1", "k1 of KL(sampler || policy) before the first update", "near 0", "as `rollout_kl`"
    ),
    MetricEntry("mismatch", "mismatch_k3", "k3 of the same", "as `rollout_kl` at its start", "as `rollout_kl`"),
    MetricEntry(
        "mismatch",
        "mismatch_k3_part_N_of_K",
        "`mismatch_k3` of one part of the longest completion, with `rollout.mismatch_by_position`",
        "equal parts",
        "grows along a completion: an error of positions or of the KV cache",
    ),
    MetricEntry(
        "mismatch",
        "mismatch_chi_squared",
        "mean of ratio^2 - 1, the variance of the ratios of policy to sampler",
        "below 0.01",
        "above 1: a few tokens have most of the weight; correct with a bound",
    ),
    MetricEntry(
        "mismatch",
        "mismatch_perplexity_ratio",
        "mean over sequences of the trainer's perplexity over the sampler's",
        "1",
        "above 1.05: as `rollout_log_prob_error`",
    ),
    MetricEntry(
        "mismatch",
        "correction_sample_size",
        "(sum w)^2 / (n sum w^2) of the weights of `correction`: the share of the sample that is left in effect",
        "above 0.9",
        "below 0.5: lower the lag, or tighten the bound",
    ),
    MetricEntry(
        "mismatch",
        "correction_clipped",
        "share of tokens whose weight is at a bound",
        "below 0.05",
        "as `correction_sample_size`",
    ),
    MetricEntry(
        "mismatch",
        "correction_rejected",
        "share of tokens that `correction` drops",
        "below 0.05",
        "as `correction_sample_size`",
    ),
    MetricEntry(
        "mismatch",
        "routing_flips",
        "share of pairs of token and expert layer where the trainer's router would choose other experts than recorded",
        "below 0.05",
        "grows: replay the routes (`routing.replay: rollout`)",
    ),
    MetricEntry(
        "mismatch",
        "routing_flips_layer_N",
        "the same of one layer",
        "equal layers",
        "one layer alone: its weights differ",
    ),
    MetricEntry(
        "mismatch",
        "routing_flips_lag_N",
        "`routing_flips` of a step whose rows all were sampled N RL steps before, in a run with a lag",
        "grows slowly with N",
        "far above the flips of lag 0: lower the lag or the learning rate, or replay the routes",
    ),
    MetricEntry(
        "mismatch",
        "routing_lost",
        "share of these pairs where other experts than the recorded ones were used",
        "0 with replay, unless `routing.threshold` replaces some",
        "above 0 with replay: routes of another model or in another order",
    ),
    MetricEntry(
        "mismatch",
        "routing_lost_layer_N",
        "the same of one layer, with `routing.verify`",
        "0",
        "above 0: the run ends",
    ),
    MetricEntry(
        "mismatch",
        "routing_agreement",
        "share of tokens whose recorded experts the first router with experts chooses, with `routing.verify`",
        "near 1",
        "below `routing_agreement_before` or `routing_agreement_after`: the run ends, as routes are shifted",
    ),
    MetricEntry(
        "mismatch",
        "routing_agreement_before",
        "the same with the recorded experts of the token before",
        "far below `routing_agreement`",
        "above it: routes are one token early",
    ),
    MetricEntry(
        "mismatch",
        "routing_agreement_after",
        "the same with the recorded experts of the token after",
        "far below `routing_agreement`",
        "above it: routes are one token late",
    ),
    MetricEntry(
        "mismatch",
        "routing_missing",
        "share of these pairs without a recorded route",
        "0 with replay",
        "rows of another source",
    ),
    # The policy and its update.
    MetricEntry(
        "policy",
        "entropy",
        "mean entropy of the policy over the whole vocabulary at each position, in nats",
        "falls slowly",
        "near 0: nothing is left to explore; raise `loss.entropy_coef`, the upper clip or the KL. Grows without "
        "bound: lower `optim.learning_rate`",
    ),
    MetricEntry(
        "policy",
        "entropy_coef",
        "coefficient of the entropy bonus in this step, with `loss.entropy_controller: adaptive`",
        "0 while `entropy` is above the target, else moves slowly",
        "at its upper bound for long: raise the bound of `loss.entropy_controller`, or lower its target",
    ),
    MetricEntry(
        "policy", "router_entropy", "mean entropy of the router, in nats", "settles", "near 0: few experts are used"
    ),
    MetricEntry(
        "policy",
        "router_load_layer_N",
        "tokens of the busiest expert of a layer over the mean of its experts",
        "below 3",
        "grows: raise `routing.balance_coef`",
    ),
    MetricEntry(
        "policy",
        "router_least_load_layer_N",
        "tokens of the idlest expert of a layer over the mean of its experts",
        "above 0.1",
        "0: an expert learns nothing; raise `routing.balance_coef`, or set `routing.bias_update_rate`",
    ),
    MetricEntry(
        "policy",
        "router_tokens_layer_N",
        "tokens of each expert of a layer in the updates of a step: a list in the file of metrics alone",
        "the same experts are busy in all steps",
        "one expert alone grows: see `router_load_layer_N`",
    ),
    MetricEntry(
        "policy",
        "router_bias_min",
        "smallest bias of an expert after an update, with `routing.bias_update_rate`",
        "settles",
        "falls without end: an expert stays busy whatever its bias; raise `routing.balance_coef`",
    ),
    MetricEntry(
        "policy",
        "router_bias_max",
        "largest bias of an expert after an update",
        "settles",
        "above the probabilities of a router: biases alone choose; lower `routing.bias_update_rate`",
    ),
    MetricEntry(
        "policy",
        "router_balance_loss",
        "the load-balance loss of the routers, before its coefficient",
        "near the number of active experts: equal loads",
        "grows: raise `routing.balance_coef`",
    ),
    MetricEntry(
        "policy",
        "router_z_loss",
        "mean square of the log of the sum of exp of a router's logits",
        "settles",
        "grows: raise `routing.z_coef`; bfloat16 rounds large logits",
    ),
    MetricEntry(
        "policy",
        "clip_fraction",
        "share of tokens whose clip is active",
        "0 in the first update of a batch, then below 0.2",
        "above 0.3: lower `optim.learning_rate` or `optim.updates_per_batch`",
    ),
    MetricEntry(
        "policy", "loss", "all terms with their coefficients", "no trend to expect", "not finite: see `skipped_updates`"
    ),
    MetricEntry(
        "policy",
        "policy_loss",
        "the sum of token weight times policy loss",
        "near 0: advantages of a group cancel",
        "one sign for many steps: advantages are not centred",
    ),
    MetricEntry(
        "policy",
        "value_loss",
        "the sum of token weight times squared error of the value head, clipped as `loss.value_clip` says",
        "falls, then settles",
        "grows: lower `loss.value_coef` or the learning rate",
    ),
    MetricEntry(
        "policy", "rollout_kl_loss", "the term of `kl.rollout`, before its coefficient", "near 0", "as `rollout_kl`"
    ),
    MetricEntry(
        "policy",
        "grad_norm",
        "norm of the gradient of all trained weights, before it is clipped",
        "settles within a factor of 10",
        "spikes: set `optim.max_grad_norm`; 0: all advantages are 0, see `reward`",
    ),
    # The guard, and the work of sampling and updating.
    MetricEntry(
        "guard",
        "skipped_updates",
        "share of a step's updates that were skipped: not finite, or beyond a limit",
        "0",
        "above 0: the log names the first array that was not finite",
    ),
    MetricEntry(
        "guard",
        "updates_without_gradient",
        "share of updates to which a policy loss of your own gave no gradient, although advantages were not 0",
        "0",
        "1: `loss` does not depend on the log-probs; between: every token is clipped, lower `optim.learning_rate`",
    ),
    MetricEntry(
        "guard",
        "updates_beyond_limit",
        "share of updates that `guard.action: skip` skipped beyond a limit",
        "0",
        "above 0: the log names the limit and the token",
    ),
    MetricEntry(
        "rollout",
        "rollout_lag",
        "mean RL steps between the policy that sampled a row and the one that is trained",
        "`rollout.policy_lag`, or 0",
        "above it: the sampler is behind",
    ),
    MetricEntry(
        "rollout",
        "rollout_occupancy",
        "share of the sampler's slots that held an unfinished row, over all steps of decoding",
        "above 0.7",
        "below 0.5: a few long rows keep the others waiting; set fewer `rollout.slots`",
    ),
    MetricEntry(
        "rollout",
        "rollout_kept_mass",
        "mean probability of the tokens that top-k and top-p left",
        "near the cut that is set",
        "far below it: the log-probs of the cut distribution are far from those of the policy",
    ),
    MetricEntry(
        "rollout",
        "packed_share",
        "share of the packed rows of an update that tokens fill",
        "above 0.8",
        "below 0.5: one row is much longer than the others",
    ),
)
"""Every metric of the trainer; a task's own rewards have their names beside these."""


def metric_of(name: str) -> MetricEntry | None:
    """Returns the entry of a logged name; None for a reward of a task."""
    return next((metric for metric in GLOSSARY if metric.matches(name)), None)


def group_of(name: str) -> str:
    """Returns the group of a metric; rewards of a task, which have names of their own, are in `other`.

    Example:
        >>> group_of("kl_reference"), group_of("grad_norm"), group_of("format")
        ('kl', 'policy', 'other')
    """
    metric = metric_of(name)
    return "other" if metric is None else metric.group


def tag_of(name: str) -> str:
    """Returns the name with which trackers group a metric, `group/metric`; `time/...` has its group already."""
    return name if "/" in name else f"{group_of(name)}/{name}"
