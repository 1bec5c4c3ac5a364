"""verl 0.9.1: its functions, called with this project's names."""

import ast
import functools
import pathlib
import types
from collections.abc import Mapping
from typing import Any
from unittest import mock

import torch

from tests.goldens.systems import release, verl_distillation
from tests.goldens.systems.controllers import trajectory
from tests.goldens.systems.record import Call, InputTensors
from tests.goldens.systems.verl_distillation import VerlConfig

Params = Mapping[str, Any]
Outputs = Mapping[str, Any]
POLICY_LOSSES = (
    "vanilla",
    "dppo_tv",
    "dppo_kl",
    "gspo",
    "sapo",
    "gpg",
    "clip_cov",
    "kl_cov",
    "geo_mean",
    "dro",
    "cispo",
)


def load(root: pathlib.Path) -> tuple[types.ModuleType, types.ModuleType, types.ModuleType]:
    """The modules `core_algos`, `rollout_corr_helper` and `torch_functional`."""
    for package in ("verl.trainer.ppo", "verl.utils", "verl.workers"):
        release.bare(root, package)
    release.stub("omegaconf", "DictConfig")
    release.stub("tensordict", "TensorDict")
    release.stub("transformers", "PreTrainedTokenizer")
    release.stub("verl.utils.device", get_device_name=lambda: "cpu", get_torch_device=lambda: torch.cpu)
    release.stub("verl.utils.import_utils", deprecated=lambda *_: release.identity)
    release.stub("verl.trainer.config", "AlgoConfig")
    release.stub("verl.trainer.config.algorithm", "RolloutCorrectionConfig")
    release.stub("verl.workers.config", ActorConfig=VerlConfig)
    release.stub("verl.workers.config.actor", "PolicyLossConfig")
    from_dict = staticmethod(lambda tensors: types.SimpleNamespace(batch=tensors))
    release.stub("verl.protocol", DataProto=type("DataProto", (), {"from_dict": from_dict}))
    groupwise = release.load("verl.utils.groupwise")
    utils = release.bare(root, "verl.utils")
    vars(utils).update(as_torch_index=groupwise.as_torch_index, group_mean_std=groupwise.group_mean_std)
    core = release.load("verl.trainer.ppo.core_algos")
    return core, release.load("verl.trainer.ppo.rollout_corr_helper"), release.load("verl.utils.torch_functional")


def scalars(metrics: Mapping[str, float], *names: str) -> Outputs:
    """The metrics whose last name is one of `names`, or all of them."""
    short = {name.split("/")[-1]: value for name, value in metrics.items()}
    return {f"metric_{name}": short[name] for name in (names or short) if name in short}


def actor_defaults(root: pathlib.Path) -> dict[str, Any]:
    """The numbers that the release's `ActorConfig` has by default, from its source."""
    tree = ast.parse((root / "verl/workers/config/actor.py").read_text())
    (actor,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "ActorConfig"]
    fields = [node for node in actor.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]
    values = {ast.unparse(field.target): field.value for field in fields if field.value is not None}
    return {k: ast.literal_eval(value) for k, value in values.items() if k.startswith(("clip_ratio", "tau_"))}


def policy_loss(core: types.ModuleType, defaults: Params, name: str, given: InputTensors, params: Params) -> Outputs:
    """A policy loss of verl's registry and its metrics."""
    rollout_correction = VerlConfig(**params)
    policy = VerlConfig(**{"rollout_correction": rollout_correction, "kl_cov_ratio": None, **params})
    config = VerlConfig(**{**defaults, **params}, policy_loss=policy, global_batch_info={})
    function = getattr(core, f"compute_policy_loss_{name}")
    behaviour = given.rollout_log_probs if name in ("reinforce", "bypass_mode") else given.old_log_probs
    # Candidates in order in place of a random permutation.
    with mock.patch("torch.randperm", torch.arange):
        value, metrics = function(
            behaviour,
            given.log_probs,
            given.advantages,
            given.mask,
            loss_agg_mode=params["loss_agg_mode"],
            config=config,
            rollout_is_weights=given.is_weights if params.get("weights") else None,
        )
    return {"value": value, **scalars(metrics, "pg_clipfrac", "pg_clipfrac_lower", "ppo_kl")}


