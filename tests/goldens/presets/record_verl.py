"""verl: advantages by its trainer, then `forward_backward_batch` of its FSDP engine with `ppo_loss`, on one process.

Needs tensordict, omegaconf, hydra-core, codetiming, peft, cachetools, orjson, pillow, torchdata, uvicorn and fastapi;
ray is replaced.
"""

import functools
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

from tests.goldens.presets import batch, model, record, stubs, verl_engine

ABOUT = {"version": "verl 0.9.1", "dtype": "float64"}
KL_LOSS: dict[str, Any] = {"use_kl_loss": True, "kl_loss_coef": 0.001, "kl_loss_type": "low_var_kl"}
# Settings of `actor_rollout_ref.actor`, `.policy_loss`, `algorithm` and `algorithm.rollout_correction`.
ALGORITHMS: dict[str, dict[str, dict[str, Any]]] = {
    "grpo": {"actor": KL_LOSS, "algorithm": {"adv_estimator": "grpo"}},
    "grpo_tis": {
        "actor": {},
        "algorithm": {"adv_estimator": "grpo"},
        "rollout_correction": {"rollout_is": "token", "rollout_is_threshold": 1.1},
    },
    "dr_grpo": {
        "actor": {"loss_agg_mode": "seq-mean-token-sum-norm"},
        "algorithm": {"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": False},
    },
    "dapo": {
        "actor": {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 10.0},
        "algorithm": {"adv_estimator": "grpo"},
    },
    "gspo": {
        "actor": {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4, "loss_agg_mode": "seq-mean-token-mean"},
        "policy_loss": {"loss_mode": "gspo"},
        "algorithm": {"adv_estimator": "grpo"},
    },
    "cispo": {
        "actor": {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2},
        "policy_loss": {"loss_mode": "cispo"},
        "algorithm": {"adv_estimator": "grpo"},
    },
    "reinforce++": {
        "actor": {**KL_LOSS, "kl_loss_type": "mse"},
        "algorithm": {"adv_estimator": "reinforce_plus_plus"},
    },
    "rloo": {"actor": {}, "algorithm": {"adv_estimator": "rloo", "use_kl_in_reward": True, "kl_penalty": "kl"}},
    "ppo": {"actor": {}, "algorithm": {"adv_estimator": "gae"}},
}


def prepared(recorded: batch.Recorded, settings: dict[str, Any], correction: dict[str, Any] | None = None) -> Any:
    """The batch with the advantages of verl's trainer, and with the weights of a correction for the sampler."""
    from verl import DataProto
    from verl.trainer.config.algorithm import AlgoConfig, RolloutCorrectionConfig
    from verl.trainer.ppo import core_algos, ray_trainer, rollout_corr_helper

    mask = torch.from_numpy(recorded.mask)
    scores = torch.from_numpy(recorded.token_rewards)
    attended = torch.from_numpy(recorded.token_mask).long()
    data = DataProto.from_dict(
        tensors={
            "input_ids": torch.from_numpy(recorded.tokens),
            "prompts": torch.from_numpy(recorded.prompts),
            "responses": torch.from_numpy(recorded.completions),
            "attention_mask": attended,
            "position_ids": model.positions(attended),
            "response_mask": mask.long(),
            "token_level_scores": scores,
            "token_level_rewards": scores,
            "old_log_probs": torch.from_numpy(recorded.old_log_probs),
            "ref_log_prob": torch.from_numpy(recorded.ref_log_probs),
            "rollout_log_probs": torch.from_numpy(recorded.rollout_log_probs),
            "values": torch.from_numpy(recorded.old_values),
        },
        non_tensors={"uid": recorded.groups.astype(object)},
    )
    if correction is not None:
        made = RolloutCorrectionConfig(**correction)
        data, _ = rollout_corr_helper.compute_rollout_correction_and_add_to_batch(data, made)
    config = AlgoConfig(**settings)
    if config.use_kl_in_reward:
        data, _ = ray_trainer.apply_kl_penalty(data, core_algos.FixedKLController(0.001), config.kl_penalty)
    return ray_trainer.compute_advantage(
        data,
        config.adv_estimator,
        gamma=config.gamma,
        lam=config.lam,
        norm_adv_by_std_in_grpo=config.norm_adv_by_std_in_grpo,
        config=config,
    )


def run(algorithm: str, accumulation: int, recorded: batch.Recorded) -> record.Step:
    """One optimizer step of an actor."""
    from verl.workers.config import FSDPActorConfig, PolicyLossConfig
    from verl.workers.utils.losses import ppo_loss

    settings = ALGORITHMS[algorithm]
    actor = FSDPActorConfig(
        rollout_n=batch.SAMPLES,
        ppo_mini_batch_size=batch.ROWS,
        ppo_micro_batch_size_per_gpu=batch.ROWS // accumulation,
        policy_loss=PolicyLossConfig(**settings.get("policy_loss", {})),
        **settings["actor"],
    )
    data = prepared(recorded, settings["algorithm"], settings.get("rollout_correction"))
    loss, gradients = verl_engine.forward_backward(data, functools.partial(ppo_loss, actor), accumulation)
    return record.Step(algorithm, accumulation, settings, loss, gradients)


def steps(root: pathlib.Path) -> Iterator[record.Step]:
    """Every algorithm with one and with two micro-batches."""
    sys.path.insert(0, str(root))
    stubs.replace("ray")
    import verl.trainer.ppo.ray_trainer
    import verl.workers.engine.fsdp.transformer_impl  # noqa: F401

    yield from verl_engine.steps(run, ALGORITHMS)
