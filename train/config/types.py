"""Types of config fields: names to choose from, number ranges, the largest number, the base class of sections."""

import math
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from train.config.float32 import FLOAT32_TINY, fits_float32
from train.config.signatures import read_choices
from train.config.storage import address_problem, is_address, local_problem

if TYPE_CHECKING:
    from kljax.typing import Direction, EmptyRows, Estimator, KLGradient, Level
    from kljax.typing import Reduction as Aggregation
else:
    # Read from the source, because importing the library imports JAX.
    Aggregation, Direction, EmptyRows, Estimator, KLGradient, Level = (
        read_choices("kljax._typing", name)
        for name in ("Reduction", "Direction", "EmptyRows", "Estimator", "KLGradient", "Level")
    )
EstimatorOrExact = Literal[Estimator, "exact"]
Monitor = bool | Literal["exact"]
RolloutEstimator = Literal["k1", "abs", "k2", "k3"]
RejectedTokens = Literal["drop", "count"]
OldLogProbs = Literal["trainer", "sampler"]
LoraTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "gate"]
Operations = Literal["+", "+-"]
RECORDING = "recording"
"""The task of recorded completions: their prompts and rewards, and nothing to evaluate on."""
TASKS = ("arithmetic", "gsm8k", "math", "countdown", "word_problems", "reasoning_gym", "jsonl", RECORDING)
Judge = Literal["math_verify", "strict"]
LONGEST_NAME = 255
"""Bytes of the longest name of a file or folder that Linux and macOS take."""


