"""SkyRL 0.3.0: its functions, called with this project's names."""

import functools
import pathlib
import types
from collections.abc import Mapping
from typing import Any
from unittest import mock

import torch

from tests.goldens.plans.skyrl import FUNCTIONS
from tests.goldens.systems import release
from tests.goldens.systems.controllers import trajectory
from tests.goldens.systems.record import Call, InputTensors

Params = Mapping[str, Any]
Outputs = Mapping[str, Any]
UTILS = "skyrl.backends.skyrl_train.utils"
# The groups of options of a policy loss, and the option of each name.
OPTIONS = {
    "cispo": ("cispo_eps_clip_low", "cispo_eps_clip_high"),
    "dppo": ("dppo_type", "delta_low", "delta_high"),
    "sapo": ("tau_pos", "tau_neg"),
    "kl_cov": ("kl_cov_frac", "ppo_kl_coef"),
    "clip_cov": ("clip_ratio", "clip_cov_lb", "clip_cov_ub"),
}
CORRECTION = dict.fromkeys(
    (
        "tis_ratio_type",
        "token_tis_ratio_clip_high",
        "sequence_tis_ratio_clip_high",
        "sequence_mask_metric",
        "geo_mask_low",
        "geo_mask_high",
        "product_mask_low",
        "product_mask_high",
        "outlier_token_is_threshold_low",
        "outlier_token_is_threshold_high",
        "token_mask_is_threshold_low",
        "token_mask_is_threshold_high",
    )
)


def load(root: pathlib.Path) -> tuple[types.ModuleType, types.ModuleType]:
    """The modules `ppo_utils` and `off_policy_correction_utils`."""
    release.bare(root, UTILS)
    release.bare(root, "skyrl.train")
    release.stub("ray", remote=release.identity, is_initialized=lambda: False)
    release.stub("jaxtyping", "Float", "Integer")
    release.stub("loguru", logger=types.SimpleNamespace(warning=release.identity))
    release.stub("omegaconf", "DictConfig")
    release.stub("skyrl.train.config", "AlgorithmConfig")
    return release.load(f"{UTILS}.ppo_utils"), release.load(f"{UTILS}.off_policy_correction_utils")


def corrections(params: Params) -> types.SimpleNamespace:
    """The off-policy correction that the params ask for; everything else is off."""
    return types.SimpleNamespace(**{name: params.get(name, default) for name, default in CORRECTION.items()})


def policy_loss(ppo: types.ModuleType, function: str, given: InputTensors, params: Params) -> Outputs:
    """A policy loss of SkyRL's registry."""
    name = params["name"]
    groups = {
        group: types.SimpleNamespace(**{option: params.get(option) for option in options})
        for group, options in OPTIONS.items()
    }
    correction = corrections(params)
    config = types.SimpleNamespace(
        **{**params, **groups},
        policy_loss_type=name,
        loss_reduction="sequence_mean",
        off_policy_correction=correction,
    )
    uses_rollout = name == "rollout_is" or params.get("anchor") == "rollout" or correction.tis_ratio_type is not None
    rollout = given.rollout_log_probs if uses_rollout else None
    old = given.log_probs.detach() if name == "cross_entropy" else given.old_log_probs
    advantages = torch.zeros_like(given.mask) if name == "cross_entropy" else given.advantages
    with mock.patch("torch.randperm", torch.arange):
        value, metrics = getattr(ppo, function)(given.log_probs, old, advantages, config, given.mask, rollout)
    return {
        "value": value,
        **{f"metric_{key}": metrics[key] for key in ("clip_ratio", "importance_ratio") if key in metrics},
    }


def critic_loss(ppo: types.ModuleType, given: InputTensors, params: Params) -> Outputs:
    """The value loss."""
    config = types.SimpleNamespace(value_clip=params["value_clip"])
    value, clipped = ppo.ppo_critic_loss(given.values, given.old_values, given.returns, config, given.mask)
    return {"value": value, "metric_clipfrac": clipped}


def advantage(ppo: types.ModuleType, function: str, given: InputTensors, params: Params) -> Outputs:
    """An advantage estimator of SkyRL's registry."""
    dense = params["name"] in ("reinforce++", "gae")
    rewards = given.token_rewards if dense else given.outcome_rewards
    options = {name: params[name] for name in ("gamma", "lambd", "grpo_norm_by_std") if name in params}
    if params["name"] == "gae":
        options["values"] = given.values
    if not dense:
        options["index"] = given.group_ids.tolist()
    advantages, returns = getattr(ppo, function)(rewards.clone(), response_mask=given.mask, **options)
    return {"advantages": advantages, "returns": returns}


def boundaries(given: InputTensors) -> list[tuple[int, int]]:
    """First row and row after the last of each group."""
    ids = given.group_ids.tolist()
    return [(ids.index(group), len(ids) - ids[::-1].index(group)) for group in sorted(set(ids))]


def reduction(ppo: types.ModuleType, given: InputTensors, params: Params) -> Outputs:
    """The advantages with a reduction folded in."""
    prompts = boundaries(given) if params["loss_reduction"] == "prompt_mean" else None
    options = (params["loss_reduction"], params.get("micro_batch_size", 1), params["max_seq_len"], prompts)
    return {"value": ppo.apply_loss_reduction_to_advantages_minibatch(given.advantages, given.mask, *options)}


