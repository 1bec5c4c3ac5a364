"""OpenRLHF: advantages by `RemoteExperienceMaker`, then `ActorPPOTrainer.training_step` on each micro-batch.

Needs peft; ray, deepspeed, vllm, flash_attn and what else is not installed are replaced. The engine of DeepSpeed is one
line here: it divides the loss of a micro-batch by their number and calls `backward`.
"""

import pathlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

from tests.goldens.presets import batch, model, record, stubs

ABOUT = {"version": "openrlhf 0.11.2", "dtype": "float64"}
# Arguments of the command line, by their sections.
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {
        "algo.advantage.estimator": "group_norm",
        "algo.kl.use_loss": True,
        "algo.kl.estimator": "k3",
        "algo.kl.init_coef": 0.001,
    },
    "dr_grpo": {"algo.advantage.estimator": "dr_grpo", "algo.kl.init_coef": 0.0},
    "dapo": {
        "algo.advantage.estimator": "group_norm",
        "actor.eps_clip_low_high": [0.2, 0.28],
        "algo.kl.init_coef": 0.0,
    },
    "gspo": {
        "algo.advantage.estimator": "group_norm",
        "actor.policy_loss_type": "gspo",
        "actor.eps_clip_low_high": [3e-4, 4e-4],
        "algo.kl.init_coef": 0.0,
    },
    "reinforce++": {"algo.advantage.estimator": "reinforce", "algo.kl.init_coef": 0.01},
    "reinforce++_baseline": {
        "algo.advantage.estimator": "reinforce_baseline",
        "algo.kl.use_loss": True,
        "algo.kl.estimator": "k2",
        "algo.kl.init_coef": 0.01,
    },
    "rloo": {
        "algo.advantage.estimator": "rloo",
        "algo.kl.use_loss": True,
        "algo.kl.estimator": "k2",
        "algo.kl.init_coef": 0.01,
    },
    "ppo": {"algo.advantage.estimator": "gae", "algo.advantage.lambd": 0.95, "algo.kl.init_coef": 0.01},
}
DEFAULTS: dict[str, Any] = {
    "algo.advantage.gamma": 1.0,
    "algo.advantage.lambd": 1.0,
    "algo.advantage.no_std_norm": False,
    "algo.advantage.is_correction_level": "off",
    "algo.advantage.is_correction_mode": "mask",
    "algo.advantage.is_correction_gating": "ratio",
    "algo.advantage.is_correction_threshold": [0.5, 5.0],
    "algo.kl.use_loss": False,
    "algo.kl.estimator": "k1",
    "algo.kl.unbiased_gradient": False,
    "actor.eps_clip_low_high": [0.2, 0.2],
    "actor.dual_clip": None,
    "actor.loss_agg_mode": "token-mean",
    "actor.policy_loss_type": "ppo",
    "actor.aux_loss_coef": 0.0,
    "actor.entropy_coef": None,
    "rollout.n_samples_per_prompt": batch.SAMPLES,
    "rollout.max_new_tokens": batch.COMPLETION_LENGTH,
    "reward.clip_range": (-10.0, 10.0),
    "reward.overlong_buffer_len": None,
    "reward.stop_properly_penalty_coef": None,
    "train.dynamic_batch_enable": False,
    "ds.packing_samples": False,
}


def arguments(settings: dict[str, Any]) -> types.SimpleNamespace:
    """The arguments as the command line parses them."""
    root = types.SimpleNamespace()
    for path, value in {**DEFAULTS, **settings}.items():
        *sections, name = path.split(".")
        section = root
        for part in sections:
            if not hasattr(section, part):
                setattr(section, part, types.SimpleNamespace())
            section = getattr(section, part)
        setattr(section, name, value)
    return root


def experience_of(recorded: batch.Recorded, args: Any) -> Any:
    """The whole rollout with the advantages of the experience maker."""
    from openrlhf.models.utils import compute_approx_kl
    from openrlhf.trainer.ppo_utils.experience import Experience
    from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker

    old, reference = torch.from_numpy(recorded.old_log_probs), torch.from_numpy(recorded.ref_log_probs)
    in_reward = not args.algo.kl.use_loss
    experience = Experience(
        sequences=torch.from_numpy(recorded.tokens),
        attention_mask=torch.from_numpy(recorded.token_mask).long(),
        action_mask=torch.from_numpy(recorded.mask),
        action_log_probs=old,
        base_action_log_probs=reference,
        rollout_log_probs=torch.from_numpy(recorded.rollout_log_probs),
        values=torch.from_numpy(recorded.old_values),
        rewards=torch.from_numpy(recorded.rewards),
        kl=compute_approx_kl(old, reference, kl_estimator=args.algo.kl.estimator) if in_reward else 0 * old,
        index=list(range(batch.ROWS)),
    )
    maker = object.__new__(RemoteExperienceMaker)
    maker.strategy = types.SimpleNamespace(args=args)
    maker.args, maker.advantage_estimator = args, args.algo.advantage.estimator
    maker.kl_ctl = types.SimpleNamespace(value=args.algo.kl.init_coef)
    return maker.compute_advantages_and_returns([experience])[0]


