"""kljax: the sampler and the compiled functions of an RL step, as the trainer calls them."""

import dataclasses
import importlib.metadata
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kljax
from benchmarks import _machine
from benchmarks._speed import work as works
from benchmarks._speed.clock import Laps
from benchmarks._speed.work import Work
from train.config.load import parse
from train.config.schema import Config
from train.models import Decoder, DecoderConfig, Rope
from train.models.sharding import make_mesh, shard_rows
from train.references import Reference
from train.rl.batch import Batch
from train.rl.objective import coefficients
from train.rl.policy import abstract_params, token_stats
from train.rl.state import TrainState
from train.rl.step import make_optimizer, make_prepare, make_score, make_update, update_rows
from train.rollouts.sampler import Samples, Sampling, sample
from train.run.setup import first_state

Tree = Any


def params_of(work: Work, weights: dict[str, np.ndarray]) -> Tree:
    """The weights in the names and the layout of the decoder."""

    def stacked(name: str) -> np.ndarray:
        layers = [weights[f"model.layers.{layer}.{name}.weight"] for layer in range(work.layers)]
        return np.stack([one.T for one in layers])

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
    """The decoder of the work."""
    return Decoder(
        DecoderConfig(
            vocab_size=work.vocab,
            layers=work.layers,
            width=work.width,
            heads=work.heads,
            kv_heads=work.kv_heads,
            head_dim=work.head_dim,
            mlp_width=work.mlp_width,
            rope=Rope(works.ROPE_THETA),
            norm_eps=works.NORM_EPS,
            tie_embeddings=True,
            qk_norm=True,
            # Tunix keeps all activations: what there is room for need not be computed again.
            remat="dots",
        )
    )


def config_of(work: Work) -> Config:
    """The algorithm: GRPO with a KL to the base in the loss, and AdamW."""
    raw = {
        "steps": 1,
        "data": {"max_prompt_length": work.prompt_length, "max_completion_length": work.completion_length},
        "rollout": {"prompts_per_step": work.prompts, "samples_per_prompt": work.samples},
        "loss": {"policy": "ppo", "aggregation": "seq_mean_token_mean"},
        "kl": {"loss": {"coef": works.KL_COEF, "estimator": "low_var_kl"}},
        "optim": {"learning_rate": works.LEARNING_RATE, "b2": 0.999},
    }
    return parse(raw)[0]


class Side:
    """The programs of one run.

    Args:
      work: what is done; directory: of the weights.
    """

    def __init__(self, work: Work, directory: pathlib.Path) -> None:
        self.work, self.config, self.model = work, config_of(work), model_of(work)
        self.mesh = make_mesh(1, 1, 1)
        shardings = jax.tree.map(lambda x: x.sharding, abstract_params(self.model, self.mesh))
        self._host = params_of(work, works.load(directory))
        self.reference = kljax.Policy(jax.tree.map(jax.device_put, self._host, shardings))
        self._draws, self._key = 0, jax.random.key(0)
        self._sample, self._score = jax.jit(self._complete), jax.jit(self._log_probs)
        self._train: Programs | None = None

    def score(self, policy: kljax.Policy | None = None) -> np.ndarray:
        """`[rows, completion]` log-probs of the sequences that all contenders score."""
        tokens = jnp.asarray(works.make_sequences(self.work))
        return np.asarray(self._score(policy or self.reference, tokens))[:, self.work.prompt_length :]

    def rollout(self) -> np.ndarray:
        """`[rows, completion]` tokens of a rollout of the reference."""
        return self._tokens(self._draw(self.reference))

    def step(self, laps: Laps) -> None:
        """One RL step: sample, judge; score, prepare, update."""
        if self._train is None:
            self._train = self.programs()
        with laps.part("rollout"):
            samples = jax.block_until_ready(self._draw(kljax.Policy(self._train.state.trainable["params"])))
            tokens = self._tokens(samples)
        with laps.part("update"):
            self._train.update(self.batch(samples.tokens, samples.log_probs, works.rewards(tokens)))

    def learn(self, path: pathlib.Path) -> None:
        """Does the first update of another contender, and adds the log-probs of the sequences after it."""
        with np.load(path) as file:
            tokens, advantages, score = file["tokens"], file["advantages"], file["score"]
        self._train = programs = self.programs()
        programs.update(self.batch(tokens, np.zeros(tokens.shape, np.float32), advantages), advantages)
        np.savez(path, score=score, ours=self.score(kljax.Policy(programs.state.trainable["params"])))

    def versions(self) -> dict[str, str]:
        """Of the libraries."""
        return {
            "kljax": f"{importlib.metadata.version('kljax')} {_machine.commit() or ''}".strip(),
            "jax": jax.__version__,
        }

    def _log_probs(self, policy: kljax.Policy, tokens: jax.Array) -> jax.Array:
        mask, first = jnp.ones(tokens.shape, bool), self.work.prompt_length
        return token_stats(self.model, policy, tokens, mask, temperature=1.0, first=first)[0].log_prob

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
        prompts = jnp.asarray(works.make_prompts(self.work))
        self._draws += 1
        return self._sample(policy, prompts, jnp.ones(prompts.shape, bool), jax.random.fold_in(self._key, self._draws))

    def _tokens(self, samples: Samples) -> np.ndarray:
        return np.asarray(samples.tokens)[:, self.work.prompt_length :]

    def programs(self) -> "Programs":
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
        columns = np.arange(self.work.length)[None].repeat(self.work.rows, axis=0)
        groups = np.repeat(np.arange(self.work.prompts, dtype=np.int32), self.work.samples)
        found = shard_rows(
            (tokens, columns >= 0, columns >= self.work.prompt_length, rewards, groups, log_probs), self.mesh
        )
        return Batch(*found)


@dataclasses.dataclass
class Programs:
    """The compiled functions of an RL step, and the state that they change."""

    config: Config
    reference: Reference
    score: Callable[..., Batch]
    prepare: Callable[..., Any]
    run: Callable[..., Any]
    state: TrainState

    def update(self, batch: Batch, advantages: np.ndarray | None = None) -> None:
        """Scores, prepares and updates; `advantages` [rows] take the place of the ones that are computed."""
        batch = self.score(self.state.trainable, None, self.reference, batch)
        batch, _, _ = self.prepare(batch, self.state.controller)
        if advantages is not None:
            every = jnp.where(batch.completion_mask, advantages[:, None], 0)
            batch = dataclasses.replace(batch, advantages=every)
        for rows in update_rows(self.config, jax.random.key(0)):
            self.state, metrics = self.run(self.state, None, batch, rows, coefficients(self.config))
        jax.block_until_ready((self.state, metrics))
