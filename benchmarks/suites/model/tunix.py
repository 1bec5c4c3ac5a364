"""Tunix: its sampler, and `GRPOLearner` with three models in one process. Runs in the environment of Tunix."""

import importlib.metadata
import pathlib
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix.generate import sampler as tunix_sampler
from tunix.models.qwen3 import model as qwen3
from tunix.rl import common, rl_cluster
from tunix.rl.grpo import grpo_learner
from tunix.rl.rollout import base_rollout

from benchmarks.harness.measure import Clock, Memory
from benchmarks.suites.model import problem
from benchmarks.suites.model.problem import ModelContender, ModelWork


class IdTokenizer:
    """Writes ids as words; the ids of end and padding are outside the vocabulary."""

    def __init__(self, work: ModelWork) -> None:
        self.work = work

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        return " ".join(str(number) for number in ids)

    def bos_id(self) -> int:
        return 0  # none, for Tunix

    def eos_id(self) -> int:
        return self.work.end

    def pad_id(self) -> int:
        return self.work.end + 1


def model_of(work: ModelWork, weights: dict[str, np.ndarray]) -> qwen3.Qwen3:
    """Returns the model with these weights."""
    config = qwen3.ModelConfig(
        num_layers=work.layers,
        vocab_size=work.vocab,
        embed_dim=work.width,
        hidden_dim=work.mlp_width,
        num_heads=work.heads,
        head_dim=work.head_dim,
        num_kv_heads=work.kv_heads,
        rope_theta=int(problem.ROPE_THETA),
        norm_eps=problem.NORM_EPS,
        use_tied_embedding=True,
    )
    model = qwen3.Qwen3(config, rngs=nnx.Rngs(0))

    def put(variable: Any, name: str, transposed: bool = True) -> None:
        array = weights[f"model.{name}.weight"]
        array = array.T if transposed and array.ndim == 2 else array
        variable.value = jnp.asarray(array.reshape(variable.value.shape))

    put(model.embedder.input_embedding, "embed_tokens", transposed=False)
    put(model.final_norm.w, "norm")
    for index, layer in enumerate(model.layers):
        put(layer.input_layernorm.w, f"layers.{index}.input_layernorm")
        put(layer.post_attention_layernorm.w, f"layers.{index}.post_attention_layernorm")
        for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"):
            put(getattr(layer.attn, name).w, f"layers.{index}.self_attn.{name}")
        for name in ("gate_proj", "up_proj", "down_proj"):
            put(getattr(layer.mlp, name).kernel, f"layers.{index}.mlp.{name}")
    return model


class Feed:
    """The data set of a learner, which runs in a thread: yields the same batch whenever `step` asks for one."""

    def __init__(self, prompts: list[str]) -> None:
        self.prompts = prompts
        self._go: queue.Queue[None] = queue.Queue()
        self._done: queue.Queue[BaseException | None] = queue.Queue()
        self._count = 0

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        while True:
            if self._count:
                self._done.put(None)
            self._go.get()
            self._count += 1
            yield {"prompts": np.array(self.prompts)}

    def step(self) -> None:
        """Lets the learner do one step, and waits for its end."""
        self._go.put(None)
        error = self._done.get()
        if error is not None:
            raise RuntimeError("the learner ended") from error

    def run(self, train: Callable[["Feed"], None]) -> None:
        """Runs the loop of the learner; its end is an error of the step."""
        try:
            train(self)
            self._done.put(RuntimeError("the loop returned"))
        except BaseException as error:
            self._done.put(error)


