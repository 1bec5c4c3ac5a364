"""Trinity-RFT 0.6.0: its losses and advantage functions, called with this project's names."""

import functools
import pathlib
import types
from collections.abc import Mapping
from typing import Any

import torch

from tests.goldens.plans.trinity import LOSS_CLASSES, OVER_BATCHES, OVER_EXPERIENCES, class_of
from tests.goldens.systems import release
from tests.goldens.systems.record import Call, InputTensors

Params = Mapping[str, Any]
Outputs = Mapping[str, Any]

# Trinity's names of the estimators in the shared cases.
KL_CLASSES = {"k1": "K1Fn", "k2": "K2Fn", "k3": "K3Fn", "abs": "AbsFn", "low_var_kl": "LowVarKLFn"}
KL_CLASSES |= {"corrected_k3": "CorrectedK3Fn", "dummy": "DummyKLFn"}
METRICS = (
    "pg_clipfrac",
    "pg_clipfrac_lower",
    "ppo_kl",
    "ppo_kl_seq",
    "approx_kl",
    "unmasked_frac",
    "avg_alpha",
    "avg_soft_gate",
)
STEP = 5


def load(root: pathlib.Path) -> None:
    """Registers the packages, and stubs of what the modules import from elsewhere."""
    for name in ("algorithm.policy_loss_fn", "algorithm.advantage_fn", "algorithm.kl_fn", "buffer", "common", "utils"):
        release.bare(root, f"trinity.{name}")
    release.stub("verl", "DataProto")
    release.stub("trinity.buffer.operators", "ExperienceOperator")
    release.stub("trinity.utils.log", get_logger=lambda *_: types.SimpleNamespace(warning=release.identity))
    group_by = release.function_from(root / "trinity/common/experience.py", "group_by", {})
    release.stub("trinity.common.experience", "Experience", group_by=group_by)
    base = release.load("trinity.algorithm.advantage_fn.advantage_fn")
    package = release.bare(root, "trinity.algorithm.advantage_fn")
    vars(package).update(AdvantageFn=base.AdvantageFn, GroupAdvantage=base.GroupAdvantage)


def arguments(params: Params) -> dict[str, Any]:
    """The class's own arguments."""
    return {name: value for name, value in params.items() if name not in ("name", "batch", "dtype", "note")}


def instance(package: str, path: str, params: Params) -> Any:
    """An instance of `module.Class` of a package; without options of its own, that of the release's `default_args`."""
    module, class_name = path.split(".")
    kind = getattr(release.load(f"trinity.algorithm.{package}.{module}"), class_name)
    options = arguments(params)
    defaults = kind.default_args() if set(options) <= {"loss_agg_mode"} and package == "policy_loss_fn" else {}
    return kind(**{**defaults, **options})


def some(metrics: Mapping[str, float]) -> Outputs:
    """The metrics that this project has as well."""
    return {f"metric_{name}": metrics[name] for name in METRICS if name in metrics}


def loss(name: str, given: InputTensors, params: Params) -> Outputs:
    """A policy loss of Trinity's registry, called as its trainer does: by keyword."""
    function = instance("policy_loss_fn", LOSS_CLASSES[name], params)
    inputs = {"log_prob": given.log_probs, "response_mask": given.mask}
    wanted = set(function.select_keys)
    inputs |= {name: getattr(given, name) for name in ("old_log_probs", "advantages") if name in wanted}
    if "ref_log_prob" in wanted:
        inputs["ref_log_prob"] = given.ref_log_probs
    if "expert_mask" in wanted:
        inputs["expert_mask"] = given.expert.bool()
    if "step" in wanted:
        inputs["step"] = torch.full((len(given.mask),), STEP)
    logprob = inputs.pop("log_prob")
    value, metrics = function(logprob, **inputs)
    return {"value": value, **some(metrics)}


def over_batch(name: str, given: InputTensors, params: Params) -> Outputs:
    """An advantage function over a batch of arrays."""
    function = instance("advantage_fn", OVER_BATCHES[name], params)
    batch: dict[str, Any] = {"response_mask": given.mask}
    non_tensor: dict[str, Any] = {}
    if name in ("ppo", "reinforceplusplus"):
        batch["token_level_rewards"] = given.token_rewards
    elif name not in ("on_policy_distill", "jsd"):
        batch["token_level_rewards"] = given.outcome_rewards
    if name == "ppo":
        batch["values"] = given.values
    elif name == "remax":
        batch["reward_baselines"] = given.baselines
    elif name in ("on_policy_distill", "jsd"):
        batch |= {"old_log_probs": given.old_log_probs, "teacher_logprobs": given.teacher_log_probs}
    elif name != "reinforceplusplus":
        non_tensor["uid"] = given.group_ids.tolist()
    if name == "clipb":
        batch |= {"rollout_log_probs": given.log_probs, "entropys": given.entropies}
    if name == "clipv":
        batch |= {"old_log_probs": given.log_probs, "entropys": given.entropies, "necs": given.necs}
    exps, _ = function(types.SimpleNamespace(batch=batch, non_tensor_batch=non_tensor))
    selected = {"kept": exps.batch["response_mask"]} if name.startswith("clip") else {}
    return {"advantages": exps.batch["advantages"], "returns": exps.batch["returns"], **selected}


