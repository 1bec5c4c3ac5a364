"""OpenRLHF 0.11.2: its functions, called with this project's names."""

import functools
import itertools
import pathlib
import types
from collections.abc import Mapping
from typing import Any

import torch

from tests.goldens.systems import release
from tests.goldens.systems.controllers import trajectory
from tests.goldens.systems.record import Call, InputTensors

Params = Mapping[str, Any]
Outputs = Mapping[str, Any]
NORMALISERS = ("dp_size", "batch_num_tokens", "global_batch_size")


def load(root: pathlib.Path) -> tuple[types.ModuleType, types.ModuleType, types.ModuleType]:
    """The modules `models.utils`, `models.loss` and the controllers'."""
    release.bare(root, "openrlhf.models")
    release.bare(root, "openrlhf.trainer.ppo_utils")
    release.stub("deepspeed")
    names = ("models.utils", "models.loss", "trainer.ppo_utils.kl_controller")
    utils, loss, controllers = (release.load(f"openrlhf.{name}") for name in names)
    return utils, loss, controllers


def split(params: Params) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of a loss, and the global numbers it divides by."""
    normalisers = {name: params[name] for name in NORMALISERS if name in params}
    rest = {name: value for name, value in params.items() if name not in (*NORMALISERS, "batch", "dtype", "name")}
    return rest, normalisers


def approx_kl(utils: types.ModuleType, given: InputTensors, params: Params) -> Outputs:
    """KL per token; the commit of the shared cases has neither old log-probs nor the unbiased gradient."""
    options = {"kl_estimator": params["kl_estimator"], "unbiased_gradient": params.get("unbiased_gradient", False)}
    old = given.old_log_probs if params.get("old") else None
    return {"value": utils.compute_approx_kl(given.log_probs, given.ref_log_probs, old, **options)}


def policy_loss(module: types.ModuleType, given: InputTensors, params: Params) -> Outputs:
    """PPO or GSPO with its gates."""
    arguments, normalisers = split(params)
    rollout = given.rollout_log_probs if "is_correction_level" in params else None
    arrays = given.log_probs, given.old_log_probs, given.advantages, given.mask, rollout
    value, clipped, ppo_kl, rollout_kl, filtered = module.PolicyLoss(**arguments)(*arrays, **normalisers)
    metrics = {"metric_clip_ratio": clipped, "metric_ppo_kl": ppo_kl}
    return {"value": value, **metrics, "metric_vllm_kl": rollout_kl, "metric_is_filter_ratio": filtered}


def value_loss(module: types.ModuleType, given: InputTensors, params: Params) -> Outputs:
    """The value loss."""
    arguments, normalisers = split(params)
    arrays = given.values, given.old_values, given.returns, given.mask
    return {"value": module.ValueLoss(**arguments)(*arrays, **normalisers)}


def rewards(utils: types.ModuleType, given: InputTensors, params: Params) -> Outputs:
    """The score on the last token, less the KL."""
    clip = params.get("reward_clip_range")
    shaped = utils.compute_reward(given.rewards, params["kl_coef"], given.kl, given.mask, clip)
    return {"token_level_rewards" if clip is None else "token_rewards": shaped}


def advantages(methods: Mapping[str, Any], given: InputTensors, params: Params) -> Outputs:
    """The experience maker's advantages of one batch of groups of two."""
    options = {"gamma": 1.0, "lambd": 1.0, "no_std_norm": False, **params}
    names = ("gamma", "lambd", "no_std_norm")
    advantage = types.SimpleNamespace(estimator=params["name"], **{name: options[name] for name in names})
    args = types.SimpleNamespace(
        algo=types.SimpleNamespace(advantage=advantage),
        rollout=types.SimpleNamespace(n_samples_per_prompt=2),
        reward=types.SimpleNamespace(clip_range=params["reward_clip_range"]),
    )
    maker = types.SimpleNamespace(
        strategy=types.SimpleNamespace(args=args),
        kl_ctl=types.SimpleNamespace(value=params["kl_coef"]),
        advantage_estimator=params["name"],
        **{
            name: functools.partial(methods[name], None)
            for name in ("get_advantages_and_returns", "get_cumulative_returns")
        },
    )
    experience = types.SimpleNamespace(
        index=list(range(len(given.mask))), rewards=given.rewards, action_mask=given.mask, kl=given.kl, info={}
    )
    if params["name"] == "gae":
        experience.values = given.values
    methods["compute_advantages_and_returns"](maker, [experience])
    return {"advantages": experience.advantages, "returns": experience.returns}


def calls(root: pathlib.Path) -> dict[str, Call]:
    """Every function that a case of OpenRLHF names."""
    utils, loss, controllers = load(root)
    path = root / "openrlhf/trainer/ppo_utils/experience_maker.py"
    names = {"torch": torch, "itertools": itertools, "compute_reward": utils.compute_reward}
    names["apply_length_penalties"] = release.identity
    methods = {
        name: release.function_from(path, name, names)
        for name in ("compute_advantages_and_returns", "get_advantages_and_returns", "get_cumulative_returns")
    }

    def aggregate(given: InputTensors, params: Params) -> Outputs:
        arguments, normalisers = split(params)
        return {"value": loss.aggregate_loss(given.advantages, given.mask, **arguments, **normalisers)}

    def gae(given: InputTensors, params: Params) -> Outputs:
        arrays = given.values, given.token_rewards, given.mask
        result = methods["get_advantages_and_returns"](None, *arrays, params["gamma"], params["lambd"])
        return dict(zip(("advantages", "returns"), result, strict=True))

    return {
        "compute_approx_kl": functools.partial(approx_kl, utils),
        "PolicyLoss": functools.partial(policy_loss, loss),
        "ValueLoss": functools.partial(value_loss, loss),
        "aggregate_loss": aggregate,
        "compute_reward": functools.partial(rewards, utils),
        "compute_advantages_and_returns": functools.partial(advantages, methods),
        "get_advantages_and_returns": gae,
        "get_cumulative_returns": lambda given, params: {
            "returns": methods["get_cumulative_returns"](None, given.token_rewards, given.mask, params["gamma"])
        },
        "AdaptiveKLController": lambda given, params: trajectory(controllers.AdaptiveKLController(**params), given),
        "FixedKLController": lambda given, params: trajectory(controllers.FixedKLController(**params), given),
    }