def rollout_kl(ppo: types.ModuleType, given: InputTensors, params: Params) -> Outputs:
    """The rollout KL of pull request 1811, from the functions of the release."""
    kl = ppo.compute_approx_kl(
        given.log_probs, given.rollout_log_probs, given.mask, params["rollout_kl_estimator_type"]
    )
    return {"value": ppo.masked_mean(kl, given.mask, dim=-1).mean()}


def correction(utils: types.ModuleType, given: InputTensors, params: Params) -> Outputs:
    """The importance weights and the mask that are left for the loss."""
    function = utils.compute_off_policy_correction
    weights, metrics, selected = function(given.old_log_probs, given.rollout_log_probs, given.mask, corrections(params))
    names = [name for name in metrics if not name.startswith("is_ratio")] + ["is_ratio_mean", "is_ratio_max"]
    outputs = {"kept": selected, **{f"metric_{name}": metrics[name] for name in names}}
    return outputs if weights is None else {**outputs, "weights": weights.expand_as(selected)}


class SkyRLData(dict[str, Any]):
    """SkyRL's batch: arrays by name, and rows by a slice."""

    def __init__(self, *fields: Any, **more: Any) -> None:
        super().__init__(*fields, **more)
        self.metadata: dict[str, Any] = {}

    def __getitem__(self, key: Any) -> Any:
        return (
            SkyRLData({name: array[key] for name, array in self.items()})
            if isinstance(key, slice)
            else super().__getitem__(key)
        )


def in_reward(method: Any, ppo: types.ModuleType, given: InputTensors, params: Params) -> Outputs:
    """KL in the reward; the controller is updated with the KL it has just used."""
    adaptive = "kl_target" in params
    controller = (
        ppo.AdaptiveKLController(params["kl_loss_coef"], params["kl_target"], params["horizon"]) if adaptive else None
    )
    algorithm = types.SimpleNamespace(
        kl_estimator_type=params["kl_estimator_type"], kl_loss_coef=params["kl_loss_coef"]
    )
    config = types.SimpleNamespace(trainer=types.SimpleNamespace(algorithm=algorithm))
    trainer = types.SimpleNamespace(cfg=config, reward_kl_controller=controller, all_metrics={})
    data = SkyRLData(loss_mask=given.mask, rewards=given.token_rewards)
    data |= {"base_action_log_probs": given.ref_log_probs, "action_log_probs": given.old_log_probs}
    method(trainer, data)
    metrics = {f"metric_{name}": data.metadata["metrics"][name] for name in ("avg_kl", "avg_kl_max", "kl_loss_coef")}
    return {"token_rewards": data["rewards"], **metrics, "coef": controller.value if controller else None}


def normalized(method: Any, given: InputTensors, params: Params) -> Outputs:
    """Advantages normalised over the batch, then with `token_mean` folded in."""
    algorithm = types.SimpleNamespace(**params, loss_reduction="token_mean", max_seq_len=64)
    trainer = types.SimpleNamespace(algorithm=algorithm, micro_train_batch_size_per_gpu=2)
    fields = {"advantages": given.advantages, "response_mask": given.mask, "loss_mask": given.mask}
    data = method(
        types.SimpleNamespace(cfg=types.SimpleNamespace(trainer=trainer)), SkyRLData(fields), [(0, len(given.mask))]
    )
    return {"advantages": data["advantages"]}


def calls(root: pathlib.Path) -> dict[str, Call]:
    """Every function that a case of SkyRL names."""
    ppo, utils = load(root)
    trainer, names = root / "skyrl/train/trainer.py", {"torch": torch, **vars(ppo)}
    reward_method = release.function_from(trainer, "apply_reward_kl_penalty", names)
    normalize_method = release.function_from(trainer, "_normalize_advantages", names)
    outcomes = ("grpo_outcome", "rloo_outcome", "reinforce_plus_plus_outcome", "maxrl")
    advantages = [*(f"compute_{name}_advantage" for name in outcomes), "compute_gae_advantage_return"]
    return {
        **{function: functools.partial(policy_loss, ppo, function) for function in FUNCTIONS.values()},
        **{function: functools.partial(advantage, ppo, function) for function in advantages},
        "ppo_critic_loss": functools.partial(critic_loss, ppo),
        "compute_approx_kl": lambda given, params: {
            "value": ppo.compute_approx_kl(
                given.log_probs, given.ref_log_probs, given.mask, params["kl_estimator_type"]
            )
        },
        "apply_loss_reduction_to_advantages_minibatch": functools.partial(reduction, ppo),
        "rollout_kl_loss": functools.partial(rollout_kl, ppo),
        "compute_off_policy_correction": functools.partial(correction, utils),
        "apply_reward_kl_penalty": functools.partial(in_reward, reward_method, ppo),
        "_normalize_advantages": functools.partial(normalized, normalize_method),
        "AdaptiveKLController": lambda given, params: trajectory(ppo.AdaptiveKLController(**params), given),
        "FixedKLController": lambda given, params: trajectory(ppo.FixedKLController(**params), given),
    }
