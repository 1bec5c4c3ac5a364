"""kljax: the sampler and the compiled functions of an RL step, called as in the trainer."""

import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kljax
from benchmarks.harness import machine
from benchmarks.harness.learner import Learner, bare_context, grpo
from benchmarks.harness.measure import Clock, Memory
from benchmarks.suites.model import problem
from benchmarks.suites.model.problem import ModelContender, ModelWork
from train.models import Decoder
from train.models.parameters import abstract_params
from train.models.shard_rows import shard_rows
from train.rl.policy import ScoredPolicy, Sequences, token_stats
from train.rollouts.sampler import Samples, Sampling, sample
from train.sequences.batch import Batch
from train.weights.huggingface.config import decoder_config
from train.weights.huggingface.names import LeafMapping, layout, leaf_mappings


def model_of(work: ModelWork) -> Decoder:
    """Returns the decoder. Tunix keeps all activations; it keeps the products of matrices, which fit in memory."""
    return Decoder(decoder_config({"model_type": "qwen3", **problem.hf_config(work)}, remat="dots"))


def save_weights(work: ModelWork, directory: pathlib.Path) -> None:
    """Draws float32 weights for `problem.load_weights`; matrices preserve the scale of inputs, norms are near 1."""
    rng = np.random.default_rng(0)
    weights = dict[str, Any]()
    for mapping in leaf_mappings(model_of(work)):
        for name in mapping.names:
            drawn = rng.standard_normal(mapping.shape, np.float32)
            scaled = 1 + np.float32(0.1) * drawn if drawn.ndim == 1 else drawn / np.sqrt(mapping.shape[-1])
            weights[f"model.{name}"] = scaled.astype(np.float32)
    np.savez(directory / "weights.npz", **weights)


def params_of(work: ModelWork, weights: Mapping[str, np.ndarray]) -> Any:
    """Returns the parameters of the decoder."""

    def leaf(mapping: LeafMapping) -> np.ndarray:
        tensors = [weights[f"model.{name}"] for name in mapping.names]
        matrices = [tensor.T if mapping.transposed else tensor for tensor in tensors]
        return np.stack(matrices) if mapping.stacked else matrices[0]

    model = model_of(work)
    return jax.tree.unflatten(jax.tree.structure(layout(model)), [leaf(mapping) for mapping in leaf_mappings(model)])


class KljaxContender(ModelContender):
    """The sampler, and a learner of GRPO with a KL to the base in the loss, which is made at its first use."""

    def __init__(self, work: dict[str, Any], directory: str, threads: int = 0) -> None:
        super().__init__(work, directory)
        self.model = model_of(self.work)
        config = grpo(
            *(self.work.prompt_length, self.work.completion_length, self.work.prompts, self.work.samples),
            loss={"type": "ppo", "aggregation": "seq_mean_token_mean"},
            kl={"loss": {"coef": problem.KL_COEF, "estimator": "low_var_kl"}},
            optim={"learning_rate": problem.LEARNING_RATE, "optimizer": {"b2": 0.999}},
            model={"remat": self.model.config.remat},
        )
        self.context = bare_context(config, self.model)
        self.mesh = self.context.mesh
        shardings = jax.tree.map(lambda x: x.sharding, abstract_params(self.model, self.mesh))
        params = params_of(self.work, problem.load_weights(pathlib.Path(directory)))
        self.reference = kljax.Policy(jax.tree.map(jax.device_put, params, shardings))
        self._draws = 0
        self._key = jax.random.key(0)
        self._sample, self._score = jax.jit(self._complete), jax.jit(self._log_probs)
        self._learner: Learner | None = None

    def log_probs(self, policy: kljax.Policy | None = None) -> np.ndarray:
        tokens = jnp.asarray(problem.make_sequences(self.work))
        return np.asarray(self._score(policy or self.reference, tokens))[:, self.work.prompt_length :]

    def rollout(self) -> np.ndarray:
        return self._tokens(self._draw(self.reference))

    def step(self, parts: Clock | Memory) -> None:
        self._learner = learner = self._learner or Learner.of(self.context, self.reference.params)
        with parts.part("rollout"):
            samples = jax.block_until_ready(self._draw(kljax.Policy(learner.state.trainable["params"])))
            tokens = self._tokens(samples)
        with parts.part("update"):
            learner.update(self.batch(samples.tokens, samples.fields["rollout_log_probs"], problem.rewards(tokens)))

    def learn(self, path: str) -> None:
        """Does the update of another contender's file, and adds the log-probs of the sequences after it as "ours"."""
        with np.load(path) as file:
            tokens, advantages, score = file["tokens"], file["advantages"], file["score"]
        self._learner = learner = Learner.of(self.context, self.reference.params)
        learner.update(self.batch(tokens, np.zeros(tokens.shape, np.float32), advantages), advantages)
        np.savez(path, score=score, ours=self.log_probs(kljax.Policy(learner.state.trainable["params"])))

    def versions(self) -> dict[str, str]:
        return machine.versions()

    def batch(self, tokens: Any, log_probs: Any, rewards: np.ndarray) -> Batch:
        """Returns the batch of a rollout."""
        columns = np.arange(self.work.length)[None].repeat(self.work.rows, axis=0)
        groups = np.repeat(np.arange(self.work.prompts, dtype=np.int32), self.work.samples)
        arrays = {
            "tokens": tokens,
            "token_mask": columns >= 0,
            "completion_mask": columns >= self.work.prompt_length,
            "rewards": rewards,
            "group_ids": groups,
            "rollout_log_probs": log_probs,
        }
        return Batch(**shard_rows(arrays, self.mesh))

    def _log_probs(self, policy: kljax.Policy, tokens: jax.Array) -> jax.Array:
        columns = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        sequences = Sequences.rows(tokens, columns >= 0, columns >= self.work.prompt_length)
        return token_stats(ScoredPolicy(self.model, policy), sequences, temperature=1.0)[0].log_prob

    def _complete(self, policy: kljax.Policy, prompts: jax.Array, mask: jax.Array, key: jax.Array) -> Samples:
        lengths: dict[str, Any] = {"max_new_tokens": self.work.completion_length, "group": self.work.samples}
        ends = (self.work.end,)
        return sample(self.model, policy, prompts, mask, key=key, sampling=Sampling(), eos_ids=ends, **lengths)

    def _draw(self, policy: kljax.Policy) -> Samples:
        prompts = jnp.asarray(problem.make_prompts(self.work))
        self._draws += 1
        return self._sample(policy, prompts, jnp.ones(prompts.shape, bool), jax.random.fold_in(self._key, self._draws))

    def _tokens(self, samples: Samples) -> np.ndarray:
        return np.asarray(samples.tokens)[:, self.work.prompt_length :]


# JAX takes the cores that the process is bound to.
load = KljaxContender
