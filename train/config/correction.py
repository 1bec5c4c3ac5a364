"""The corrections for a sampler that is not the trainer's policy: a list of entries, applied in the order given."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from train.config.algorithms import CORRECTIONS, Algorithm, UserFunction, make_union, make_variant

DEFAULT_OF_SERVERS: tuple[Mapping[str, Any], ...] = (
    {"type": "truncated_importance_weights", "level": "token", "max_weight": 2.0},
)
"""The correction of completions that a server samples."""


class Correction(Algorithm):
    """One entry: weights, which multiply the policy term, or a mask, which rejects tokens."""

    type: str
    """An entry of the list: weights or a mask; `module:function`: yours; `system/name`, as `verl/rollout_is=token`."""


class UserCorrection(UserFunction, Correction):
    """A correction of the user."""

    type: Literal["custom"]


def _as_list(value: Any) -> Any:
    """Takes one entry alone for a list of one."""
    return [value] if isinstance(value, str | dict) else value


CORRECTION_VARIANTS: list[type[Any]] = [
    *(make_variant(Correction, name, target) for name, target in CORRECTIONS.items()),
    UserCorrection,
]

if TYPE_CHECKING:
    CorrectionSection = tuple[Correction, ...]
else:
    CorrectionSection = Annotated[
        tuple[make_union(CORRECTION_VARIANTS), ...],
        Field(strict=False),
        BeforeValidator(_as_list),
        "a list of mappings, each with type (" + ", ".join([*CORRECTIONS, "custom"]) + ") and the fields of that type",
    ]


def default_correction(raw: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the correction of a config that sets none: on for completions of a server, off for all others.

    It stays off where its weights would have no policy term to multiply, where the loss takes its ratio to the sampler
    already, and where no log-probs are recorded.
    """
    rollout = raw.get("rollout")
    loss = raw.get("loss")
    if not isinstance(rollout, dict) or not isinstance(rollout.get("source"), dict):
        return []
    chosen = loss if isinstance(loss, dict) else {"type": loss}
    corrected = chosen.get("type") == "none" or chosen.get("old_log_probs") == "sampler"
    if rollout["source"].get("type") != "openai" or corrected or rollout.get("record_log_probs") is False:
        return []
    return [dict(entry) for entry in DEFAULT_OF_SERVERS]