def _without_repeats(values: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(set(values)) != len(values):
        raise ValueError("an entry is repeated")
    return values


def _in_order(steps: tuple[int, int]) -> tuple[int, int]:
    if steps[0] > steps[1]:
        raise ValueError("the first is behind the last")
    return steps


def _not_zero(size: int) -> int:
    if size == 0:
        raise ValueError("no devices")
    return size


def expanded_path(text: str, info: ValidationInfo) -> str:
    """Puts the home directory in place of `~`, and the `start` of the context, if there is one, before other paths.

    Raises:
      ValueError: the text is an address, or a name in it is too long.
    """
    if problem := local_problem(text):
        raise ValueError(problem)
    path = os.path.expanduser(text)
    longest = max(len(os.fsencode(name)) for name in path.split("/"))
    if longest > LONGEST_NAME:
        raise ValueError(f"a name of {longest} bytes, more than {LONGEST_NAME}")
    return os.path.join(info.context["start"], path) if info.context else path


def stored_path(text: str, info: ValidationInfo) -> str:
    """Does the same to a path, and leaves an address in a store as it is.

    Raises:
      ValueError: the address cannot be used.
    """
    if problem := address_problem(text):
        raise ValueError(problem)
    return text.rstrip("/") if is_address(text) else expanded_path(text, info)


def _expanded_directory(value: Any, info: ValidationInfo) -> Any:
    """Does the same to the path of a directory, in whose place true or false may stand."""
    if isinstance(value, bool):
        return value
    if not isinstance(value, str) or not value:
        raise ValueError("no directory")
    return expanded_path(value, info)


def _expanded_function(text: str, info: ValidationInfo) -> str:
    """Does the same to the file of a function; `module:function` and the name of a task stay."""
    source, colon, name = text.rpartition(":")
    return f"{expanded_path(source, info)}{colon}{name}" if source.endswith(".py") else text


# A plain string in the metadata is the text after "expected" in an error; otherwise type and range make it. A tuple
# has the names to suggest.
Count = Annotated[int, Field(ge=1, le=10**9)]
AxisSize = Annotated[
    int, Field(ge=-1, le=10**9), AfterValidator(_not_zero), "an integer >= 1 and <= 1_000_000_000, or -1"
]
CountOrZero = Annotated[int, Field(ge=0, le=10**9)]
# Sizes that memory bounds: larger values are typos that would run out of memory.
Size = Annotated[int, Field(ge=1, le=10**6)]
EvenSize = Annotated[int, Field(ge=2, le=10**6, multiple_of=2)]
Length = Annotated[int, Field(ge=1, le=10**7)]
Lag = Annotated[int, Field(ge=0, le=1000)]
Port = Annotated[int, Field(ge=1, le=65535)]
Seed = Annotated[int, Field(ge=0, lt=2**31)]
Positive = Annotated[float, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0, le=10**6)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Balance = Annotated[float, Field(ge=-1, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
AboveOne = Annotated[float, Field(gt=1)]
AboveMinusOne = Annotated[float, Field(gt=-1)]
Probability = Annotated[float, Field(gt=0, le=1)]
AnyNumber = Annotated[float, "any finite number"]
DegreesOfFreedom = Annotated[int, Field(ge=0, le=1)]
# All problems are listed in memory; a larger range would need gigabytes.
Operand = Annotated[int, Field(ge=1, le=999)]
NumberCount = Annotated[int, Field(ge=2, le=6)]
Text = Annotated[str, Field(min_length=1)]
# A leading `~` is the home directory.
PathText = Annotated[str, Field(min_length=1), AfterValidator(expanded_path), "a path of the file system"]
StoredPath = Annotated[
    str, Field(min_length=1), AfterValidator(stored_path), "a path of the file system, or an address of s3:// or gs://"
]
CacheDirectory = Annotated[bool | str, BeforeValidator(_expanded_directory), "true, false or a path of the file system"]
CommitHash = Annotated[
    str,
    Field(pattern=r"^[0-9a-f]{40}$"),
    "the full hash of a commit, 40 hexadecimal digits (a branch or tag can move)",
]
TracedSteps = Annotated[
    tuple[Count, Count],
    Field(strict=False),
    AfterValidator(_in_order),
    "the first and the last step, as [10, 12]",
]
RunName = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100),
    "text of at most 100 letters, digits, '.', '_' and '-' that starts with a letter or digit",
]
_FUNCTION = r"[^:]+:\w+"
_FORM = "text of the form module:function"
FunctionName = Annotated[str, Field(pattern=f"^{_FUNCTION}$"), AfterValidator(_expanded_function), _FORM]
# Its form is checked with the task.
RewardName = Annotated[str, Field(min_length=1), AfterValidator(_expanded_function), _FORM]
TaskName = Annotated[
    str,
    Field(pattern=f"^({'|'.join(TASKS)}|{_FUNCTION})$"),
    AfterValidator(_expanded_function),
    f"one of {', '.join(TASKS)}, or module:function",
    TASKS,
]
XlaFlags = Literal["auto", "none"]
RematSetting = Literal["auto", "full", "dots"]
SYNCS = ("lora", "weights", "none")
SyncName = Annotated[
    str,
    Field(pattern=f"^({'|'.join(SYNCS)}|{_FUNCTION})$"),
    AfterValidator(_expanded_function),
    f"one of {', '.join(SYNCS)}, or module:function",
    SYNCS,
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
Arguments = Annotated[
    dict[str, bool | int | float | str | None],
    _mapping_of((bool, int, float, str, type(None))),
    AfterValidator(Table),
    "a mapping of names of arguments to plain values",
]
Weights = Annotated[
    dict[str, float], _mapping_of((int, float)), AfterValidator(Table), "a mapping of names of rewards to numbers"
]

RANGES: Mapping[str, Any] = {
    "adam_b1": Decay,
    "adam_b2": Decay,
    "adam_eps_root": NonNegative,
    "adam_learning_rate": Positive,
    "adam_weight_decay": NonNegative,
    "alpha": NonNegative,
    "b1": Decay,
    "b2": Decay,
    "beta": Fraction,
    "clip": Positive,
    "clip_high": NonNegative,
    "clip_low": Fraction,
    "clipping_threshold": Positive,
    "coef": NonNegative,
    "consistent_rms": Positive,
    "ddof": DegreesOfFreedom,
    "decay": Decay,
    "decay_rate": Positive,
    "decay_steps": Count,
    "delta": Positive,
    "dual_clip": AboveOne,
    "end_value": NonNegative,
    "eps": NonNegative,
    "eps_root": NonNegative,
    "exponent": Positive,
    "fraction": Fraction,
    "gamma": Fraction,
    "horizon": Positive,
    "initial_scale": NonNegative,
    "k_negative": Positive,
    "k_positive": Positive,
    "ki": NonNegative,
    "kp": NonNegative,
    "lam": Fraction,
    "lambda_negative": Positive,
    "lambda_positive": Positive,
    "log_ratio_clip": Positive,
    "lower": AnyNumber,
    "mask_high": NonNegative,
    "mask_low": NonNegative,
    "max_coef": NonNegative,
    "max_divergence": NonNegative,
    "max_error": Positive,
    "max_kl": NonNegative,
    "max_lag": Lag,
    "max_log_ratio": Positive,
    "max_probability": Probability,
    "max_ratio": Positive,
    "max_weight": Positive,
    "min_coef": NonNegative,
    "min_dim_size_to_factor": Count,
    "min_ratio": NonNegative,
    "momentum": Decay,
    "ns_steps": Count,
    "power": Positive,
    "reward_scale": Positive,
    "ring_high": NonNegative,
    "ring_low": NonNegative,
    "shift": AnyNumber,
    "target": Positive,
    "tau": Positive,
    "tau_negative": Positive,
    "tau_positive": Positive,
    "temperature": Positive,
    "threshold": AnyNumber,
    "transition_begin": CountOrZero,
    "transition_steps": Count,
    "upper": AnyNumber,
    "weight_decay": NonNegative,
    "weight_decay_rate": NonNegative,
}
"""The range of a number by the name of the parameter; a name means the same in every function of the library."""
RANGES_OF: Mapping[tuple[str, str], Any] = {
    # Bounds of a log-ratio or a divergence, which may be above 1, and TRL's CISPO, whose bound is below 1.
    ("gmpo_loss", "clip_low"): NonNegative,
    ("dppo_loss", "clip_low"): NonNegative,
    ("cispo_loss", "clip_high"): AboveMinusOne,
    # The coefficient is the whole of the loss's bound.
    ("dro_loss", "coef"): Positive,
    ("a2po_loss", "coef"): Positive,
    ("gvpo_loss", "coef"): Positive,
    # Bounds of a ratio; elsewhere they are bounds of a number of any sign.
    ("importance_weights", "lower"): NonNegative,
    ("importance_weights", "upper"): Positive,
    ("rejection_mask", "lower"): NonNegative,
    ("rejection_mask", "upper"): NonNegative,
    # An entropy, which may be 0.
    ("adaptive_entropy", "target"): NonNegative,
    # Means of squares.
    ("second_moment_mask", "threshold"): NonNegative,
    ("m2po_loss", "threshold"): NonNegative,
    ("muon", "beta"): Decay,
    ("topd_advantages", "alpha"): Probability,
    ("opmd_loss", "tau"): NonNegative,
    ("iw_opd_advantages", "gamma"): NonNegative,
}
"""Exceptions from `RANGES`, by function and parameter."""


class Section(BaseModel):
    """A frozen group of fields: unknown keys, infinities and silent conversions (text to number, 1 to true) fail.

    A number that float32 cannot hold is an infinity, too, and one that it rounds to 0 fails as well.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @field_validator("*")
    @classmethod
    def _fits_float32(cls, value: Any) -> Any:
        if isinstance(value, float) and not fits_float32(value):
            raise ValueError("infinite in float32")
        if isinstance(value, float) and 0 < abs(value) < FLOAT32_TINY:
            raise ValueError("0 in float32")
        return value


def tag_defaults_to(key: str, tag: str) -> Callable[[Any], Any]:
    """Lets an override change part of a union (`reference.monitor=true`) without repeating its tag."""
    return lambda value: {key: tag, **value} if isinstance(value, dict) else value
