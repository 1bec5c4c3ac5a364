"""The needs of a config, derived once from its coefficients and the signatures of the functions that it chooses.

Also the layout of its batches: where prompts end, and which rows share one.
"""

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from train.config.algorithms import ADVANTAGES, CORRECTIONS, LOSS_FUNCTIONS, LOSSES, Algorithm, Scope, UserFunction
from train.config.kl import DEFAULT_CONTROLLER, KLTerm
from train.config.loss import DEFAULT_ENTROPY_CONTROLLER, NoLoss
from train.config.schema import Config
from train.config.signatures import Parameter, Signature, forget_signatures, read_signature

COMPUTED = ""
"""Stands for an array that is computed where it is read, from fields that every batch has."""
LOSS_ARRAYS: Mapping[str, str] = {
    "log_probs": COMPUTED,
    "mask": COMPUTED,
    "entropies": COMPUTED,
    "key": COMPUTED,
    "old_log_probs": COMPUTED,
    "advantages": COMPUTED,
    "rewards": "rewards",
    "group_ids": "group_ids",
    "rollout_log_probs": "rollout_log_probs",
    "ref_log_probs": "ref_log_probs",
    "teacher_log_probs": "ref_log_probs",
}
"""The arrays that a policy loss can name, and the field of the batch that each comes from."""
CORRECTION_ARRAYS = ("log_probs", "sampling_log_probs", "mask", "advantages", "lags")
"""The arrays that a correction can name."""
ADVANTAGE_ARRAYS: Mapping[str, str] = {
    "mask": COMPUTED,
    "rewards": "rewards",
    "token_rewards": "rewards",
    "group_ids": "group_ids",
    "log_probs": "old_log_probs",
    "old_log_probs": "old_log_probs",
    "rollout_log_probs": "rollout_log_probs",
    "ref_log_probs": "ref_log_probs",
    "teacher_log_probs": "ref_log_probs",
    "values": "values",
    "sum_squared_probs": "sum_squared_probs",
    "turn_ids": "turn_scores",
    "turn_scores": "turn_scores",
    "scored": "turn_scores",
}
"""The arrays that an advantage estimator can name, and the field of the batch that each comes from."""


class SteeredTerm(NamedTuple):
    """A term of the loss whose coefficient can follow a metric of the updates.

    Attributes:
      measured: the metric that the controller is told.
      coefficient: the metric that logs the coefficient in use.
    """

    measured: str
    coefficient: str


STEERED: Mapping[str, SteeredTerm] = {
    "loss": SteeredTerm("kl_loss_per_token", "kl_loss_coef"),
    "entropy": SteeredTerm("entropy", "entropy_coef"),
}
"""Controllers that move after the updates on a batch."""
FROM_ZERO = ("pi", "scheduled")
"""Controllers whose coefficient can leave 0."""


AVERAGES = ("ema", "bema")
"""Sources of a reference that average the policy over the steps, from the policy on."""


@dataclass(frozen=True)
class Layout:
    """How the rows of a batch go through the model. Static in compiled programs.

    Attributes:
      prompt: P, the most tokens of a prompt.
      completion: C, the most tokens after it; None: as many as the row has.
      length: T, the most tokens of a row.
      group: consecutive rows that share one prompt, which goes through the layers once for all of them.
    """

    prompt: int = 0
    completion: int | None = None
    length: int = 0
    group: int = 1

    @classmethod
    def of(cls, config: Config) -> "Layout":
        """Returns the layout of a rollout batch: as many rows share a prompt as a device has in one micro-batch."""
        data = config.data
        shares = config.optim.share_prompts
        group = math.gcd(config.rollout.samples_per_prompt, config.rows_per_micro_batch()) if shares else 1
        return cls(data.max_prompt_length, data.completion_length(), data.row_length(), group)

    def slots(self, rows: int) -> int:
        """Returns the slots in which so many rows go through the model."""
        if self.group == 1:
            return rows * self.length
        return rows // self.group * self.prompt + rows * (self.completion or 0)


