"""Tunix's GRPO learner on recorded completions, which take the place of sampling; in the environment of Tunix."""

import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix.models.qwen3 import model as qwen3
from tunix.rl import rl_cluster
from tunix.rl.grpo import grpo_learner
from tunix.rl.rollout import base_rollout

from kljax.integrations import tunix


@dataclasses.dataclass(frozen=True)
class TunixWork:
    """A Qwen 3 and a batch; `samples` completions a prompt, whose lengths differ."""

    vocab: int = 4096
    layers: int = 4
    width: int = 256
    prompts: int = 2
    samples: int = 4
    prompt_length: int = 128
    completion_length: int = 128

    def model(self, seed: int) -> qwen3.Qwen3:
        """Draws a model with a head of its own, whose predictions depend on the seed."""
        config = qwen3.ModelConfig(
            num_layers=self.layers, vocab_size=self.vocab, embed_dim=self.width, hidden_dim=3 * self.width,
            num_heads=4, head_dim=self.width // 4, num_kv_heads=2, rope_theta=1_000_000, norm_eps=1e-6,
        )  # fmt: skip
        drawn = qwen3.Qwen3(config, rngs=nnx.Rngs(seed))
        # Tunix's initial embeddings and heads predict nearly the same everywhere.
        state = jax.tree.map(lambda leaf: leaf * (5.0 if leaf.ndim > 1 else 1.0), nnx.state(drawn))
        nnx.update(drawn, state)
        return drawn

    def completions(self) -> tuple[list[np.ndarray], np.ndarray]:
        """Draws completions of differing lengths, and the log-probs that a sampler says it had."""
        draw = np.random.default_rng(3)
        rows = self.prompts * self.samples
        lengths = np.linspace(self.completion_length // 4, self.completion_length, rows).astype(int)
        tokens = [draw.integers(3, self.vocab, length) for length in lengths]
        return tokens, -np.log(self.vocab) + 0.3 * draw.standard_normal((rows, self.completion_length))


class NumberTokenizer:
    """Has ids for padding, begin and end; a prompt is the number of its row."""

    def bos_id(self) -> int:
        """The begin of a sequence."""
        return 1

    def eos_id(self) -> int:
        """The end of a sequence."""
        return 2

    def pad_id(self) -> int:
        """The padding, from which Tunix makes its masks."""
        return 0

    def encode(self, text: str) -> list[int]:
        """The id of a prompt."""
        return [3 + int(text)]

    def decode(self, ids: list[int]) -> str:
        """Nothing reads the text."""
        return ""


def recorded_rollout(work: TunixWork, marks: list[float], log_probs: bool) -> type:
    """Returns a rollout engine that answers with recorded completions, and notes the CPU seconds of each call."""
    tokens, sampled = work.completions()
    prompts = np.random.default_rng(4).integers(3, work.vocab, (work.prompts, work.prompt_length))

    class TunixRollouts(base_rollout.BaseRollout):
        def __init__(self, rollout_actor: Any, **_: Any) -> None:
            self.actor = rollout_actor

        def generate(self, texts: list[str], *_: Any, **__: Any) -> Any:
            marks.append(time.process_time())
            # The texts are numbers of prompts, each `samples` times in a row.
            rows = [int(text) * work.samples + index % work.samples for index, text in enumerate(texts)]
            return base_rollout.RolloutOutput(
                text=[str(row) for row in rows],
                logits=[],
                tokens=[tokens[row] for row in rows],
                left_padded_prompt_tokens=prompts[[int(text) for text in texts]],
                logprobs=[sampled[row, : len(tokens[row])] for row in rows] if log_probs else None,
            )

        def get_per_token_logps(self, *_: Any, **__: Any) -> Any: ...

        def update_params(self, *_: Any, **__: Any) -> None: ...

        def pad_id(self) -> int:
            return 0

        def eos_id(self) -> int:
            return 2

        def model(self) -> Any:
            return self.actor

    return TunixRollouts


def keep_gradient() -> optax.GradientTransformation:
    """Returns an optimizer that changes nothing and whose state is the last gradient."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda gradient, state, params=None: (jax.tree.map(jnp.zeros_like, gradient), gradient),
    )


def learner_of(
    work: TunixWork,
    config: grpo_learner.GRPOConfig,
    *,
    micro: int,
    optimizer: optax.GradientTransformation,
    marks: list[float] | None = None,
    log_probs: bool = False,
    model: nnx.Module | None = None,
) -> grpo_learner.GRPOLearner:
    """Returns Tunix's learner for one of its own configs, and that of kljax for one of kljax."""
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), devices=jax.devices()[:1],
                         axis_types=(jax.sharding.AxisType.Auto,) * 2)  # fmt: skip
    cluster = rl_cluster.RLCluster(
        actor=model or work.model(0),
        reference=work.model(1),
        tokenizer=NumberTokenizer(),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys(rl_cluster.Role, mesh),
            rollout_engine=recorded_rollout(work, [] if marks is None else marks, log_probs),
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optimizer, eval_every_n_steps=10**9, max_steps=10**9,
                mini_batch_size=work.prompts, train_micro_batch_size=micro,
            ),
            rollout_config=base_rollout.RolloutConfig(
                max_tokens_to_generate=work.completion_length, max_prompt_length=work.prompt_length, temperature=0.9
            ),
        ),
    )  # fmt: skip
    kind = tunix.TunixGRPOLearner if isinstance(config, tunix.TunixGRPOConfig) else grpo_learner.GRPOLearner
    rewards = lambda completions, **_: [float(int(row) % 3 == 0) + 0.1 * int(row) for row in completions]  # noqa: E731
    return kind(cluster, config, [rewards])


def update(
    work: TunixWork, config: grpo_learner.GRPOConfig, micro: int, **options: Any
) -> tuple[np.ndarray, list[float]]:
    """Does one update of a learner; returns its gradient as one vector, and the losses of its micro-batches."""
    learner = learner_of(work, config, micro=micro, optimizer=keep_gradient(), **options)
    trainer, losses = learner.rl_cluster.actor_trainer, list[float]()
    buffer = trainer._buffer_metrics

    def keep_loss(*given: Any, loss: Any, **rest: Any) -> Any:
        losses.append(float(loss))
        return buffer(*given, loss=loss, **rest)

    trainer._buffer_metrics = keep_loss
    learner.train([{"prompts": np.arange(work.prompts).astype(str)}])
    state = nnx.to_pure_dict(nnx.state(trainer.optimizer, nnx.optimizer.OptState))["opt_state"]
    gradient = jax.tree.leaves(state.get("inner_opt_state", state))
    return np.concatenate([np.ravel(leaf) for leaf in gradient]), losses


def configs(samples: int, **fields: Any) -> dict[str, grpo_learner.GRPOConfig]:
    """Returns the config of each learner: k3 in the loss, a mean over the tokens."""
    fields = {"num_generations": samples, "beta": 0.04, "kl_loss_mode": "low_var_kl", **fields}
    return {"Tunix": grpo_learner.GRPOConfig(**fields), "kljax": tunix.TunixGRPOConfig(**fields)}
