"""GRPO with kljax in the learner of Tunix: the gradient of the KL, weights of the whole update, and no logits.

    from kljax.integrations import tunix

    config = tunix.TunixGRPOConfig(num_generations=8, beta=0.04)
    tunix.TunixGRPOLearner(cluster, config, reward_fns).train(prompts)

The two classes take the place of Tunix's `GRPOConfig` and `GRPOLearner`. The loss is entered in Tunix's registry under
the name "kljax"; nothing of Tunix is replaced.
"""

import dataclasses
import functools
import importlib.metadata
import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any

SUPPORTED = "0.1.7"


def check_version() -> None:
    """Raises an `ImportError` unless the release of Tunix is the one whose learner the classes here extend."""
    try:
        version = importlib.metadata.version("google-tunix")
    except importlib.metadata.PackageNotFoundError:
        version = "none"
    if version != SUPPORTED:
        raise ImportError(
            f"google-tunix: got {version}, expected {SUPPORTED}, whose learner kljax.integrations.tunix extends; "
            "install it with: pip install 'kljax[tunix]' (Python 3.12 or later)"
        )


check_version()

import flax  # noqa: E402 (the error about the release comes first)
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402
from tunix.rl import common, function_registry, rl_cluster  # noqa: E402
from tunix.rl import utils as rl_utils  # noqa: E402
from tunix.rl.grpo import grpo_learner  # noqa: E402

import kljax  # noqa: E402
from kljax._typing import Array, Estimator, KLGradient, Level, Reduction  # noqa: E402

__all__ = ["TunixGRPOConfig", "TunixGRPOLearner"]

# Tunix's names. Its sum over a norm has the number of rows that hold a token as its norm.
ESTIMATORS: dict[str, Estimator] = {"kl": "k1", "mse_kl": "k2", "low_var_kl": "k3"}
REDUCTIONS: dict[str, Reduction] = {
    "token-mean": "token_mean",
    "sequence-mean-token-mean": "seq_mean_token_mean",
    "sequence-mean-token-scale": "seq_mean_token_sum_norm",
    "seq-mean-token-sum": "seq_mean_token_sum",
    "sequence-mean-token-sum-norm": "seq_mean_token_sum",
}


@dataclasses.dataclass(kw_only=True)
class TunixGRPOConfig(grpo_learner.GRPOConfig):
    """Tunix's `GRPOConfig`, with fields for what it has not.

    Attributes:
      kl_loss_mode: the value of the KL, by Tunix's name: "kl" (k1), "mse_kl" (k2) or "low_var_kl" (k3).
      kl_gradient: the gradient of the KL, as in `kljax.reference_kl_loss`; "k2" is that of KL(pi || ref).
      epsilon_high: the upper bound of the clip; None has `epsilon`.
      epsilon_c: the bound of the ratio where an advantage is negative (dual clip); None has no bound.
      correction: steps of `kljax.correct_rollout`, for the mismatch of sampler and trainer; they need
        `return_logprobs=True` in the `RolloutConfig`. TIS is
        `(functools.partial(kljax.truncated_importance_weights, max_weight=2.0),)`.
    """

    policy_loss_fn: str = "kljax"
    kl_loss_mode: str = "low_var_kl"
    kl_gradient: KLGradient = "k2"
    epsilon_high: float | None = None
    epsilon_c: float | None = None
    correction: Sequence[Callable[..., Array]] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        allowed: dict[str, Collection[str]] = {
            "kl_loss_mode": ESTIMATORS,
            "loss_agg_mode": REDUCTIONS,
            "policy_loss_fn": ("kljax",),
        }
        for name, values in allowed.items():
            if (value := vars(self)[name]) not in values:
                raise ValueError(f"{name}: got {value!r}, expected one of {', '.join(values)}")


@flax.struct.dataclass(frozen=True)
class WeightedTrainExample(common.TrainExample):
    """Rows of an update, with the weight of each token in the loss of the update."""

    token_weights: Array | None = None


