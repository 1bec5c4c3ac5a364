"""verl 0.9.1: its distillation losses, compiled from their source."""

import pathlib
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tests.goldens.systems import release
from tests.goldens.systems.record import Call, InputTensors

Params = Mapping[str, Any]
Outputs = Mapping[str, Any]
CLIPS = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}


def nested(tensor: torch.Tensor) -> types.SimpleNamespace:
    """Stands for a nested tensor of a single row."""
    return types.SimpleNamespace(is_nested=True, values=lambda: tensor.reshape(-1, tensor.shape[-1]))


def forward_kl(top: Callable[..., Any], bounded: Callable[..., Any], given: InputTensors, params: Params) -> Outputs:
    """The KL from the teacher over its own top tokens; the second step bounds it below by 0."""
    teacher, ids = torch.log_softmax(given.teacher_logits, -1).topk(params["topk"], dim=-1)
    loss = types.SimpleNamespace(log_prob_min_clamp=params["log_prob_min_clamp"], use_chunked_topk=False)
    logits = given.logits.reshape(1, -1, given.logits.shape[-1])
    config = types.SimpleNamespace(distillation_loss=loss)
    outputs = top(logits, nested(teacher), nested(ids), config, "thd")
    names = ("distillation_losses", "student_mass", "teacher_mass")
    per_token = {name: outputs[name].reshape(given.mask.shape) for name in names}
    losses, _ = bounded(None, config, per_token, {"response_mask": given.mask})
    return {"value": losses}


class VerlConfig(types.SimpleNamespace):
    """A config object of verl: attributes that also answer to `get`."""

    def get(self, name: str, default: object = None) -> Any:
        """The attribute, or the default where there is none."""
        return getattr(self, name, default)


def distillation(methods: Mapping[str, Callable[..., Any]], given: InputTensors, params: Params) -> Outputs:
    """The distillation loss, or the policy loss of which it is the cost."""
    loss = VerlConfig(**CLIPS, **params, global_batch_info={}, policy_loss_mode="vanilla")
    actor = types.SimpleNamespace(
        loss_agg_mode="token-mean", global_batch_info={}, loss_scale_factor=None, strategy="fsdp"
    )
    numbers = {"dp_size": 1, "batch_num_tokens": None, "global_batch_size": None}
    data = {"response_mask": given.mask, "teacher_logprobs": given.teacher_log_probs[..., None], **numbers}
    if params["use_policy_gradient"]:
        data["old_log_probs"] = given.old_log_probs
    config = types.SimpleNamespace(distillation_loss=loss)
    value, _ = methods["distillation_loss"](actor, config, {"log_probs": given.log_probs}, data)
    return {"value": value}


def calls(root: pathlib.Path, core: types.ModuleType) -> dict[str, Call]:
    """The calls of the distillation losses, given verl's `core_algos`."""
    folder = root / "verl/trainer/distillation"
    names: dict[str, Any] = {"torch": torch, "F": torch.nn.functional, "kl_penalty": core.kl_penalty}
    names |= {"agg_loss": core.agg_loss, "get_policy_loss_fn": core.get_policy_loss_fn}
    names |= {"no_padding_2_padding": release.identity, "compute_distillation_loss_range": lambda **_: {}}
    names |= {"Metric": release.identity, "AggregationType": types.SimpleNamespace(MEAN=None, MIN=None, MAX=None)}
    estimator = release.function_from(folder / "losses.py", "compute_distillation_loss_reverse_kl_estimator", names)
    names["get_distillation_loss_fn"] = lambda _: estimator
    methods = {"distillation_loss": release.function_from(folder / "losses.py", "distillation_loss", names)}
    names["get_ulysses_sequence_parallel_world_size"] = lambda: 1
    names["kl_divergence"] = release.function_from(folder / "fsdp/losses.py", "kl_divergence", names)
    files = ("fsdp/losses.py", "losses.py")
    top, bounded = (release.function_from(folder / file, "compute_forward_kl_topk", names) for file in files)
    return {
        "compute_forward_kl_topk": lambda given, params: forward_kl(top, bounded, given, params),
        "distillation_loss": lambda given, params: distillation(methods, given, params),
    }
