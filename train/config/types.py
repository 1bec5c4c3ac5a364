"""Types of config fields: names to choose from, number ranges, the base class of sections."""

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

Estimator = Literal["none", "k1", "abs", "k2", "k3", "low_var_kl"]
EstimatorOrExact = Literal[Estimator, "exact"]
RolloutEstimator = Literal["k1", "abs", "k2", "k3"]
KLGradient = Literal["value", "k2", "weighted_k2", "none"]
Aggregation = Literal[
    "token_mean", "token_sum", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm", "prompt_mean"
]
EmptyRows = Literal["drop", "count"]
AdvantageEstimator = Literal["grpo", "rloo", "opo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae"]
PolicyLoss = Literal["ppo", "cispo", "gspo", "none"]
Direction = Literal["reverse", "forward"]
LoraTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
Operations = Literal["+", "+-"]
TaskName = Literal["arithmetic", "gsm8k", "math", "countdown", "jsonl"]
Judge = Literal["math_verify", "strict"]

ESTIMATORS: tuple[str, ...] = get_args(Estimator)
ROLLOUT_ESTIMATORS: tuple[str, ...] = get_args(RolloutEstimator)
KL_GRADIENTS: tuple[str, ...] = get_args(KLGradient)
AGGREGATIONS: tuple[str, ...] = get_args(Aggregation)
EMPTY_ROWS: tuple[str, ...] = get_args(EmptyRows)
ADVANTAGE_ESTIMATORS: tuple[str, ...] = get_args(AdvantageEstimator)
POLICY_LOSSES: tuple[str, ...] = get_args(PolicyLoss)


def _without_repeats(values: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(set(values)) != len(values):
        raise ValueError("an entry is repeated")
    return values


# A plain string in the metadata is the text after "expected" in an error; otherwise type and range make it.
Count = Annotated[int, Field(ge=1, le=10**9)]
CountOrZero = Annotated[int, Field(ge=0, le=10**9)]
Seed = Annotated[int, Field(ge=0, lt=2**31)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
AboveOne = Annotated[float, Field(gt=1)]
EvenCount = Annotated[int, Field(ge=2, le=10**9, multiple_of=2)]
Operand = Annotated[int, Field(ge=1, le=999)]
NumberCount = Annotated[int, Field(ge=2, le=6)]
Text = Annotated[str, Field(min_length=1)]
RunName = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100),
    "text of at most 100 letters, digits, '.', '_' and '-' that starts with a letter or digit",
]
LoraTargets = Annotated[
    tuple[LoraTarget, ...],
    Field(min_length=1, strict=False),
    AfterValidator(_without_repeats),
    "a list, without repeats, of " + ", ".join(get_args(LoraTarget)),
]


class Table(dict[str, Any]):
    """A mapping that is never changed after it is made, so that it can have a hash."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(sorted(self.items(), key=str)))


def _mapping_of(allowed: tuple[type, ...]) -> BeforeValidator:
    """Checks a mapping of text to values of these types as one field; its entries are not fields of the schema."""

    def check(value: Any) -> Any:
        for key, item in value.items() if isinstance(value, dict) else ():
            finite = not isinstance(item, float) or math.isfinite(item)
            if not isinstance(key, str) or type(item) not in allowed or not finite:
                raise ValueError(f"the entry {key!r}: {item!r}")
        return value

    return BeforeValidator(check)


# Dotted paths do not reach into these mappings: `key={name: value}` sets the whole mapping.
TemplateArguments = Annotated[
    dict[str, bool | int | float | str],
    _mapping_of((bool, int, float, str)),
    AfterValidator(Table),
    "a mapping of text to plain values",
]
Weights = Annotated[
    dict[str, float], _mapping_of((int, float)), AfterValidator(Table), "a mapping of names of rewards to numbers"
]


class Section(BaseModel):
    """A frozen group of fields: unknown keys, infinities and silent conversions (text to number, 1 to true) fail."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


def tag_defaults_to(key: str, tag: str) -> Callable[[Any], Any]:
    """Lets an override change part of a union (`reference.monitor=true`) without repeating its tag."""
    return lambda value: {key: tag, **value} if isinstance(value, dict) else value
