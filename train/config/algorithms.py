"""The algorithms that a config chooses by name, and the sections whose fields are their parameters.

Each family is one table from a name to a function of the library or of optax. The fields of a name, with their types,
defaults and meanings, come from the signature and the docstring of its function, so that a new entry is one line.
"""

from collections.abc import Iterator, Mapping, Sequence
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args

from pydantic import BeforeValidator, Field, create_model

from train.config.signatures import REQUIRED, Parameter, Signature, read_signature
from train.config.types import RANGES, RANGES_OF, Arguments, FunctionName, Section, Table

Scope = Literal["token", "row", "update"]
"""The other tokens that the loss of a token may depend on: none, those of its row, all of the update."""


class PolicyLoss(NamedTuple):
    """A policy loss that a config chooses by name.

    Attributes:
      function: `module:function`.
      scope: the tokens that the loss of a token depends on; "level": its own alone at level "token", else its row.
    """

    function: str
    scope: Scope | Literal["level"]

    def scope_at(self, level: str | None) -> Scope:
        """Returns the scope at a level of the ratio; None for a loss without levels."""
        if self.scope == "level":
            return "token" if level == "token" else "row"
        return self.scope


LOSSES: Mapping[str, PolicyLoss] = {
    "ppo": PolicyLoss("kljax:ppo_clip_loss", "level"),
    "cispo": PolicyLoss("kljax:cispo_loss", "level"),
    "gspo": PolicyLoss("kljax:gspo_loss", "row"),
    "sapo": PolicyLoss("kljax:sapo_loss", "level"),
    "gmpo": PolicyLoss("kljax:gmpo_loss", "row"),
    "vespo": PolicyLoss("kljax:vespo_loss", "row"),
    "dppo": PolicyLoss("kljax:dppo_loss", "token"),
    "m2po": PolicyLoss("kljax:m2po_loss", "update"),
    "a2po": PolicyLoss("kljax:a2po_loss", "row"),
    "gvpo": PolicyLoss("kljax:gvpo_loss", "update"),
    "flowrl": PolicyLoss("kljax:flowrl_loss", "update"),
    "sppo": PolicyLoss("kljax:sppo_loss", "token"),
    "dro": PolicyLoss("kljax:dro_loss", "token"),
    "rec": PolicyLoss("kljax:rec_loss", "row"),
    "topr": PolicyLoss("kljax:topr_loss", "token"),
    "opmd": PolicyLoss("kljax:opmd_loss", "token"),
    "gpg": PolicyLoss("kljax:gpg_loss", "token"),
    "reinforce": PolicyLoss("kljax:reinforce_loss", "token"),
    "importance_sampling": PolicyLoss("kljax:importance_sampling_loss", "token"),
    "clip_cov": PolicyLoss("kljax:clip_cov_loss", "update"),
    "kl_cov": PolicyLoss("kljax:kl_cov_loss", "update"),
    "cross_entropy": PolicyLoss("kljax:cross_entropy_loss", "token"),
}
"""Policy losses; `none` and functions of the user come in addition."""
LOSS_FUNCTIONS: Mapping[str, str] = {name: loss.function for name, loss in LOSSES.items()}
"""Their functions."""
ADVANTAGES: Mapping[str, str] = {
    "grpo": "kljax:grpo_advantages",
    "rloo": "kljax:rloo_advantages",
    "opo": "kljax:opo_advantages",
    "reinforce_plus_plus": "kljax:reinforce_plus_plus_returns",
    "reinforce_plus_plus_baseline": "kljax:reinforce_plus_plus_baseline_advantages",
    "gae": "kljax:gae",
    "maxrl": "kljax:maxrl_advantages",
    "pass_at_k": "kljax:pass_at_k_advantages",
    "gpg": "kljax:gpg_advantages",
    "opmd": "kljax:opmd_advantages",
    "asymre": "kljax:asymre_advantages",
    "otb": "kljax:otb_advantages",
    "iw_opd": "kljax:iw_opd_advantages",
    "jsd": "kljax:jsd_advantages",
    "topd": "kljax:topd_advantages",
    "turn_credit": "kljax:turn_credit_advantages",
}
"""Advantage estimators."""
CORRECTIONS: Mapping[str, str] = {
    "importance_weights": "kljax:importance_weights",
    "truncated_importance_weights": "kljax:truncated_importance_weights",
    "rejection_mask": "kljax:rejection_mask",
    "kl_rejection_mask": "kljax:kl_rejection_mask",
    "divergence_mask": "kljax:divergence_mask",
    "veto_mask": "kljax:veto_mask",
    "off_policy_sequence_mask": "kljax:off_policy_sequence_mask",
    "second_moment_mask": "kljax:second_moment_mask",
    "max_lag": "kljax:max_lag_mask",
}
"""Weights and masks that correct for another sampler."""
CONTROLLERS: Mapping[str, str] = {
    "fixed": "kljax:fixed_kl",
    "adaptive": "kljax:adaptive_kl",
    "pi": "kljax:pi_kl",
    "scheduled": "kljax:scheduled_kl",
}
"""Controllers of a KL coefficient."""
ENTROPY_CONTROLLERS: Mapping[str, str] = {"fixed": "kljax:fixed_kl", "adaptive": "kljax:adaptive_entropy"}
"""Controllers of the entropy coefficient."""
KL_SCHEDULES: Mapping[str, str] = {
    "linear": "optax.schedules:linear_schedule",
    "cosine": "optax.schedules:cosine_decay_schedule",
    "exponential": "optax.schedules:exponential_decay",
    "polynomial": "optax.schedules:polynomial_schedule",
}
"""Schedules of a KL coefficient, from `coef` on."""
OPTIMIZERS: Mapping[str, str] = {
    "adamw": "optax:adamw",
    "adam": "optax:adam",
    "lion": "optax:lion",
    "muon": "optax.contrib:muon",
    "adafactor": "optax:adafactor",
    "sgd": "optax:sgd",
    "rmsprop": "optax:rmsprop",
}
"""Optimizers."""
DEFAULTS: Mapping[tuple[str, str], Any] = {("adamw", "b2"): 0.95, ("adamw", "weight_decay"): 0.0}
"""Defaults that differ from those of the function, by name and parameter."""
SET_BY_TRAINER = ("num_groups", "learning_rate", "init_value", "schedule", "decay_offset")
"""Parameters that the trainer sets, from other fields, or leaves at 0; arrays are supplied by name as well."""
NOT_POLICY_LOSSES: Mapping[str, str] = {
    "append_tail": "a part of distillation from the logits of a teacher",
    "distillation_loss": "kl.loss with a teacher as the reference, and loss.type none",
    "dpo_loss": "needs pairs of completions, one preferred; docs/own-loop.md has a loop",
    "dppo_mask": "a part of dppo",
    "kto_loss": "needs completions that are marked as wanted or not",
    "preference_loss": "needs pairs of completions, one preferred; docs/own-loop.md has a loop",
    "generalized_jsd": "needs the logits of a teacher at every position",
    "reference_kl_loss": "kl.loss",
    "rollout_kl_loss": "kl.rollout",
    "top_k_forward_kl": "needs the logits of a teacher at every position",
    "top_k_with_tail": "a part of distillation from the logits of a teacher",
    "value_loss": "the term of loss.value_coef",
}
"""Functions of `kljax.losses` that `LOSSES` leaves out, and why."""
NOT_ESTIMATORS: Mapping[str, str] = {
    "balanced_advantages": "advantage.scale_by_mean and advantage.balance, after any estimator",
    "broadcast_to_steps": "needs trajectories of several rows",
    "broadcast_to_tokens": "applied to every estimator that gives one advantage per completion",
    "centered_kl_advantages": "kl.advantage",
    "clip_b_mask": "a mask of the loss, from entropies",
    "clip_v_mask": "a mask of the loss, from entropies and expected scores",
    "distillation_advantages": "adjusts other advantages; kl.reward with gamma 0 or kl.loss pull to a teacher",
    "gdpo_advantages": "needs each reward of a completion by itself; the batch holds their sum",
    "groups_with_spread": "selects prompts, and estimates nothing",
    "high_entropy_mask": "a mask of the loss, from entropies",
    "kimi_advantages": "adjusts other advantages at every update",
    "rae_advantages": "needs baselines that are kept from batch to batch, one for each agent",
    "remax_advantages": "needs the reward of a greedy completion of each prompt",
}
"""Functions of `kljax.advantages` that `ADVANTAGES` leaves out, and why."""
NOT_CORRECTIONS: Mapping[str, str] = {
    "RolloutCorrection": "the result of a correction",
    "correct_rollout": "applies the list of corrections",
    "geometric_ratios": "importance_weights with level geometric",
    "loglinear_log_probs": "log-probs of a policy, from the version of each token; docs/own-loop.md has a loss",
    "log_ratios": "differences of log-probs, which nothing is multiplied by",
    "sequence_ratios": "importance_weights with level sequence",
    "token_ratios": "importance_weights with level token",
}
"""Functions of `kljax.ratios` that `CORRECTIONS` leaves out, and why."""


