"""ART (openpipe-art 0.5.18): its loss, called with this project's names."""

import functools
import pathlib
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional

from tests.goldens.systems import release
from tests.goldens.systems.record import Call, InputTensors

Params = Mapping[str, Any]
Outputs = Mapping[str, Any]


class ArtModel:
    """Stands for pydantic's `BaseModel`: holds what it is given."""

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)


def previous(tensor: torch.Tensor) -> torch.Tensor:
    """Moves a row one position on, so that ART's shift to the next token brings it back."""
    return functional.pad(tensor, (1, 0))


def longer(tensor: torch.Tensor) -> torch.Tensor:
    """The same row with one more position at the end, which ART's shift leaves without a token."""
    return functional.pad(tensor, (0, 1))


def loss(module: types.ModuleType, given: InputTensors, params: Params) -> Outputs:
    """ART's loss; every row is a group of its own, and all weights are 1."""
    rows = torch.arange(1, len(given.mask) + 1)[:, None]
    inputs = {
        "logprobs": previous(given.old_log_probs),
        "advantages": previous(given.advantages),
        "assistant_mask": previous(given.mask > 0),
        "weights": torch.ones_like(previous(given.mask)),
        "group_ids": rows.expand(-1, given.mask.shape[1] + 1),
    }
    if params.get("original"):
        inputs["original_logprobs"] = previous(given.rollout_log_probs)
    config = {name: value for name, value in params.items() if name not in ("reduction", "batch", "original")}
    coef = params.get("kl_penalty_coef", None)
    reference = None if coef is None else longer(given.ref_log_probs)
    result = module.loss_fn(inputs, longer(given.log_probs), reference, None, config, params["reduction"])
    return {"value": result.policy_loss, "kl_policy_ref": result.kl_policy_ref}


def calls(root: pathlib.Path) -> dict[str, Call]:
    """The function that the cases of ART name."""
    release.bare(root, "art.utils")
    release.stub("pydantic", BaseModel=ArtModel, ConfigDict=dict)
    release.stub("art.dev", TrainConfig=dict)
    return {"loss_fn": functools.partial(loss, release.load("art.loss"))}
