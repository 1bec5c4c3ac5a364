"""kljax: the sampler and the compiled functions of an RL step, called as in the trainer."""

import dataclasses
import importlib.metadata
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kljax
from benchmarks.harness.machine import commit
from benchmarks.harness.measure import Clock, Memory
from benchmarks.suites.model import problem
from benchmarks.suites.model.contender import ModelContender
from benchmarks.suites.model.problem import Work
from train.config.load import parse
from train.config.schema import Config
from train.models import Decoder, DecoderConfig, Rope
from train.models.sharding import make_mesh, shard_rows
from train.rl.algorithms import make_optimizer
from train.rl.batch import Batch
from train.rl.layout import Layout
from train.rl.objective import coefficients
from train.rl.policy import abstract_params, token_stats
from train.rl.reference import Reference
from train.rl.state import TrainState
from train.rl.step import make_prepare, make_score, make_update, update_rows
from train.rollouts.sampler import Samples, Sampling, sample
from train.run.setup import first_state

Tree = Any


def params_of(work: Work, weights: dict[str, np.ndarray]) -> Tree:
    """Converts weights to the names and the layout of the decoder."""

    def stacked(name: str) -> np.ndarray:
        layers = [weights[f"model.layers.{layer}.{name}.weight"] for layer in range(work.layers)]
        return np.stack([layer.T for layer in layers])

    tree: Tree = {
        "embed_tokens": {"embedding": weights["model.embed_tokens.weight"]},
        "layers": {"self_attn": {}, "mlp": {}},
        "norm": {"scale": weights["model.norm.weight"]},
    }
    prefix = "model.layers.0."
    for name, array in weights.items():
        if name.startswith(prefix):
            path = name.removeprefix(prefix).removesuffix(".weight")
            into = tree["layers"]
            *parents, last = path.split(".")
            for parent in parents:
                into = into[parent]
            into[last] = {"scale" if array.ndim == 1 else "kernel": stacked(path)}
    return tree


def model_of(work: Work) -> Decoder:
    """Returns the decoder."""
    return Decoder(
        DecoderConfig(
            vocab_size=work.vocab,
            layers=work.layers,
            width=work.width,
            heads=work.heads,
            kv_heads=work.kv_heads,
            head_dim=work.head_dim,
            mlp_width=work.mlp_width,
            rope=Rope(problem.ROPE_THETA),
            norm_eps=problem.NORM_EPS,
            tie_embeddings=True,
            qk_norm=True,
            # Tunix keeps all activations; this keeps the products, which fit in memory.
            remat="dots",
        )
    )


def config_of(work: Work) -> Config:
    """Returns the config of GRPO with a KL to the base in the loss, and AdamW."""
    raw = {
        "steps": 1,
        "data": {"max_prompt_length": work.prompt_length, "max_completion_length": work.completion_length},
        "rollout": {"prompts_per_step": work.prompts, "samples_per_prompt": work.samples},
        "loss": {"policy": "ppo", "aggregation": "seq_mean_token_mean"},
        "kl": {"loss": {"coef": problem.KL_COEF, "estimator": "low_var_kl"}},
        "optim": {"learning_rate": problem.LEARNING_RATE, "b2": 0.999},
    }
    return parse(raw)[0]