def value_loss(core: types.ModuleType, given: InputTensors, params: Params) -> Outputs:
    """The clipped value loss."""
    value, clipped = core.compute_value_loss(given.values, given.returns, given.old_values, given.mask, **params)
    return {"value": value, "metric_vf_clipfrac": clipped}


def outcome(core: types.ModuleType, function: str, given: InputTensors, params: Params) -> Outputs:
    """An advantage estimator over the rewards of whole responses, or over rewards per token."""
    extra: dict[str, Any] = {}
    if "optimal_token_baseline" in function:
        weights = given.is_weights if params["weights"] else None
        extra = {"rollout_is_weights": weights, "handle_zero_tail": params["handle_zero_tail"]}
        extra |= {"old_log_probs": given.old_log_probs, "sum_pi_squared": given.sum_squared_probs}
    elif "passk" in function:
        extra = {"config": VerlConfig(**params)}
    elif "remax" in function:
        extra = {"reward_baselines": given.baselines}
    elif "norm_adv_by_std_in_grpo" in params:
        extra = {"norm_adv_by_std_in_grpo": params["norm_adv_by_std_in_grpo"]}
    per_token = given.outcome_rewards if given.has("outcome_rewards") else given.token_rewards
    index = {} if "remax" in function else {"index": given.group_ids.numpy()}
    advantages, returns = getattr(core, function)(per_token.clone(), response_mask=given.mask, **index, **extra)
    return {"advantages": advantages, "returns": returns}


def gdpo(core: types.ModuleType, given: InputTensors, params: Params) -> Outputs:
    """GDPO, with its reward components by name."""
    components = given.reward_components.numpy()
    names = [f"component_{k}" for k in range(components.shape[1])]
    config = VerlConfig(gdpo_reward_keys=names, gdpo_reward_weights=params["gdpo_reward_weights"])
    # A component is put on the last token of the attention mask and summed over all tokens: any token would do.
    prompts = torch.zeros(len(components), 1, dtype=torch.long)
    attention = torch.ones(len(components), 1 + given.mask.shape[1], dtype=torch.long)
    advantages, returns = core.compute_gdpo_outcome_advantage(
        torch.zeros_like(given.mask),
        given.mask,
        given.group_ids.numpy(),
        norm_adv_by_std_in_grpo=params["norm_adv_by_std_in_grpo"],
        config=config,
        non_tensor_batch=dict(zip(names, components.T, strict=True)),
        batch={"prompts": prompts, "attention_mask": attention},
    )
    return {"advantages": advantages, "returns": returns}


def gae(core: types.ModuleType, given: InputTensors, params: Params) -> Outputs:
    """Generalised advantage estimation over the unmasked tokens."""
    arrays = given.token_rewards, given.values, given.mask
    advantages, returns = core.compute_gae_advantage_return(*arrays, gamma=params["gamma"], lam=params["lam"])
    return {"advantages": advantages, "returns": returns}


def reinforce_plus_plus(core: types.ModuleType, given: InputTensors, params: Params) -> Outputs:
    """REINFORCE++."""
    function = core.compute_reinforce_plus_plus_outcome_advantage
    advantages, returns = function(given.token_rewards, given.mask, config=VerlConfig(gamma=params["gamma"]))
    return {"advantages": advantages, "returns": returns}


def log_ratio(given: InputTensors) -> torch.Tensor:
    """Training over rollout."""
    return given.log_probs - given.rollout_log_probs


def rejection(corr: types.ModuleType, given: InputTensors, params: Params) -> Outputs:
    """The mask that a rejection option leaves."""
    selected, metrics = corr.compute_rollout_rejection_mask(log_ratio(given), given.mask, **params)
    return {"kept": selected, **scalars(metrics, "rollout_rs_masked_fraction", "rollout_rs_seq_masked_fraction")}


def weights(corr: types.ModuleType, given: InputTensors, params: Params) -> Outputs:
    """Importance weights; a shared case has no metrics."""
    values, metrics = corr.compute_rollout_correction_weights(log_ratio(given), given.mask, **arguments(params))
    names = (
        "mean",
        "std",
        "max",
        "min",
        "eff_sample_size",
        "ratio_fraction_high",
        "ratio_fraction_low",
        "seq_mean",
        "oob_ratio",
    )
    return {"weights": values, **scalars(metrics, *(f"rollout_is_{name}" for name in names))}


