"""Tunix: a whole global step of `GRPOLearner` and `PPOLearner` in an `RLCluster`, `train()` included, on its Qwen 2.

Needs google-tunix in an environment of its own, and no PyTorch. Recorded completions, rewards and the log-probs and
values of other models replace sampling, the reward function and the passes without a gradient; everything else is
Tunix's own, from the advantages to the accumulation of optax. The critic is not trained.
"""

import contextlib
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import safetensors.numpy

from tests.goldens.presets import batch, record

ABOUT = {"version": "google-tunix 0.1.7", "dtype": "float64"}
# The config of an algorithm, and its fields that are set.
ALGORITHMS: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("GRPOConfig", {"kl_loss_mode": "low_var_kl"}),
    "dr_grpo": ("DrGRPOConfig", {"kl_loss_mode": "low_var_kl"}),
    "dapo": ("DAPOConfig", {"overlong_buffer": None}),
    "gspo": ("GRPOConfig", {"loss_algo": "gspo-token", "epsilon": 3e-4, "beta": 0.0}),
    "rloo": ("GRPOConfig", {"advantage_estimator": "rloo", "kl_loss_mode": "low_var_kl"}),
    "ppo": ("PPOConfig", {}),
}


class TunixTokenizer:
    """Has the special tokens; nothing is encoded."""

    def encode(self, *_: object, **__: object) -> list[int]:
        """Encodes nothing."""
        return []

    def decode(self, *_: object, **__: object) -> str:
        """Decodes nothing."""
        return ""

    def bos_id(self) -> int:
        """There is none."""
        return batch.EOS

    def eos_id(self) -> int:
        """The end of a sequence."""
        return batch.EOS

    def pad_id(self) -> int:
        """The padding, from which Tunix derives its masks."""
        return batch.PAD


class Scored:
    """The recorded log-probs and values of other models, by the rows that are asked for."""

    def __init__(self, recorded: batch.Recorded) -> None:
        self.recorded = recorded
        # A completion that was cut off is padding: there is no mask beside the tokens.
        self.completions = np.where(recorded.mask, recorded.completions, batch.PAD)

    def rows(self, prompts: Any, completions: Any) -> np.ndarray:
        """The rows of a part of the batch."""
        tokens_of_row = np.concatenate([self.recorded.prompts, self.completions], axis=1)
        wanted = np.concatenate([prompts, completions], axis=1)
        return np.array([int(np.flatnonzero((tokens_of_row == row).all(1))[0]) for row in wanted])

    def of(self, values: np.ndarray) -> Any:
        """A function of prompts and completions that returns recorded values."""

        def function(prompt_tokens: Any, completion_tokens: Any, **_: object) -> jax.Array:
            return jnp.asarray(values[self.rows(prompt_tokens, completion_tokens)])

        return function


def make_rollout(scored: Scored) -> type:
    """A rollout engine that returns the recorded completions, prompt by prompt."""
    from tunix.rl.rollout import base_rollout

    recorded = scored.recorded

    class TunixRollout(base_rollout.BaseRollout):
        def __init__(self, rollout_actor: Any, **_: object) -> None:
            self.actor, self.next = rollout_actor, 0

        def generate(self, prompts: list[str], rollout_config: Any, **_: object) -> Any:
            rows = np.arange(self.next, self.next + len(prompts))
            self.next += len(prompts)
            assert [int(prompt) for prompt in prompts] == recorded.groups[rows].tolist()
            lengths = recorded.mask.sum(1)
            return base_rollout.RolloutOutput(
                text=[str(row) for row in rows],
                logits=[],
                tokens=[scored.completions[row, : lengths[row]] for row in rows],
                left_padded_prompt_tokens=recorded.prompts[rows],
                logprobs=None,
            )

        get_per_token_logps = staticmethod(scored.of(recorded.old_log_probs))

        def update_params(self, *_: object, **__: object) -> None: ...

        def pad_id(self) -> int:
            return batch.PAD

        def eos_id(self) -> int:
            return batch.EOS

        def model(self) -> Any:
            return self.actor

    return TunixRollout


def load_model(mesh: jax.sharding.Mesh) -> tuple[Any, dict[str, Any]]:
    """Tunix's Qwen 2 with the recorded weights, and its table of their names."""
    from tunix.models.qwen2 import model, params

    config = model.ModelConfig(
        num_layers=2,
        vocab_size=batch.VOCABULARY,
        embed_dim=16,
        hidden_dim=16,
        num_heads=2,
        head_dim=8,
        num_kv_heads=1,
        rope_theta=10000,
        norm_eps=1e-6,
        use_tied_embedding=True,
        dtype=jnp.float64,
        param_dtype=jnp.float64,
    )
    loaded = params.create_model_from_safe_tensors(str(batch.MODEL), config, mesh, dtype=jnp.float64, mode="original")
    return loaded, params._get_key_and_transform_mapping(config)


def named(gradients: dict[str, np.ndarray], table: dict[str, Any]) -> dict[str, np.ndarray]:
    """The gradients by the names and in the shapes of transformers."""
    collected = {}
    for name, weight in safetensors.numpy.load_file(batch.MODEL / "model.safetensors").items():
        (pattern,) = [pattern for pattern in table if re.fullmatch(pattern, name)]
        target, rule = table[pattern]
        gradient = gradients[re.sub(pattern, target, name)]
        permuted = rule[0] if rule else tuple(range(weight.ndim))
        shape = [weight.shape[axis] for axis in permuted]
        collected[name] = gradient.reshape(shape).transpose(np.argsort(permuted))
    return collected