class TunixContender(ModelContender):
    """The sampler, and the learner, which is made at its first use."""

    def __init__(self, work: dict[str, Any], directory: str, threads: int = 0) -> None:
        super().__init__(work, directory)
        self.weights = problem.load_weights(pathlib.Path(directory))
        self.tokenizer = IdTokenizer(self.work)
        self.model = model_of(self.work, self.weights)
        self.sampler: tunix_sampler.Sampler | None = None
        self._draws = 0
        self._train: Feed | None = None
        self._parts: Clock | Memory = Clock()

    def log_probs(self) -> np.ndarray:
        sequences = problem.make_sequences(self.work)
        first = self.work.prompt_length
        graph, state = nnx.split(self.model)
        prompts = jnp.asarray(sequences[:, :first])
        completions = jnp.asarray(sequences[:, first:])
        ids = {"pad_id": self.tokenizer.pad_id(), "eos_id": self.tokenizer.eos_id()}
        tokens = {"prompt_tokens": prompts, "completion_tokens": completions}
        return np.asarray(common.compute_per_token_logps(graph, state, **tokens, **ids))

    def rollout(self) -> np.ndarray:
        work = self.work
        if self.sampler is None:
            cache = tunix_sampler.CacheConfig(work.length, work.layers, work.kv_heads, work.head_dim)
            self.sampler = tunix_sampler.Sampler(self.model, self.tokenizer, cache)
        self._draws += 1
        prompts = [text for text in self._prompts() for _ in range(work.samples)]
        lengths = {"max_generation_steps": work.completion_length, "max_prompt_length": work.prompt_length}
        sampling = {"temperature": 1.0, "top_p": 1.0, "seed": self._draws, "eos_tokens": [work.end]}
        drawn = self.sampler(prompts, return_logprobs=True, **lengths, **sampling)
        return np.stack([np.asarray(row) for row in drawn.tokens])

    def step(self, parts: Clock | Memory) -> None:
        if self._train is None:
            self._train = self._learner()
        self._parts = parts
        with parts.part("update"):
            self._train.step()
            jax.block_until_ready(nnx.state(self.model))

    def learn(self, path: str) -> None:
        """Does the first update of a new learner, and writes its batch and the log-probs of the sequences after it."""
        self._train = self._learner()
        recorded: dict[str, Any] = {}
        update = self.cluster.update_actor

        def keep(examples: list[Any], *arguments: Any) -> Any:
            (example,) = examples
            recorded["tokens"] = np.concatenate([example.prompt_ids, example.completion_ids], axis=1)
            recorded["advantages"] = np.asarray(example.advantages)
            return update(examples, *arguments)

        self.cluster.update_actor = keep
        self.step(Clock())
        self.cluster.update_actor = update
        recorded["score"] = self.log_probs()
        np.savez(path, **recorded)

    def versions(self) -> dict[str, str]:
        return {"google-tunix": importlib.metadata.version("google-tunix"), "jax (Tunix)": jax.__version__}

    def _prompts(self) -> list[str]:
        return [self.tokenizer.decode(row.tolist()) for row in problem.make_prompts(self.work)]

    def _learner(self) -> Feed:
        work = self.work
        mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)
        cluster = rl_cluster.RLCluster(
            actor=self.model,
            reference=model_of(work, self.weights),
            tokenizer=self.tokenizer,
            cluster_config=rl_cluster.ClusterConfig(
                role_to_mesh=dict.fromkeys(roles, mesh),
                training_config=rl_cluster.RLTrainingConfig(
                    actor_optimizer=optax.chain(
                        optax.clip_by_global_norm(1.0), optax.adamw(problem.LEARNING_RATE, b2=0.999, weight_decay=0.0)
                    ),
                    eval_every_n_steps=10**9,
                    max_steps=10**9,
                    mini_batch_size=work.prompts,
                    train_micro_batch_size=work.prompts,
                ),
                rollout_config=base_rollout.RolloutConfig(
                    max_tokens_to_generate=work.completion_length,
                    max_prompt_length=work.prompt_length,
                    kv_cache_size=work.length,
                    temperature=1.0,
                    top_p=1.0,
                    eos_tokens=[work.end],
                ),
            ),
        )
        generate = cluster.generate

        def timed(*arguments: Any, **options: Any) -> Any:
            with self._parts.part("rollout"):
                return generate(*arguments, **options)

        cluster.generate = timed
        config = grpo_learner.GRPOConfig(
            num_generations=work.samples, beta=problem.KL_COEF, epsilon=problem.CLIP, kl_loss_mode="low_var_kl"
        )
        learner = grpo_learner.GRPOLearner(rl_cluster=cluster, algo_config=config, reward_fns=self._rewards)
        feed = Feed(self._prompts())
        threading.Thread(target=feed.run, args=(learner.train,), daemon=True).start()
        self.cluster = cluster
        self.model = cluster.actor_trainer.model
        return feed

    def _rewards(self, prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        return problem.rewards(np.array([self.tokenizer.encode(text) for text in completions])).tolist()


# JAX takes the cores that the process is bound to.
load = TunixContender