@dataclass(frozen=True)
class Plan:
    """The passes, fields and terms that a config needs. Steps, objective and loop read it; it is made once.

    Attributes:
      config: the config that has these needs. Makers read it; the functions that they make get its sections.
      loss: the signature of the policy loss; None without one.
      advantage: the signature of the estimator; None where the loss reads no advantages.
      corrections: the signatures of the corrections, in their order.
      controllers: the placements of the KL whose coefficient is in use: "reward", "loss", "advantage"; and "entropy",
        if the coefficient of the entropy is steered.
      moving: the ones among them whose coefficient changes during the run.
      reference: whether a term or a metric reads the reference.
      ref_log_probs: whether one reads its log-probs of the sampled tokens; the exact KL does not.
      keeps_ref_log_probs: whether these are kept for the rows of a recording, which the reference then scores once.
      exact_kl: whether an update computes the exact KL, as a term or a metric, from the hidden states of the reference.
      exact_loss: whether it is a term of the loss.
      exact_reward: whether the reward has the exact KL.
      shares_head: whether policy and reference share the LM head, which is then frozen.
      old_log_probs: whether old log-probs take a pass. With one update per batch they come from that update, unless
        an earlier step reads them.
      rollout_log_probs: whether one reads the log-probs of the sampler.
      mismatch: whether the mismatch of trainer and sampler is measured.
      value_head: whether a value head is trained.
      sum_squared_probs: whether the sums of the squared probabilities are read.
      turns: most turns of an episode, whose scores the estimator reads; 0: it reads none.
      entropies: whether the loss differentiates entropies.
      key: whether the loss draws random numbers.
      scope: the tokens that the loss of a token depends on; None for a function of the user, of which nothing is known.
      layout: of the rows of a rollout batch.
      num_groups: prompts of a rollout batch.
    """

    config: Config
    loss: Signature | None
    advantage: Signature | None
    corrections: tuple[Signature, ...]
    controllers: tuple[str, ...]
    moving: tuple[str, ...]
    reference: bool
    ref_log_probs: bool
    keeps_ref_log_probs: bool
    exact_kl: bool
    exact_loss: bool
    exact_reward: bool
    shares_head: bool
    old_log_probs: bool
    rollout_log_probs: bool
    mismatch: bool
    value_head: bool
    sum_squared_probs: bool
    turns: int
    entropies: bool
    key: bool
    scope: Scope | None
    layout: Layout
    num_groups: int

    @staticmethod
    def of(config: Config) -> "Plan":
        """Derives the plan of a config.

        Raises:
          LookupError: the function of the user cannot be found.
        """
        return _plan(config)

    @property
    def steers_loss(self) -> bool:
        """Whether the coefficient of the KL in the loss follows the KL, or a schedule, from step to step."""
        return "loss" in self.moving

    @property
    def steered(self) -> tuple[str, ...]:
        """The controllers that the updates on a batch are measured for, and that move after them."""
        return tuple(name for name in self.moving if name in STEERED)

    @property
    def scores_policy(self) -> bool:
        """Whether the policy is scored before the first update of a batch."""
        return self.old_log_probs or self.exact_reward or self.value_head or self.sum_squared_probs

    @property
    def treats_tokens_alone(self) -> bool:
        """Whether the loss can be fused with the LM head."""
        return self.scope == "token"

    @property
    def whole_update(self) -> bool:
        """Whether the loss compares all tokens of an update, which then cannot be split."""
        return self.scope == "update"

    @property
    def rows_move(self) -> bool:
        """Whether the rows of an update may change their micro-batch, as the loss of a token does not depend on it.

        A loss of the user may compare the rows of a micro-batch; one with a key draws numbers for them in their order.
        """
        return self.scope is not None and not self.key

    def measures_sampling_bias(self, *, recorded: bool) -> bool:
        """Whether sampled tokens can be compared with the entropies of the policy, which are of the whole vocabulary.

        They have to be draws of the policy; or of another one whose log-probs are `recorded`, but not of any policy.
        """
        section = self.config.rollout
        source = section.source
        cut = section.top_k > 0 or section.top_p < 1 or section.min_p > 0
        if cut or source.type == "file" or (source.type == "openai" and source.sync == "none"):
            return False
        return recorded or (source.type != "custom" and section.policy_lag == 0 and section.ahead == 0)

    @property
    def fields(self) -> tuple[str, ...]:
        """The optional fields of the batch that the objective reads; some are scored, a rollout brings the others."""
        needs = {
            "rewards": True,
            "group_ids": True,
            "old_log_probs": self.old_log_probs,
            "rollout_log_probs": self.rollout_log_probs,
            "ref_log_probs": self.ref_log_probs,
            "ref_hidden": self.exact_kl,
            "ref_exact_kl": self.exact_reward,
            "values": self.value_head,
            "sum_squared_probs": self.sum_squared_probs,
        }
        return tuple(name for name, needed in needs.items() if needed)