def correction(corr: types.ModuleType, given: InputTensors, params: Params) -> Outputs:
    """Weights and mask together; neither sees the other."""
    function = corr.compute_rollout_correction_and_rejection_mask
    proto, selected, _ = function(given.log_probs, given.rollout_log_probs, given.mask, **params)
    return {"weights": proto.batch["rollout_is_weights"], "kept": selected}


def arguments(params: Params) -> dict[str, Any]:
    """The function's own arguments: all but what describes the case."""
    return {name: value for name, value in params.items() if name not in ("batch", "dtype", "note", "name")}


def statistic(functional: types.ModuleType, name: str, given: InputTensors, params: Params) -> Outputs:
    """A masked statistic."""
    return {"value": getattr(functional, name)(given.advantages, given.mask, **arguments(params))}


def kl_penalty(penalty: Any, core: types.ModuleType, given: InputTensors, params: Params) -> Outputs:
    """KL in the reward, and the controller's coefficient before and after."""
    fields = {"old_log_probs": given.old_log_probs, "ref_log_prob": given.ref_log_probs}
    fields |= {"token_level_scores": given.token_rewards, "response_mask": given.mask}
    batch = type("Batch", (dict,), {"batch_size": (len(given.mask),)})(fields)
    controller = core.get_kl_controller(VerlConfig(**params))
    data, metrics = penalty(types.SimpleNamespace(batch=batch), controller, kl_penalty=params["kl_penalty"])
    rewards = {"token_rewards": data.batch["token_level_rewards"], "coef": controller.value}
    return {**rewards, **scalars(metrics, "reward_kl_penalty", "reward_kl_penalty_coeff")}


def calls(root: pathlib.Path) -> dict[str, Call]:
    """Every function that a case of verl names."""
    core, corr, functional = load(root)
    policy = functools.partial(policy_loss, core, actor_defaults(root))
    names = {"torch": torch, "core_algos": core, "masked_mean": functional.masked_mean}
    penalty = release.function_from(root / "verl/trainer/ppo/ray_trainer.py", "apply_kl_penalty", names)
    outcomes = (
        "grpo",
        "grpo_vectorized",
        "grpo_passk",
        "rloo",
        "rloo_vectorized",
        "opo",
        "gpg",
        "remax",
        "reinforce_plus_plus_baseline",
    )
    functions = [f"compute_{name}_outcome_advantage" for name in outcomes]
    functions += [f"compute_{prefix}optimal_token_baseline_advantage" for prefix in ("", "multi_turn_")]
    return {
        **verl_distillation.calls(root, core),
        **{f"compute_policy_loss_{name}": functools.partial(policy, name) for name in POLICY_LOSSES},
        **{name: functools.partial(outcome, core, name) for name in functions},
        **{
            name: functools.partial(statistic, functional, name)
            for name in ("masked_mean", "masked_var", "masked_whiten")
        },
        "compute_policy_loss_bypass_mode": functools.partial(policy, "bypass_mode"),
        "compute_policy_loss_reinforce": functools.partial(policy, "reinforce"),
        "compute_value_loss": functools.partial(value_loss, core),
        "kl_penalty": lambda given, params: {
            "value": core.kl_penalty(given.log_probs, given.ref_log_probs, params["kl_penalty"])
        },
        "agg_loss": lambda given, params: {"value": core.agg_loss(given.advantages, given.mask, **arguments(params))},
        "compute_gdpo_outcome_advantage": functools.partial(gdpo, core),
        "compute_gae_advantage_return": functools.partial(gae, core),
        "compute_reinforce_plus_plus_outcome_advantage": functools.partial(reinforce_plus_plus, core),
        "compute_rollout_rejection_mask": functools.partial(rejection, corr),
        "compute_rollout_correction_weights": functools.partial(weights, corr),
        "compute_rollout_correction_and_rejection_mask": functools.partial(correction, corr),
        "compute_offpolicy_metrics": lambda given, params: corr.compute_offpolicy_metrics(
            given.log_probs, given.rollout_log_probs, given.mask
        ),
        "apply_kl_penalty": functools.partial(kl_penalty, penalty, core),
        "AdaptiveKLController": lambda given, params: trajectory(core.AdaptiveKLController(**params), given),
        "FixedKLController": lambda given, params: trajectory(core.FixedKLController(**params), given),
    }