def token_stats(model: nnx.Module, example: common.TrainExample, temperature: float) -> kljax.TokenStats:
    """Returns log-probs and entropies `[B, T]` of the completions; gradients flow to the parameters of the model.

    Raises a `TypeError` for a model that does not store its hidden states. Nothing uses the logits of its call, so that
    XLA computes none.
    """
    accepted = inspect.signature(type(model).__call__).parameters
    tokens = jnp.concatenate([example.prompt_ids, example.completion_ids], axis=1)
    attended = jnp.concatenate([example.prompt_mask, example.completion_mask], axis=1)
    segments = {"segment_ids": attended.astype(jnp.int32)} if "segment_ids" in accepted else {}
    if "output_hidden_states" not in accepted:
        raise _no_hidden_states(model)
    # The hidden states are stored in a copy, which leaves the trained model as it is.
    copy = nnx.merge(*nnx.split(model))
    copy(
        tokens,
        positions=common.build_positions_from_mask(attended),
        cache=None,
        attention_mask=common.make_causal_attn_mask(attended),
        output_hidden_states=True,
        **segments,
    )
    stored = nnx.pop(copy, nnx.Intermediate)
    if "all_hidden_states" not in stored:
        raise _no_hidden_states(model)
    hidden = stored["all_hidden_states"].get_value()[-1]
    first = example.prompt_ids.shape[1] - 1
    return kljax.log_probs_from_hidden(
        hidden[:, first:-1],
        head_of(copy, hidden.dtype),
        example.completion_ids,
        mask=example.completion_mask,
        temperature=temperature or 1.0,
        entropy="constant",
    )


def _no_hidden_states(model: nnx.Module) -> TypeError:
    return TypeError(
        f"model: got {type(model).__name__}, which stores no hidden states for output_hidden_states=True; expected a "
        "model that does, such as Tunix's Qwen 2, Qwen 3, Gemma or Gemma 3"
    )


def head_of(model: Any, dtype: jnp.dtype) -> kljax.Head:
    """Returns the LM head of one of Tunix's models, in the type of its products.

    Raises a `TypeError` for a head with an adapter.
    """
    softcap = getattr(model, "final_logits_softcap", None)
    if not hasattr(model, "lm_head"):
        weights = model.embedder.input_embedding.get_value()
        return kljax.Head(weights.astype(dtype), softcap=softcap, layout="vd")
    if jax.tree.leaves(nnx.state(model.lm_head, nnx.LoRAParam)):
        raise TypeError("model: got an adapter on lm_head, expected a plain head; leave it out of the adapted modules")
    return kljax.Head(model.lm_head.w.get_value().astype(dtype), softcap=softcap)


@functools.partial(nnx.jit, static_argnums=2)
def _score(model: nnx.Module, example: common.TrainExample, temperature: float) -> Array:
    return token_stats(model, example, temperature).log_prob