def array_name(parameter: Parameter) -> str:
    """Returns the name of the array that a parameter takes: `rewards` of the shape `[B, T]` are `token_rewards`."""
    per_token = parameter.name == "rewards" and parameter.shape.endswith("T")
    return "token_rewards" if per_token else parameter.name


def arrays_of(signature: Signature, available: Container[str]) -> dict[str, str]:
    """Lists the arrays that a function reads, by parameter; keyword arrays that are not available are left out."""
    return {
        parameter.name: array_name(parameter)
        for parameter in signature.parameters
        if array_name(parameter) in available and (parameter.type is None or not parameter.keyword)
    }


def loss_signature(config: Config) -> Signature | None:
    """Returns the signature of the policy loss, or None for `none`."""
    return None if isinstance(config.loss, NoLoss) else _signature(config.loss, LOSS_FUNCTIONS)


def advantage_signature(config: Config) -> Signature:
    """Returns the signature of the advantage estimator, whether the loss reads advantages or not."""
    return _signature(config.advantage, ADVANTAGES)


def correction_signatures(config: Config) -> tuple[Signature, ...]:
    """Returns the signatures of the corrections, in their order."""
    return tuple(_signature(entry, CORRECTIONS) for entry in config.correction)


def _signature(section: Algorithm, table: Mapping[str, str]) -> Signature:
    return read_signature(section.function if isinstance(section, UserFunction) else table[section.type])


def forget_plans() -> None:
    """Forgets plans and signatures: a notebook may have edited a function since its last command."""
    forget_signatures()
    _plan.cache_clear()


def follows_policy(config: Config) -> bool:
    """Whether the reference changes during the run."""
    section = config.reference
    return section.source in AVERAGES or getattr(section, "refresh_every", None) is not None


def divides_by_length(config: Config) -> bool:
    """Whether the reduction of the loss, of its KL or of the entropy bonus divides by `loss.max_length`."""
    own = (config.kl.loss.aggregation, config.loss.entropy_aggregation)
    return "seq_mean_token_sum_norm" in (config.loss.aggregation, *own)


def is_on(term: KLTerm) -> bool:
    """Whether a term of the KL is part of the objective: its coefficient is above 0, or can come there."""
    return term.coef > 0 or term.controller.type in FROM_ZERO


def switch_of(term: KLTerm) -> tuple[str, object]:
    """Returns the field that makes a term of the KL part of the objective, and its value."""
    return ("coef", term.coef) if term.coef > 0 else ("controller", term.controller.type)


