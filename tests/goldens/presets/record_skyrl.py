"""SkyRL: advantages and reductions by `RayPPOTrainer`, then `forward_backward` of its FSDP policy worker.

Needs omegaconf, loguru and jaxtyping; ray, flash_attn, vllm, megatron and what else is not
installed are replaced. One process: what would be
reduced over processes is left as it is.
"""

import pathlib
import sys
import types
import typing
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
import typing_extensions

from tests.goldens.presets import batch, model, record, stubs

ABOUT = {"version": "skyrl 0.3.0", "dtype": "float64"}
# Settings of `trainer.algorithm`.
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"advantage_estimator": "grpo"},
    "grpo_sequence_mean": {"advantage_estimator": "grpo", "loss_reduction": "sequence_mean"},
    "grpo_tis": {
        "advantage_estimator": "grpo",
        "use_kl_loss": False,
        "off_policy_correction": {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 1.1},
    },
    "dr_grpo": {
        "advantage_estimator": "grpo",
        "grpo_norm_by_std": False,
        "loss_reduction": "seq_mean_token_sum_norm",
        "max_seq_len": batch.COMPLETION_LENGTH,
        "use_kl_loss": False,
    },
    "dapo": {
        "advantage_estimator": "grpo",
        "policy_loss_type": "dual_clip",
        "eps_clip_high": 0.28,
        "clip_ratio_c": 10.0,
        "use_kl_loss": False,
    },
    "gspo": {
        "advantage_estimator": "grpo",
        "policy_loss_type": "gspo",
        "eps_clip_low": 3e-4,
        "eps_clip_high": 4e-4,
        "loss_reduction": "sequence_mean",
        "use_kl_loss": False,
    },
    "cispo": {"advantage_estimator": "grpo", "policy_loss_type": "cispo", "use_kl_loss": False},
    "reinforce++": {
        "advantage_estimator": "reinforce++",
        "use_kl_loss": False,
        "use_kl_in_reward": True,
        "kl_estimator_type": "k2",
    },
    "rloo": {
        "advantage_estimator": "rloo",
        "use_kl_loss": False,
        "use_kl_in_reward": True,
        "kl_estimator_type": "k1",
    },
    "ppo": {"advantage_estimator": "gae", "use_kl_loss": False},
}


def prepared(recorded: batch.Recorded, config: Any, rows: int) -> Any:
    """The batch with the scaled advantages of SkyRL's trainer."""
    from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
    from skyrl.train.trainer import RayPPOTrainer

    mask = torch.from_numpy(recorded.mask).long()
    scores = torch.from_numpy(recorded.token_rewards)
    data = TrainingInputBatch(
        {
            "sequences": torch.from_numpy(recorded.tokens),
            "attention_mask": torch.from_numpy(recorded.token_mask).long(),
            "response_mask": mask,
            "loss_mask": mask,
            "rewards": scores,
            "action_log_probs": torch.from_numpy(recorded.old_log_probs),
            "base_action_log_probs": torch.from_numpy(recorded.ref_log_probs),
            "rollout_logprobs": torch.from_numpy(recorded.rollout_log_probs),
            "values": torch.from_numpy(recorded.old_values),
        }
    )
    uids = np.array([str(group) for group in recorded.groups])
    data.metadata = {"uids": uids, "response_length": batch.COMPLETION_LENGTH, "avg_response_length": 1.0}
    trainer = object.__new__(RayPPOTrainer)
    trainer.cfg = types.SimpleNamespace(
        generator=types.SimpleNamespace(step_wise_trajectories=False),
        trainer=types.SimpleNamespace(algorithm=config, micro_train_batch_size_per_gpu=rows),
    )
    trainer.all_metrics, trainer.reward_kl_controller = {}, None
    if config.use_kl_in_reward:
        data = trainer.apply_reward_kl_penalty(data)
    data = trainer.compute_advantages_and_returns(data)
    return trainer._normalize_advantages(data, [(0, batch.ROWS)])


def run(algorithm: str, accumulation: int, recorded: batch.Recorded) -> record.Step:
    """One optimizer step of a policy worker."""
    from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry
    from skyrl.backends.skyrl_train.workers import worker as workers
    from skyrl.backends.skyrl_train.workers.model_wrapper import HFModelWrapper
    from skyrl.train.config.config import AlgorithmConfig, OffPolicyCorrectionConfig

    settings = ALGORITHMS[algorithm]
    rows = batch.ROWS // accumulation
    correction = OffPolicyCorrectionConfig(**settings.get("off_policy_correction", {}))
    config = AlgorithmConfig(temperature=batch.TEMPERATURE, **{**settings, "off_policy_correction": correction})
    trained = model.load()
    worker = object.__new__(workers.PolicyWorkerBase)
    worker.cfg = types.SimpleNamespace(
        algorithm=config, micro_train_batch_size_per_gpu=rows, max_tokens_per_microbatch=-1
    )
    worker.model, worker.optimizer = HFModelWrapper(trained), None
    worker.policy_loss_fn = PolicyLossRegistry.get(config.policy_loss_type)
    worker.mesh_rank = types.SimpleNamespace(dp_size=1)
    worker.device_mesh = types.SimpleNamespace(get_group=lambda _: None)
    worker.scheduler = types.SimpleNamespace(get_last_lr=lambda: [0.0])
    worker.strategy = types.SimpleNamespace(backward=lambda loss, *_: loss.backward())
    with (
        mock.patch.object(workers, "all_reduce_metrics", lambda metrics, *_, **__: metrics),
        mock.patch("torch.cuda.current_device", return_value="cpu"),
    ):
        actual = worker.forward_backward(prepared(recorded, config, rows))
    return record.Step(algorithm, accumulation, settings, actual.metrics["final_loss"], record.gradients_of(trained))


def steps(root: pathlib.Path) -> Iterator[record.Step]:
    """Every algorithm with one and with two micro-batches."""
    sys.path[:0] = [str(root), str(root / "skyrl-gym")]
    stubs.replace("ray", "flash_attn", "vllm", "megatron")
    # pydantic refuses the one of Python 3.11.
    typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]
    with stubs.missing_replaced(root):
        import skyrl.backends.skyrl_train.utils.torch_utils as log_probs
        import skyrl.backends.skyrl_train.workers.worker
        import skyrl.train.trainer  # noqa: F401
    log_probs.FLASH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE = False
    yield from model.float64_steps(run, ALGORITHMS)