@function_registry.register_policy_loss_fn("kljax")
def policy_loss(
    model: nnx.Module, train_example: WeightedTrainExample, algo_config: TunixGRPOConfig, **_: int
) -> tuple[Array, dict[str, Array]]:
    """Returns the part of these rows in the loss of the update, and metrics whose mean over micro-batches is theirs."""
    example = train_example
    mask = train_example.completion_mask
    stats = token_stats(model, example, algo_config.temperature)
    old = jax.lax.stop_gradient(stats.log_prob) if example.old_per_token_logps is None else example.old_per_token_logps
    low = algo_config.epsilon
    high = algo_config.epsilon_high
    clip: dict[str, Any] = {"clip_low": low, "clip_high": low if high is None else high}
    advantages = kljax.broadcast_to_tokens(example.advantages, mask)
    surrogate: Callable[..., Array] = kljax.ppo_clip_loss
    level: Level = "token"
    if algo_config.loss_algo == "gspo-token":
        level = "geometric"
        surrogate = functools.partial(kljax.gspo_loss, gradient="token", max_log_ratio=10.0)
    policy = surrogate(stats.log_prob, old, advantages, mask, **clip, dual_clip=algo_config.epsilon_c)
    if example.sampler_is_weights is not None:
        policy *= example.sampler_is_weights
    kl = jnp.zeros_like(policy)
    if example.ref_per_token_logps is not None:
        kl = kljax.reference_kl_loss(
            stats.log_prob,
            example.ref_per_token_logps,
            mask,
            estimator=ESTIMATORS[algo_config.kl_loss_mode],
            gradient=algo_config.kl_gradient,
            value_clip=algo_config.kl_clamp_value,
        )
    weights = jnp.asarray(example.token_weights)

    def total(values: Array) -> Array:
        return (weights * values).sum()

    metrics = {"kl": total(kl), "entropy": total(jnp.asarray(stats.entropy)), "pg_loss": total(policy)}
    metrics["pg_clipfrac"] = total(kljax.clipped_tokens(stats.log_prob, old, advantages, mask, **clip, level=level))
    return total(policy + algo_config.beta * kl), jax.lax.stop_gradient(metrics)