@lru_cache(maxsize=256)
def _plan(config: Config) -> Plan:
    loss = loss_signature(config)
    advantage = advantage_signature(config) if loss is not None and "advantages" in loss else None
    terms = config.kl.terms()
    on = {name: term.estimator for name, term in terms.items() if is_on(term)}
    read = set(arrays_of(loss, LOSS_ARRAYS).values()) if loss is not None else set()
    fields = {LOSS_ARRAYS[name] for name in read}
    steers_entropy = config.loss.entropy_controller.type != DEFAULT_ENTROPY_CONTROLLER.type
    entropy = ("entropy",) if steers_entropy else ()
    if advantage is not None:
        fields |= {ADVANTAGE_ARRAYS[name] for name in arrays_of(advantage, ADVANTAGE_ARRAYS).values()}
    sampled = {name for name, estimator in on.items() if estimator != "exact"}
    sampler = config.loss.old_log_probs == "sampler"
    mismatch = bool(config.correction) or config.rollout.mismatch_by_position > 0
    several = config.optim.updates_per_batch * config.optim.epochs > 1
    monitor = config.reference.monitor
    exact_loss, exact_reward = (on.get(name) == "exact" for name in ("loss", "reward"))
    exact_kl = exact_loss or monitor == "exact"
    ref_log_probs = monitor is True or bool(sampled) or "ref_log_probs" in fields
    return Plan(
        config=config,
        loss=loss,
        advantage=advantage,
        corrections=correction_signatures(config),
        controllers=(*on, *entropy),
        moving=(*(name for name in on if terms[name].controller.type != DEFAULT_CONTROLLER.type), *entropy),
        reference=ref_log_probs or exact_kl or bool(on),
        ref_log_probs=ref_log_probs,
        keeps_ref_log_probs=ref_log_probs and not (exact_kl or exact_reward) and _rows_return_alike(config),
        exact_kl=exact_kl,
        exact_loss=exact_loss,
        exact_reward=exact_reward,
        shares_head=config.lora is not None and config.reference.source != "checkpoint",
        old_log_probs=(several and not sampler)
        or bool(sampled & {"reward", "advantage"})
        or "old_log_probs" in fields
        or mismatch,
        rollout_log_probs=config.kl.rollout.coef > 0 or "rollout_log_probs" in fields or sampler or mismatch,
        mismatch=mismatch,
        value_head="values" in fields,
        sum_squared_probs="sum_squared_probs" in fields,
        turns=_most_turns(config) if "turn_scores" in fields else 0,
        entropies=config.loss.has_entropy_term() or "entropies" in read,
        key="key" in read,
        scope=_scope(config, loss),
        layout=Layout.of(config),
        num_groups=config.rollout.prompts_per_step,
    )


def _most_turns(config: Config) -> int:
    """Returns the most turns of an episode, each of which has a token; without an environment there is one."""
    turns = 1 if config.environment is None else config.environment.max_turns
    return min(turns, config.data.max_completion_length)


def _rows_return_alike(config: Config) -> bool:
    """Whether every epoch repeats the same rows, so that cached reference log-probs stay valid.

    The places of a row in packed rows depend on the other rows of its batch, and so does the rounding.
    """
    source = config.rollout.source
    recorded = source.type == "file" and source.max_reference_mib > 0
    return recorded and not follows_policy(config) and not config.optim.packing


def _scope(config: Config, loss: Signature | None) -> Scope | None:
    """Returns the tokens that the loss of a token depends on, or None where nothing is known."""
    term = config.kl.loss
    policy = _policy_scope(config.loss, loss)
    by_row = is_on(term) and term.importance_corrected and term.importance_level != "token"
    return "row" if by_row and policy == "token" else policy


def _policy_scope(section: Algorithm, loss: Signature | None) -> Scope | None:
    if loss is None:
        return "token"
    if isinstance(section, UserFunction):
        # A function with the name of an axis sums over the devices of an update.
        return "update" if "axis_name" in loss else None
    return LOSSES[section.type].scope_at(section.options().get("level"))