class Algorithm(Section):
    """A choice of one algorithm. A family is a subclass with the fields common to it; a name is a subclass of that."""

    type: str
    """The name of the algorithm."""

    def options(self) -> dict[str, Any]:
        """Returns the arguments that the function of this choice gets from the config."""
        family: type[Any] = type(self).__bases__[0]
        return {name: getattr(self, name) for name in type(self).model_fields if name not in family.model_fields}


class UserFunction(Algorithm):
    """The choice of a function of the user."""

    function: FunctionName
    """custom: your function, `module:function` or `path/to/file.py:function`, imported when the run starts."""
    arguments: Arguments = Table()
    """custom: its keyword arguments."""

    def options(self) -> dict[str, Any]:
        """Returns the arguments as they are given."""
        return dict(self.arguments)


def fields_of(name: str, signature: Signature) -> Iterator[tuple[str, Any, Any, str]]:
    """Yields name, type, default and meaning of each parameter of a function that a config sets."""
    function = signature.target.rpartition(":")[2]
    for parameter in signature.parameters:
        if parameter.type is None or parameter.name in SET_BY_TRAINER:
            continue
        default = DEFAULTS.get((name, parameter.name), parameter.default)
        yield parameter.name, ranged(function, parameter), default, meaning(parameter)


def ranged(function: str, parameter: Parameter) -> Any:
    """Returns the type of a parameter, its numbers with their range.

    Raises:
      LookupError: a number without an entry in `RANGES`.
    """
    members = get_args(parameter.type) if NoneType in get_args(parameter.type) else (parameter.type,)
    if not {int, float} & set(members):
        return parameter.type
    number = RANGES_OF.get((function, parameter.name)) or RANGES.get(parameter.name)
    if number is None:
        raise LookupError(f"{function}: {parameter.name} has no range; add a row to RANGES in train/config/types.py")
    return number | None if NoneType in members else number