class TunixGRPOLearner(grpo_learner.GRPOLearner):
    """Tunix's `GRPOLearner` with the loss of kljax: its update is the same however it is split into micro-batches.

    The completions of an update are sampled before its first gradient, as their number is in the weights.
    `rollout_micro_batch_size` still bounds how many prompts are sampled at once.
    """

    def __init__(self, rl_cluster: Any, algo_config: TunixGRPOConfig, reward_fns: Any, **options: Any) -> None:
        cluster = rl_cluster.cluster_config
        training = rl_cluster.cluster_config.training_config
        if not isinstance(algo_config, TunixGRPOConfig):
            raise TypeError(f"algo_config: got a {type(algo_config).__name__}, expected a TunixGRPOConfig")
        if (packed := training.max_seq_token_per_tpu) is not None:
            raise ValueError(
                f"training_config.max_seq_token_per_tpu: got {packed}, expected None: packed rows lose weights"
            )
        if cluster.offload_to_cpu:
            raise ValueError("cluster_config.offload_to_cpu: got True, expected False: scores need the models in place")
        super().__init__(rl_cluster, algo_config, reward_fns, **options)
        # Tunix completes and scores this many prompts before it splits them: those of an update.
        self._compute_logps_micro_batch_size = training.mini_batch_size

    def _generate_and_compute_advantage(
        self, training_input: dict[str, Any], mode: Any = rl_cluster.Mode.TRAIN
    ) -> WeightedTrainExample:
        config = self.algo_config
        samples = self.algo_config.num_generations
        training = self.rl_cluster.cluster_config.training_config
        prompts = list(training_input["prompts"])
        others = {name: value for name, value in training_input.items() if name != "prompts"}
        size = (self._rollout_micro_batch_size or len(prompts)) * samples
        rollout = self.rl_cluster.generate(prompts=prompts, mode=mode, micro_batch_size=size)
        length = self.rl_cluster.get_rollout_config(mode).max_tokens_to_generate
        tokens, mask = _padded(rollout.tokens, length, self.rl_cluster.rollout.pad_id())
        rewards = self._compute_rewards(prompts=prompts, completions=rollout.text, mode=mode, **others)
        estimate = function_registry.get_advantage_estimator(config.advantage_estimator)
        advantages = estimate(rewards=rewards, num_generations=samples)
        example = WeightedTrainExample(
            prompt_ids=jnp.asarray(rollout.left_padded_prompt_tokens),
            prompt_mask=jnp.asarray(rollout.left_padded_prompt_tokens != self.rl_cluster.rollout.pad_id()),
            completion_ids=jnp.asarray(tokens),
            completion_mask=jnp.asarray(mask),
            advantages=jnp.asarray(advantages, jnp.float32),
            ref_per_token_logps=None,
            old_per_token_logps=None,
        )
        self._log(rewards, mask, mode)
        for metric in self.metric_fns:
            values = dict(prompts=prompts, completions=rollout.text, advantages=advantages, rewards=rewards, **others)
            self.rl_cluster.buffer_metrics(metric(**values), mode=mode)
        parts = 1
        if mode == rl_cluster.Mode.TRAIN:
            parts = training.get_with_default("gradient_accumulation_steps", 1)
            if training.mini_batch_size not in (None, len(prompts) // samples):
                raise ValueError(
                    f"rows of an update: got {len(prompts)}, expected {training.mini_batch_size * samples}"
                )
        return self._weighted(example, rollout.logprobs, parts)

    def _weighted(self, example: WeightedTrainExample, sampled: Any, parts: int) -> WeightedTrainExample:
        """Adds log-probs of other policies and the weights, times `parts`, over which Tunix takes a mean."""
        config = self.algo_config
        mask = example.completion_mask
        mode = REDUCTIONS[config.loss_agg_mode]
        longest = mask.shape[1] if mode == "seq_mean_token_sum_norm" else None
        fields = {"token_weights": parts * kljax.token_weights(mask, mode=mode, max_length=longest)}
        if config.beta:
            reference = self.rl_cluster.inference_worker.get_model("reference")
            fields["ref_per_token_logps"] = self._scores(reference, example, rl_cluster.Role.REFERENCE, parts)
        if config.num_iterations > 1 or config.correction:
            actor = self.rl_cluster.actor_trainer.model
            fields["old_per_token_logps"] = self._scores(actor, example, rl_cluster.Role.ACTOR, parts)
        if config.correction:
            if sampled is None:
                raise ValueError("rollout_config.return_logprobs: got False, expected True, which `correction` needs")
            by_sampler = jnp.asarray(_padded(sampled, mask.shape[1], 0.0)[0], jnp.float32)
            old = fields["old_per_token_logps"]
            corrected = kljax.correct_rollout(old, by_sampler, mask, steps=config.correction)
            fields["sampler_is_weights"] = corrected.weights
        return dataclasses.replace(example, **fields)

    def _scores(self, model: nnx.Module, example: WeightedTrainExample, role: Any, parts: int) -> Array:
        """Returns log-probs `[B, T]` by one of the models, in as many parts as the gradient has."""
        size = -(-len(example.advantages) // parts)
        slices = rl_utils.chunk_slices_by_size(stop=len(example.advantages), step=size)
        with self.rl_cluster.cluster_config.role_to_mesh[role]:
            scores = [
                _score(model, rl_utils.get_batch_slice(example, rows), self.algo_config.temperature) for rows in slices
            ]
        return jnp.concatenate(scores)

    def _log(self, rewards: np.ndarray, mask: np.ndarray, mode: Any) -> None:
        """Records rewards and lengths under Tunix's names."""
        statistics: dict[str, Callable[..., Any]] = {"mean": np.mean, "max": np.max, "min": np.min}
        recorded: dict[str, Any] = {
            f"rewards/score/{name}": (take(rewards), np.mean) for name, take in statistics.items()
        }
        lengths = mask.sum(axis=-1)
        recorded |= {f"completions/{name}_length": (take(lengths), take) for name, take in statistics.items()}
        self.rl_cluster.buffer_metrics(recorded, mode=mode)


def _padded(rows: Sequence[Any], length: int, fill: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns rows of differing lengths as `[B, length]`, and booleans of what is no padding."""
    mask = np.array([np.arange(length) < len(row) for row in rows])
    padded = np.full(mask.shape, fill, np.asarray(rows[0]).dtype if isinstance(fill, float) else np.int32)
    padded[mask] = np.concatenate([np.asarray(row) for row in rows])
    return padded, mask
