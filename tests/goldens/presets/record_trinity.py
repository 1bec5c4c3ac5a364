"""Trinity-RFT: advantages by its functions, then `forward_backward_batch` of verl's engine with `TrinityPolicyLoss`.

RELEASE is a directory with the releases of Trinity-RFT and of verl 0.9.1, `trinity` and `verl`, unpacked together. It
needs what record_verl.py needs; ray and what else is not installed are replaced.
"""

import pathlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from tests.goldens.presets import batch, record, record_verl, stubs, verl_engine

ABOUT = {"version": "trinity-rft 0.6.0", "dtype": "float64"}
KL: dict[str, Any] = {"kl_loss_fn": "k2", "kl_loss_fn_args": {"adaptive": False, "kl_coef": 0.001}}
# Settings of `algorithm`.
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"advantage_fn": "grpo", "policy_loss_fn": "ppo", **KL},
    "dapo": {
        "advantage_fn": "grpo",
        "policy_loss_fn": "ppo",
        "policy_loss_fn_args": {"clip_range_low": 0.2, "clip_range_high": 0.28},
    },
    "gspo": {"advantage_fn": "grpo", "policy_loss_fn": "gspo"},
    "cispo": {"advantage_fn": "grpo", "policy_loss_fn": "cispo"},
    "rloo": {"advantage_fn": "rloo", "policy_loss_fn": "ppo", **KL},
    "reinforce++": {"advantage_fn": "reinforceplusplus", "policy_loss_fn": "ppo", **KL},
}


def advantages_of(recorded: batch.Recorded, name: str) -> torch.Tensor:
    """The advantages [B, T] of a function of Trinity."""
    from trinity.algorithm import ADVANTAGE_FN

    function = ADVANTAGE_FN.get(name)
    mask = torch.from_numpy(recorded.mask).long()
    if name == "grpo":
        experiences = [
            types.SimpleNamespace(reward=float(reward), action_mask=mask[row].to(torch.get_default_dtype()))
            for row, reward in enumerate(recorded.rewards)
        ]
        for group in range(batch.PROMPTS):
            members = [experiences[row] for row in np.flatnonzero(recorded.groups == group)]
            function(**function.default_args()).calculate_group_advantage(str(group), members)
        return torch.stack([experience.advantages for experience in experiences])
    scores = torch.from_numpy(recorded.token_rewards)
    tensors = {"token_level_rewards": scores, "response_mask": mask}
    data = types.SimpleNamespace(batch=tensors, non_tensor_batch={"uid": recorded.groups.tolist()})
    function(**function.default_args())(data)
    return data.batch["advantages"]


def run(algorithm: str, accumulation: int, recorded: batch.Recorded) -> record.Step:
    """One optimizer step of an actor."""
    from trinity.algorithm import POLICY_LOSS_FN
    from trinity.trainer.verl.losses import TrinityPolicyLoss

    settings = ALGORITHMS[algorithm]
    arguments = {**POLICY_LOSS_FN.get(settings["policy_loss_fn"]).default_args(), "loss_agg_mode": "token-mean"}
    config = types.SimpleNamespace(
        policy_loss_fn=settings["policy_loss_fn"],
        policy_loss_fn_args=arguments | settings.get("policy_loss_fn_args", {}),
        kl_loss_fn=settings.get("kl_loss_fn", "none"),
        kl_loss_fn_args=settings.get("kl_loss_fn_args", {}),
        entropy_loss_fn="none",
        entropy_loss_fn_args={"entropy_coef": 0.0},
        loss_agg_mode="token-mean",
    )
    data = record_verl.prepared(recorded, {"adv_estimator": "grpo"})
    data.batch["advantages"] = advantages_of(recorded, settings["advantage_fn"])
    loss, gradients = verl_engine.forward_backward(data, TrinityPolicyLoss(config), accumulation)
    return record.Step(algorithm, accumulation, settings, loss, gradients)


def steps(root: pathlib.Path) -> Iterator[record.Step]:
    """Every algorithm with one and with two micro-batches."""
    sys.path.insert(0, str(root))
    stubs.replace("ray")
    sys.modules["torch.utils.tensorboard"] = stubs.Anything("torch.utils.tensorboard")
    import verl.trainer.ppo.ray_trainer
    import verl.workers.engine.fsdp.transformer_impl  # noqa: F401

    with stubs.missing_replaced(root / "trinity"):
        import trinity.trainer.verl.losses  # noqa: F401

    yield from verl_engine.steps(run, ALGORITHMS)