def over_experiences(name: str, given: InputTensors, params: Params) -> Outputs:
    """An advantage function over a list of experiences: single responses, or the steps of trajectories."""
    function = instance("advantage_fn", OVER_EXPERIENCES[name], params)
    steps = name in ("step_wise_grpo", "gigpo")
    prompts = (given.prompt_ids if steps else given.group_ids).tolist()
    runs = given.run_ids.tolist() if steps else range(len(prompts))
    states = given.state_ids.tolist() if name == "gigpo" else prompts
    experiences = [
        types.SimpleNamespace(
            reward=reward,
            action_mask=mask,
            eid=types.SimpleNamespace(tid=prompt, rid=f"run {run}", step=row % 2),
            info={"env_state_hash": state, "step_reward": reward},
        )
        for row, (reward, mask, prompt, run, state) in enumerate(
            zip(given.rewards.tolist(), given.mask, prompts, runs, states, strict=True)
        )
    ]
    function(experiences)
    return {"advantages": torch.stack([experience.advantages for experience in experiences])}


def kl_function(given: InputTensors, params: Params) -> Any:
    """An instance of the KL class that a case names."""
    del given
    names = ("kl_coef", "adaptive", "target_kl", "horizon")
    function = getattr(release.load("trinity.algorithm.kl_fn.kl_fn"), KL_CLASSES[params["estimator"]])
    return function(**{name: params[name] for name in names if name in params})


def calculate_kl(given: InputTensors, params: Params) -> Outputs:
    """KL per token; corrected where the case has the old log-probs."""
    old = given.old_log_probs if given.has("old_log_probs") else None
    return {"value": kl_function(given, params).calculate_kl(given.log_probs, given.ref_log_probs, old)}


def calculate_kl_loss(given: InputTensors, params: Params) -> Outputs:
    """The KL term of the loss."""
    function = kl_function(given, params).calculate_kl_loss
    value, metrics = function(given.log_probs, given.ref_log_probs, given.mask, params["loss_agg_mode"])
    return {"value": value, **{f"metric_{name}": metric for name, metric in metrics.items()}}


def _float64(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


def kl_in_reward(given: InputTensors, params: Params) -> Outputs:
    """KL in the reward."""
    fields = {"responses": given.mask, "attention_mask": given.mask, "response_mask": given.mask}
    fields |= {"token_level_scores": given.token_rewards, "old_log_probs": given.old_log_probs}
    fields["ref_log_prob"] = given.ref_log_probs
    batch = type("Batch", (dict,), {"batch_size": (len(given.mask),)})(fields)
    function = kl_function(given, params)
    # The update of an adaptive coefficient fails on the float it is given; it works on a tensor.
    update = function.update_kl_coef
    function.update_kl_coef = lambda current_kl, batch_size: update(_float64(current_kl), batch_size)
    data, metrics = function.apply_kl_penalty_to_reward(types.SimpleNamespace(batch=batch))
    rewards = {"token_level_rewards": data.batch["token_level_rewards"], "kl_coef_after": function.kl_coef}
    return {**rewards, **{f"metric_{name}": metric for name, metric in metrics.items()}}


def aggregate(given: InputTensors, params: Params) -> Outputs:
    """Trinity's reduction."""
    function = release.load("trinity.algorithm.utils").aggregate_loss
    return {"value": function(given.advantages, given.mask, params["loss_agg_mode"])}


def calls(root: pathlib.Path) -> dict[str, Call]:
    """Every function that a case of Trinity-RFT names."""
    load(root)
    return {
        **{class_of(path): functools.partial(loss, name) for name, path in LOSS_CLASSES.items()},
        **{class_of(path): functools.partial(over_batch, name) for name, path in OVER_BATCHES.items()},
        **{class_of(path): functools.partial(over_experiences, name) for name, path in OVER_EXPERIENCES.items()},
        "calculate_kl": calculate_kl,
        "calculate_kl_loss": calculate_kl_loss,
        "apply_kl_penalty_to_reward": kl_in_reward,
        "aggregate_loss": aggregate,
    }
