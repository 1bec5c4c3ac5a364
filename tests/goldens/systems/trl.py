"""TRL 1.16: methods of its trainers, compiled from their source, on a stand-in for the trainer."""

import collections
import functools
import math
import pathlib
import time
import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from tests.goldens.systems import release
from tests.goldens.systems.record import Call, InputTensors

Params = Mapping[str, Any]
Outputs = Mapping[str, Any]
MAX_LENGTH = 16  # `max_completion_length`, longer than the rows
ARGUMENTS = {
    "use_bias_correction_kl": True,
    "delta": None,
    "steps_per_generation": 1,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
}
ATTRIBUTES = {
    "loss_type": "grpo",
    "beta": 0.0,
    "importance_sampling_level": "token",
    "off_policy_mask_threshold": None,
    "use_vllm": False,
}


def trainer(given: InputTensors, params: Params, **methods: Callable[..., Any]) -> types.SimpleNamespace:
    """The attributes of the trainer that the methods read."""
    actual = {name: params.get(name, default) for name, default in ATTRIBUTES.items()}
    args = types.SimpleNamespace(**{name: params.get(name, default) for name, default in ARGUMENTS.items()})
    log_probs = given.log_probs
    return types.SimpleNamespace(
        **actual,
        **methods,
        args=args,
        epsilon_low=params["epsilon"],
        epsilon_high=params["epsilon_high"],
        top_entropy_quantile=1.0,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        vllm_importance_sampling_correction=True,
        max_completion_length=MAX_LENGTH,
        current_gradient_accumulation_steps=params.get("gradient_accumulation_steps", 1),
        model=types.SimpleNamespace(training=True),
        accelerator=types.SimpleNamespace(
            num_processes=1, gather=release.identity, gather_for_metrics=release.identity, reduce=release.identity
        ),
        _metrics={"train": collections.defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (log_probs, -log_probs.detach(), None),
    )


def inputs(given: InputTensors, params: Params) -> dict[str, torch.Tensor]:
    """The batch of a trainer: the prompt is one token, which the stand-in for the model does not read."""
    tokens = torch.zeros(given.mask.shape, dtype=torch.long)
    prompt = tokens[:, :1]
    batch = {"prompt_ids": prompt, "prompt_mask": prompt, "completion_ids": tokens, "completion_mask": given.mask}
    batch["advantages"] = given.advantages if params.get("per_token_advantages") else given.row_advantages
    batch |= {"old_per_token_logps": given.old_log_probs, "num_items_in_batch": given.mask.sum()}
    if params.get("beta", 0.0) != 0.0:
        batch["ref_per_token_logps"] = given.ref_log_probs
    if params.get("use_vllm"):
        batch["importance_sampling_ratio"] = torch.where(given.mask > 0, given.is_weights, 1.0)  # as TRL makes it
    return batch


def grpo_loss(method: Callable[..., Any], helpers: Mapping[str, Any], given: InputTensors, params: Params) -> Outputs:
    """`_compute_loss` of GRPO or GMPO, and its metrics."""
    self = trainer(given, params, **helpers)
    value = method(self, None, inputs(given, params))
    metrics = {name: values[-1] for name, values in self._metrics["train"].items()}
    wanted = ("kl", "clip_ratio/low_mean", "clip_ratio/high_mean", "cispo_clip_ratio")
    return {"value": value, **{f"metric_{name.replace('/', '_')}": metrics[name] for name in wanted if name in metrics}}


def rloo_loss(method: Callable[..., Any], given: InputTensors, params: Params) -> Outputs:
    """`_compute_loss` of RLOO, whose ratio is that of whole sequences."""
    batch = {**inputs(given, params), "old_logps": (given.old_log_probs * given.mask).sum(1)}
    return {"value": method(trainer(given, params), None, batch)}


def off_policy_mask(method: Callable[..., Any], given: InputTensors, params: Params) -> Outputs:
    """The rows that are kept."""
    arrays = given.row_advantages[:, None], given.log_probs, given.old_log_probs, given.mask
    return {"kept": method(*arrays, params["off_policy_threshold"])}


def async_loss(method: Callable[..., Any], given: InputTensors, params: Params) -> Outputs:
    """`compute_loss` of the asynchronous GRPO on rows that are packed into one, and its metrics."""
    self = types.SimpleNamespace(
        **{"epsilon_low": params["epsilon"], "epsilon_high": params["epsilon_high"], "aux_loss_enabled": False},
        **dict.fromkeys(
            ("_step_forward_tokens", "_step_trained_tokens", "_step_seq_len_weighted", "_step_samples"), 0.0
        ),
        **{"_step_forward_s": 0.0, "_metrics": {"train": collections.defaultdict(list)}},
        current_gradient_accumulation_steps=params["gradient_accumulation_steps"],
        accelerator=types.SimpleNamespace(num_processes=1, gather=release.identity, reduce=release.identity),
    )
    real, (rows, length) = given.mask.flatten() > 0, given.mask.shape
    flat = torch.arange(real.numel())
    known = {"token_index": torch.where(real, flat, -1), "segment_id": flat // length}
    known |= {"old_log_probs": given.rollout_log_probs, "advantages": given.row_advantages.repeat_interleave(length)}
    known |= dict.fromkeys(("input_ids", "position_ids", "shift_labels", "attention_mask"), torch.ones_like(flat))
    known |= dict.fromkeys(("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k"), flat)
    batch = {name: values.reshape(1, -1) for name, values in known.items()}
    batch |= {"tree_max_seqlens": torch.ones(1, 2), "global_n_tokens": given.mask.sum()[None]}
    batch |= {"global_n_forward_tokens": given.mask.sum()[None], "mean_seq_len": given.mask.sum()[None] / rows}
    outputs = types.SimpleNamespace(log_probs=given.log_probs, entropy=-given.log_probs.detach())
    value = method(self, lambda **_: outputs, batch)
    names = "kl", "clip_ratio/low_mean", "clip_ratio/high_mean"
    metrics = {f"metric_{name.replace('/', '_')}": torch.tensor(self._metrics["train"][name][-1]) for name in names}
    return {"value": value, **metrics}


def async_advantages(statements: Callable[..., Any], given: InputTensors, params: Params) -> Outputs:
    """The advantages of each group of two, from the rewards of the functions."""
    rewards = given.partial_components if params["partial"] else given.reward_components
    logger = types.SimpleNamespace(info=release.identity)
    groups = [
        statements(all_rewards=pair.T.tolist(), np=np, logger=logger, float=float)["advantages"]
        for pair in rewards.split(2)
    ]
    return {"advantages": torch.tensor(np.concatenate(groups))}


def importance_ratio(statements: Callable[..., Any], given: InputTensors, params: Params) -> Outputs:
    """The vLLM correction, of shape `[B, T]` or `[B, 1]`."""
    settings = {name: value for name, value in params.items() if name.startswith("vllm_")}
    self = types.SimpleNamespace(use_vllm=True, vllm_importance_sampling_correction=True, **settings)
    arrays = {"old_per_token_logps": given.old_log_probs, "sampling_per_token_logps": given.rollout_log_probs}
    names = statements(self=self, completion_mask=given.mask, tool_mask=None, **arrays)
    return {"weights": names["vllm_importance_sampling_ratio"].expand_as(given.mask)}


def grpo_advantages(
    statements: Callable[..., Any], names: Mapping[str, Any], given: InputTensors, params: Params
) -> Outputs:
    """The advantages of groups of two, of a single reward or of several."""
    several = params["multi_objective_aggregation"] == "normalize_then_sum"
    if params.get("partial"):
        rewards = given.partial_components
    else:
        rewards = given.reward_components if several else given.rewards[:, None]
    weights = torch.tensor(params.get("reward_weights", [1.0] * rewards.shape[1]), dtype=rewards.dtype)
    self = types.SimpleNamespace(
        multi_objective_aggregation=params["multi_objective_aggregation"],
        scale_rewards=params.get("scale_rewards", "group"),
        reward_weights=weights,
        reward_funcs=[None] * rewards.shape[1],
    )
    unscorable = torch.isnan(rewards).all(dim=1)
    arrays = {"rewards_per_func": rewards, "unscorable_mask": unscorable, "num_generations": 2, "device": "cpu"}
    return {"advantages": statements(self=self, **arrays, **names)["advantages"]}


def rloo_advantages(
    statements: Callable[..., Any], names: Mapping[str, Any], given: InputTensors, params: Params
) -> Outputs:
    """The leave-one-out advantages of groups of two."""
    self = types.SimpleNamespace(normalize_advantages=params["normalize_advantages"], beta=params["beta"])
    arrays: dict[str, Any] = {"rewards": given.rewards, "num_generations": 2, "gather": release.identity}
    if params["beta"] != 0.0:
        arrays |= {"old_per_token_logps": given.old_log_probs, "ref_per_token_logps": given.ref_log_probs}
        arrays["completion_mask"] = given.mask
    return {"advantages": statements(self=self, **arrays, **names)["advantages"]}


def jsd(method: Callable[..., Any], given: InputTensors, params: Params) -> Outputs:
    """The generalised divergence, a mean over the unmasked positions."""
    labels = torch.where(given.mask > 0, 0, -100)
    return {"value": method(given.logits, given.teacher_logits, labels, **params)}


def divergence(method: Callable[..., Any], given: InputTensors, params: Params) -> Outputs:
    """A divergence per token between two distributions over the vocabulary."""
    student, teacher = (torch.log_softmax(logits, -1) for logits in (given.logits, given.teacher_logits))
    return {"value": method(student, teacher, params["alpha"])}


def tail(method: Callable[..., Any], given: InputTensors, params: Params) -> Outputs:
    """The rest of all others beside the first log-probs of each row."""
    return {"value": method(torch.log_softmax(given.logits, -1)[..., : params["first"]])[..., -1]}


def weighted(method: Callable[..., Any], given: InputTensors, params: Params) -> Outputs:
    """A loss per token under a truncated, constant importance weight."""
    return {"value": method(given.advantages, given.log_probs, given.old_log_probs, params["clip_coeff"])}


def halves(log_probs: torch.Tensor, mask: torch.Tensor, mean: bool = False) -> tuple[torch.Tensor, ...]:
    """The summed log-probs of each row, or their means, in two halves: preferred or wanted rows, and the others."""
    return ((log_probs * mask).sum(1) / (mask.sum(1).clamp(min=1.0) if mean else 1.0)).chunk(2)


def with_reference(given: InputTensors) -> dict[str, torch.Tensor]:
    """The summed log-probs by TRL's names."""
    names = "chosen_logps", "rejected_logps", "ref_chosen_logps", "ref_rejected_logps"
    sums = *halves(given.log_probs, given.mask), *halves(given.ref_log_probs, given.mask)
    return dict(zip(names, sums, strict=True))


def dpo_loss(statements: Callable[..., Any], given: InputTensors, params: Params) -> Outputs:
    """The loss of pairs: the first half of the rows is preferred."""
    mask = given.mask
    self = types.SimpleNamespace(
        **{"f_divergence_type": "reverse_kl", "loss_types": [params["loss_type"]], "loss_weights": [1.0]},
        **{"beta": params["beta"], "label_smoothing": params.get("label_smoothing", 0.0), "use_weighting": False},
        args=types.SimpleNamespace(discopop_tau=params.get("discopop_tau", 0.05)),
    )
    arrays = {**with_reference(given), "completion_mask": mask, "shift_completion_mask": mask}
    names = statements(self=self, F=torch.nn.functional, per_token_logps=given.log_probs, device="cpu", **arrays)
    return {"value": names["loss"]}


def kto_loss(statements: Callable[..., Any], given: InputTensors, params: Params) -> Outputs:
    """The losses of rows: the first half is wanted, and the point of reference comes from other completions."""
    known = {name: params[name] for name in ("loss_type", "beta", "desirable_weight", "undesirable_weight")}
    gather = types.SimpleNamespace(gather_for_metrics=release.identity)
    self = types.SimpleNamespace(calculate_KL=params["loss_type"] == "kto", accelerator=gather, **known)
    arrays = {**with_reference(given), "KL_logps": given.row_advantages, "ref_KL_logps": given.baselines}
    return {"value": statements(self=self, F=torch.nn.functional, **arrays)["losses"].sum()}


def cpo_loss(method: Callable[..., Any], given: InputTensors, params: Params) -> Outputs:
    """The losses of pairs without a reference: of sums, or of means for SimPO."""
    self = types.SimpleNamespace(alpha=0.0, accelerator=types.SimpleNamespace(device="cpu"), **params)
    scores = halves(given.log_probs, given.mask, mean=params["loss_type"] in ("simpo", "ipo"))
    return {"value": method(self, *scores)[0].sum()}


def online_dpo_loss(statements: Callable[..., Any], given: InputTensors, params: Params) -> Outputs:
    """The loss of pairs: the first completion of each has the higher reward."""
    half, mask = len(given.mask) // 2, given.mask.long()
    args = {"missing_eos_penalty": params["missing_eos_penalty"], "loss_type": params["loss_type"]}
    self = types.SimpleNamespace(
        args=types.SimpleNamespace(**args),
        beta=params["beta"],
        _calculate_rewards_from_functions=lambda **_: torch.arange(2.0 * half).flip(0),
    )
    arrays = {"logprobs": given.log_probs, "ref_logprobs": given.ref_log_probs, "completion_mask": mask}
    names = {"prompts": [""] * half, "completions": [], "completion_ids_list": [], "reward_kwargs": {}}
    scope = statements(self=self, F=torch.nn.functional, batch_size=half, device="cpu", **arrays, **names)
    return {"value": scope["loss"]}


def orpo_loss(method: Callable[..., Any], given: InputTensors, params: Params) -> Outputs:
    """The term of the odds ratio, which the trainer subtracts."""
    self = types.SimpleNamespace(accelerator=types.SimpleNamespace(device="cpu"), **params)
    return {"value": -method(self, *halves(given.log_probs, given.mask, mean=True))[0].sum()}


def tpo_loss(statements: Callable[..., Any], given: InputTensors, params: Params) -> Outputs:
    """The loss of pairs without a reference, the mean over pairs."""
    chosen, rejected = halves(given.log_probs, given.mask, mean=params["loss_type"] in ("ipo", "tpo-l"))
    self = types.SimpleNamespace(**params)
    names = statements(self=self, F=torch.nn.functional, chosen_logps=chosen, rejected_logps=rejected)
    return {"value": names["loss"]}


def a2po_loss(method: Callable[..., Any], given: InputTensors, params: Params) -> Outputs:
    """The squared error of the rows; V* is the baseline of each."""
    policy, reference = ((log_probs * given.mask).sum(1) for log_probs in (given.log_probs, given.ref_log_probs))
    self = types.SimpleNamespace(
        args=types.SimpleNamespace(beta2=params["beta2"]),
        model=types.SimpleNamespace(training=True),
        _metrics={"train": collections.defaultdict(list)},
        _get_sequence_logps=lambda *_: policy,
    )
    batch = dict.fromkeys(("input_ids", "attention_mask", "logits_to_keep"))
    batch |= {"ref_logps": reference, "rewards": given.rewards, "v_star": given.baselines}
    return {"value": method(self, None, batch)}


def calls(root: pathlib.Path) -> dict[str, Call]:
    """Every function that a case of TRL names."""
    trl = root / "trl"
    utils, grpo, rloo = (trl / f"trainer/{name}.py" for name in ("utils", "grpo_trainer", "rloo_trainer"))
    names: dict[str, Any] = {"torch": torch, "math": math, "F": torch.nn.functional}
    names |= {name: release.function_from(utils, name, names) for name in ("nanmin", "nanmax", "nanstd")}
    helpers = {name: release.function_from(grpo, name, names) for name in ("get_off_policy_mask", "get_gamma_weights")}
    helpers["get_gamma_weights"] = torch.no_grad()(helpers["get_gamma_weights"])  # its decorator in the release
    asynchronous, online = (trl / f"experimental/{name}" for name in ("async_grpo", "online_dpo"))
    gmpo = release.function_from(trl / "experimental/gmpo/gmpo_trainer.py", "_compute_loss", names)
    sdpo = trl / "experimental/sdpo/loss_utils.py"
    parts = {name: release.function_from(sdpo, name, names) for name in ("compute_divergence", "add_tail_bucket")}
    topk = release.function_from(sdpo, "compute_topk_self_distillation_loss", {**names, **parts})
    clipping = release.function_from(sdpo, "apply_importance_sampling_clipping", names)
    dpo, kto = (trl / f"trainer/{name}_trainer.py" for name in ("dpo", "kto"))
    orpo, cpo, tpo, a2po = (trl / f"experimental/{name}/{name}_trainer.py" for name in ("orpo", "cpo", "tpo", "a2po"))
    log1mexp = {"log1mexp": release.function_from(orpo, "log1mexp", names)}
    compute = "_compute_loss"
    generate, zeroed = "_generate_and_score_completions", "advantages = torch.nan_to_num"
    vllm = "if self.use_vllm and self.vllm_importance_sampling_correction:\n    mask"
    return {
        "GRPOTrainer._compute_loss": functools.partial(
            grpo_loss, release.function_from(grpo, "_compute_loss", names), helpers
        ),
        "GMPOTrainer._compute_loss": functools.partial(grpo_loss, gmpo, {}),
        "AsyncGRPOTrainer.compute_loss": functools.partial(
            async_loss,
            release.function_from(asynchronous / "async_grpo_trainer.py", "compute_loss", {**names, "time": time}),
        ),
        "async_advantages": functools.partial(
            async_advantages,
            release.statements_from(
                asynchronous / "async_rollout_worker.py", "_score_group", "all_rewards = [[r if", "if scored_mask.any()"
            ),
        ),
        "OnlineDPOTrainer.training_step": functools.partial(
            online_dpo_loss,
            release.statements_from(
                online / "online_dpo_trainer.py", "training_step", "rewards = self._calculate", "loss = losses.mean()"
            ),
        ),
        "RLOOTrainer._compute_loss": functools.partial(rloo_loss, release.function_from(rloo, "_compute_loss", names)),
        "get_off_policy_mask": functools.partial(off_policy_mask, helpers["get_off_policy_mask"]),
        "vllm_importance_sampling": functools.partial(
            importance_ratio, release.statements_from(grpo, generate, vllm, vllm)
        ),
        "advantages": functools.partial(
            grpo_advantages,
            release.statements_from(grpo, generate, "if self.multi_objective_aggregation", zeroed),
            {"nanstd": names["nanstd"]},
        ),
        "rloo_advantages": functools.partial(
            rloo_advantages,
            release.statements_from(rloo, generate, "if self.beta != 0.0:\n    per_token_kl", zeroed),
            {"nanstd": names["nanstd"]},
        ),
        "generalized_jsd_loss": functools.partial(
            jsd, release.function_from(trl / "experimental/gkd/gkd_trainer.py", "generalized_jsd_loss", names)
        ),
        "compute_divergence": functools.partial(divergence, parts["compute_divergence"]),
        "add_tail_bucket": functools.partial(tail, parts["add_tail_bucket"]),
        "compute_topk_self_distillation_loss": lambda given, params: {
            "value": topk(given.logits, given.teacher_logits, **params)
        },
        "DPOTrainer._compute_loss": functools.partial(
            dpo_loss, release.statements_from(dpo, compute, "chosen_logratios = ", "for loss_type, loss_weight in")
        ),
        "KTOTrainer._compute_loss": functools.partial(
            kto_loss, release.statements_from(kto, compute, "if self.calculate_KL:\n    kl", "losses = torch.cat")
        ),
        "cpo_loss": functools.partial(cpo_loss, release.function_from(cpo, "cpo_loss", names)),
        "odds_ratio_loss": functools.partial(
            orpo_loss, release.function_from(orpo, "odds_ratio_loss", {**names, **log1mexp})
        ),
        "TPOTrainer._compute_loss": functools.partial(
            tpo_loss, release.statements_from(tpo, compute, "delta_score = ", "loss = per_sequence_loss.mean()")
        ),
        "A2POTrainer.compute_loss": functools.partial(a2po_loss, release.function_from(a2po, "compute_loss", names)),
        "apply_importance_sampling_clipping": functools.partial(weighted, clipping),
    }