class KljaxContender(ModelContender):
    """The sampler, and the programs of an RL step, which are made at their first use."""

    def __init__(self, work: dict[str, Any], directory: str) -> None:
        super().__init__(work, directory)
        self.config, self.model = config_of(self.work), model_of(self.work)
        self.mesh = make_mesh(1, 1, 1)
        shardings = jax.tree.map(lambda x: x.sharding, abstract_params(self.model, self.mesh))
        params = params_of(self.work, problem.load_weights(pathlib.Path(directory)))
        self.reference = kljax.Policy(jax.tree.map(jax.device_put, params, shardings))
        self._draws, self._key = 0, jax.random.key(0)
        self._sample, self._score = jax.jit(self._complete), jax.jit(self._log_probs)
        self._train: Programs | None = None

    def log_probs(self, policy: kljax.Policy | None = None) -> np.ndarray:
        tokens = jnp.asarray(problem.make_sequences(self.work))
        return np.asarray(self._score(policy or self.reference, tokens))[:, self.work.prompt_length :]

    def rollout(self) -> np.ndarray:
        return self._tokens(self._draw(self.reference))

    def step(self, parts: Clock | Memory) -> None:
        if self._train is None:
            self._train = self.programs()
        with parts.part("rollout"):
            samples = jax.block_until_ready(self._draw(kljax.Policy(self._train.state.trainable["params"])))
            tokens = self._tokens(samples)
        with parts.part("update"):
            self._train.update(self.batch(samples.tokens, samples.log_probs, problem.rewards(tokens)))

    def learn(self, path: str) -> None:
        """Does the update of another contender's file, and adds the log-probs of the sequences after it as "ours"."""
        with np.load(path) as file:
            tokens, advantages, score = file["tokens"], file["advantages"], file["score"]
        self._train = programs = self.programs()
        programs.update(self.batch(tokens, np.zeros(tokens.shape, np.float32), advantages), advantages)
        np.savez(path, score=score, ours=self.log_probs(kljax.Policy(programs.state.trainable["params"])))

    def versions(self) -> dict[str, str]:
        return {
            "kljax": f"{importlib.metadata.version('kljax')} {commit() or ''}".strip(),
            "jax": jax.__version__,
        }

    def _log_probs(self, policy: kljax.Policy, tokens: jax.Array) -> jax.Array:
        mask, first = jnp.ones(tokens.shape, bool), self.work.prompt_length
        return token_stats(self.model, policy, tokens, mask, temperature=1.0, layout=Layout(first))[0].log_prob

    def _complete(self, policy: kljax.Policy, prompts: jax.Array, mask: jax.Array, key: jax.Array) -> Samples:
        return sample(
            self.model,
            policy,
            prompts,
            mask,
            key=key,
            max_new_tokens=self.work.completion_length,
            sampling=Sampling(),
            eos_ids=(self.work.end,),
            group=self.work.samples,
        )

    def _draw(self, policy: kljax.Policy) -> Samples:
        prompts = jnp.asarray(problem.make_prompts(self.work))
        self._draws += 1
        return self._sample(policy, prompts, jnp.ones(prompts.shape, bool), jax.random.fold_in(self._key, self._draws))

    def _tokens(self, samples: Samples) -> np.ndarray:
        return np.asarray(samples.tokens)[:, self.work.prompt_length :]

    def programs(self) -> "Programs":
        """Makes the programs of a new learner."""
        optimizer = make_optimizer(self.config.optim)
        base = jax.tree.map(jnp.copy, self.reference.params)
        state = first_state(self.config, self.model, self.mesh, base, optimizer)
        return Programs(
            config=self.config,
            reference=Reference(self.model, self.reference),
            score=make_score(self.config, self.model, self.mesh),
            prepare=make_prepare(self.config, self.mesh),
            run=make_update(self.config, self.model, optimizer, state, self.mesh),
            state=state,
        )

    def batch(self, tokens: Any, log_probs: Any, rewards: np.ndarray) -> Batch:
        """Returns the batch of a rollout."""
        columns = np.arange(self.work.length)[None].repeat(self.work.rows, axis=0)
        groups = np.repeat(np.arange(self.work.prompts, dtype=np.int32), self.work.samples)
        arrays = shard_rows(
            (tokens, columns >= 0, columns >= self.work.prompt_length, rewards, groups, log_probs), self.mesh
        )
        return Batch(*arrays)


@dataclasses.dataclass
class Programs:
    """The compiled functions of an RL step, and the state that they update."""

    config: Config
    reference: Reference
    score: Callable[..., Batch]
    prepare: Callable[..., Any]
    run: Callable[..., Any]
    state: TrainState

    def update(self, batch: Batch, advantages: np.ndarray | None = None) -> None:
        """Scores, prepares and updates; given `[rows]` advantages replace the computed ones."""
        batch = self.score(self.state.trainable, None, self.reference, batch)
        batch, _, _ = self.prepare(batch, self.state.controllers)
        if advantages is not None:
            tokens = jnp.where(batch.completion_mask, advantages[:, None], 0)
            batch = dataclasses.replace(batch, advantages=tokens)
        for rows in update_rows(self.config, jax.random.key(0)):
            self.state, metrics = self.run(self.state, None, batch, rows, coefficients(self.config))
        jax.block_until_ready((self.state, metrics))


def load(work: dict[str, Any], directory: str, threads: int) -> KljaxContender:
    """Loads the weights of a directory; JAX takes the cores that the process is bound to."""
    return KljaxContender(work, directory)