def keep_gradients() -> optax.GradientTransformation:
    """An optimizer that changes nothing and whose state is the last gradient."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda gradient, state, params=None: (jax.tree.map(jnp.zeros_like, gradient), gradient),
    )


@contextlib.contextmanager
def float64() -> Iterator[None]:
    """Casts to float32 go to float64 inside; the frequencies of the rotary embedding are rounded to float32."""
    from tunix.models.qwen2 import model

    def embeddings(positions: jax.Array, features: int, rope_theta: int) -> tuple[jax.Array, jax.Array]:
        frequencies = np.float32(float(rope_theta) ** -(np.arange(0, features, 2) / features)).astype(np.float64)
        angles = positions[..., None] * frequencies
        return jnp.sin(angles), jnp.cos(angles)

    jax.config.update("jax_enable_x64", True)
    with (
        mock.patch.object(jnp, "float32", jnp.float64),
        mock.patch.object(model, "_generate_pos_embeddings", embeddings),
    ):
        yield


def make_cluster(scored: Scored, accumulation: int, prompts: int, mesh: jax.sharding.Mesh, model: Any) -> Any:
    """A cluster of one process, whose reference and critic are recorded."""
    from tunix.rl import rl_cluster
    from tunix.rl.rollout import base_rollout

    cluster = rl_cluster.RLCluster(
        actor=model,
        tokenizer=TunixTokenizer(),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys(rl_cluster.Role, mesh),
            rollout_engine=make_rollout(scored),
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=keep_gradients(),
                eval_every_n_steps=100,
                max_steps=1,
                mini_batch_size=prompts,
                train_micro_batch_size=prompts // accumulation,
            ),
            rollout_config=base_rollout.RolloutConfig(
                max_tokens_to_generate=batch.COMPLETION_LENGTH,
                max_prompt_length=batch.PROMPT_LENGTH,
                temperature=batch.TEMPERATURE,
            ),
        ),
    )
    recorded = scored.recorded
    # The values of all positions: that of a state stands where the token before it is.
    values = np.pad(recorded.old_values, ((0, 0), (batch.PROMPT_LENGTH - 1, 1)))
    cluster.get_ref_per_token_logps = scored.of(recorded.ref_log_probs)
    cluster.get_values = scored.of(values)
    cluster.inference_worker._models["critic"] = cluster._critic_trainer = mock.MagicMock()
    return cluster


def make_learner(algorithm: str, cluster: Any, recorded: batch.Recorded) -> Any:
    """The learner of an algorithm."""
    from tunix.rl.grpo import dapo_learner, drgrpo_learner, grpo_learner
    from tunix.rl.ppo import ppo_learner

    name, settings = ALGORITHMS[algorithm]
    learners = {"GRPOConfig": grpo_learner, "DrGRPOConfig": drgrpo_learner, "DAPOConfig": dapo_learner}
    reward = lambda completions, **_: [float(recorded.rewards[int(row)]) for row in completions]  # noqa: E731
    if algorithm == "ppo":
        return ppo_learner.PPOLearner(cluster, ppo_learner.PPOConfig(**settings), [reward])
    module = learners[name]
    # Two iterations, so that the old log-probs are not those of the update.
    config = getattr(module, name)(num_generations=batch.SAMPLES, num_iterations=2, **settings)
    return getattr(module, name.replace("Config", "Learner"))(cluster, config, [reward])


def run(algorithm: str, accumulation: int, recorded: batch.Recorded) -> record.Step:
    """One optimizer step of a learner."""
    from flax import nnx

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    loaded, table = load_model(mesh)
    # PPO has no groups: its prompts are repeated in the data.
    prompts = recorded.groups if algorithm == "ppo" else np.arange(batch.PROMPTS)
    cluster = make_cluster(Scored(recorded), accumulation, len(prompts), mesh, loaded)
    learner = make_learner(algorithm, cluster, recorded)
    trainer, losses = cluster.actor_trainer, []
    update = trainer._buffer_metrics

    def buffer(*arguments: Any, loss: Any, **options: Any) -> Any:
        losses.append(float(loss))
        return update(*arguments, loss=loss, **options)

    trainer._buffer_metrics = buffer
    learner.train([{"prompts": prompts.astype(str)}])
    # Both iterations have the same gradient: the optimizer changes nothing.
    state = nnx.to_pure_dict(nnx.state(trainer.optimizer, nnx.optimizer.OptState))["opt_state"]["inner_opt_state"]
    flat, _ = jax.tree_util.tree_flatten_with_path(state)
    gradients = {".".join(str(key.key) for key in path): np.asarray(leaf) for path, leaf in flat}
    settings = {"config": ALGORITHMS[algorithm][0], **ALGORITHMS[algorithm][1]}
    loss = float(np.mean(losses[:accumulation]))
    return record.Step(algorithm, accumulation, settings, loss, named(gradients, table))


def steps(root: pathlib.Path) -> Iterator[record.Step]:
    """Every algorithm with one and with two micro-batches."""
    sys.path.insert(0, str(root))
    with float64():
        yield from record.each_step(run, ALGORITHMS)