def split(experience: Any, count: int) -> list[Any]:
    """The micro-batches, consecutive rows."""
    from openrlhf.trainer.ppo_utils.experience import Experience

    size = batch.ROWS // count
    tensors = {name: value for name, value in vars(experience).items() if isinstance(value, torch.Tensor)}
    return [
        Experience(**{name: value[start : start + size] for name, value in tensors.items()}, info={})
        for start in range(0, batch.ROWS, size)
    ]


class LossEngine(torch.nn.Module):
    """The part of DeepSpeed's engine that a loss sees."""

    def __init__(self, trained: torch.nn.Module, accumulation: int) -> None:
        super().__init__()
        self.trained, self.accumulation, self.loss = trained, accumulation, 0.0
        self.config = trained.config

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Runs the model."""
        return self.trained(*inputs, **options)

    def backward(self, loss: torch.Tensor) -> None:
        """Scales the loss by the number of micro-batches."""
        scaled = loss / self.accumulation
        scaled.backward()
        self.loss += scaled.item()


def run(algorithm: str, accumulation: int, recorded: batch.Recorded) -> record.Step:
    """One optimizer step of an actor."""
    from openrlhf.models import Actor, PolicyLoss
    from openrlhf.trainer.ray.ppo_actor import ActorPPOTrainer
    from openrlhf.utils.deepspeed import DeepspeedStrategy
    from openrlhf.utils.loss_utils import iter_grad_accum_global_norm

    args = arguments(ALGORITHMS[algorithm])
    trained = model.load()
    engine = LossEngine(trained, accumulation)
    actor = Actor(engine, temperature=batch.TEMPERATURE)
    actor.packing_samples = False
    strategy = object.__new__(DeepspeedStrategy)
    strategy.args = args
    for name in ("optimizer_step", "get_grad_norm"):
        setattr(strategy, name, lambda *_, **__: None)
    type(strategy).ring_attn_group = None
    trainer = object.__new__(ActorPPOTrainer)
    trainer.strategy, trainer.args, trainer.actor = strategy, args, actor
    trainer.actor_optim, trainer.ema_model, trainer.aux_loss, trainer.replay_buffer = None, None, False, None
    trainer.actor_scheduler = types.SimpleNamespace(get_last_lr=lambda: [0.0])
    trainer.actor_loss_fn = PolicyLoss(
        clip_eps_low=args.actor.eps_clip_low_high[0],
        clip_eps_high=args.actor.eps_clip_low_high[1],
        dual_clip=args.actor.dual_clip,
        token_level_loss=args.actor.loss_agg_mode == "token-mean",
        policy_loss_type=args.actor.policy_loss_type,
    )
    parts = split(experience_of(recorded, args), accumulation)
    for step, (part, info) in enumerate(
        iter_grad_accum_global_norm(parts, strategy, accumulation, lambda part: part.action_mask)
    ):
        trainer.training_step(part, args.algo.kl.init_coef, step, info)
    return record.Step(algorithm, accumulation, ALGORITHMS[algorithm], engine.loss, record.gradients_of(trained))


def steps(root: pathlib.Path) -> Iterator[record.Step]:
    """Every algorithm with one and with two micro-batches."""
    sys.path.insert(0, str(next(root.glob("openrlhf-*.data/purelib"), root)))
    stubs.replace("ray", "deepspeed", "vllm", "flash_attn")
    # Without this kernel it takes the log-probs in PyTorch.
    sys.modules["flash_attn.ops.triton.cross_entropy"] = None  # type: ignore[assignment]
    with stubs.missing_replaced(root):
        import openrlhf.trainer.ppo_utils.experience_maker
        import openrlhf.trainer.ray.ppo_actor  # noqa: F401
    yield from model.float64_steps(run, ALGORITHMS)