def meaning(parameter: Parameter) -> str:
    """Returns the text of a parameter as a sentence; `None` is written `null` in a config."""
    text = parameter.doc.replace("None", "null")
    return f"{text[:1].upper()}{text[1:]}".rstrip(".") + "."


def make_variant(base: type[Any], name: str, target: str, *, hidden: tuple[str, ...] = ()) -> type[Any]:
    """Makes the section of a name: the fields of its base, and the parameters of its function."""
    described = Field(description=base.model_fields["type"].description)
    fields: dict[str, Any] = {"type": (Literal[name], described)}
    for field, annotation, default, text in fields_of(name, read_signature(target)):
        if field not in hidden:
            extra = {} if default is REQUIRED else {"default": default}
            fields[field] = (annotation, Field(description=text, **extra))
    title = "".join(part.capitalize() for part in name.split("_"))
    # The fields carry their texts: pydantic, which looks for them in the source, would take most of the time to start.
    quick = {"use_attribute_docstrings": False}
    return create_model(f"{title}{base.__name__}", __base__=base, __module__=__name__, __cls_kwargs__=quick, **fields)


def make_union(variants: list[type[Any]], default: str | None = None) -> Any:
    """Makes the union of the sections of a family: `{type: name, ...}`, or the name alone; see `choice_of`."""
    return Annotated[Union[tuple(variants)], Field(discriminator="type"), choice_of(variants, default)]  # noqa: UP007


def choice_of(variants: Sequence[type[Any]], default: str | None = None) -> BeforeValidator:
    """Makes the validator that reads a name, `{type: name, ...}`, or a function of the user as a section.

    Args:
      variants: the sections.
      default: the name that a mapping without one has; None makes the name required.
    """

    def expand(value: Any) -> Any:
        value = {"type": value} if isinstance(value, str) else value
        if not isinstance(value, dict):
            return value
        value = value if default is None else {"type": default, **value}
        return _user_function(value, variants) if ":" in str(value.get("type")) else value

    return BeforeValidator(expand)


def _user_function(value: dict[str, Any], variants: Sequence[type[Any]]) -> dict[str, Any]:
    """Rewrites `{type: module:function, any: 1}` to the section `custom`, with `any` among its arguments."""
    section = next((item for item in variants if "function" in item.model_fields), None)
    if section is None:
        return value
    known = {key: item for key, item in value.items() if key in section.model_fields and key != "type"}
    arguments = {key: item for key, item in value.items() if key not in section.model_fields}
    settings = known.get("arguments", {})
    joined = {**settings, **arguments} if isinstance(settings, dict) else settings
    return {**known, "type": "custom", "function": value["type"], "arguments": joined}
