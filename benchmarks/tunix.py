"""Tunix's GRPO learner with its own loss and with that of kljax: split into micro-batches, memory, time.

    make .venv-tunix/.ready
    .venv-tunix/bin/python -m benchmarks.tunix

Runs in the environment of `make test-tunix`, on a CPU. Recorded completions take the place of sampling; everything else
of an update is done by the learner. CPU seconds are of one update with the pass of the reference, after the
first. The two learners take turns.
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix.models.qwen3 import model as qwen3
from tunix.rl import function_registry, rl_cluster
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


def split_difference(work: TunixWork, config: grpo_learner.GRPOConfig) -> float:
    """Returns the relative distance of the gradient of two micro-batches from that of one."""
    (single, _), (split, _) = (update(work, config, micro=work.prompts // parts) for parts in (1, 2))
    return float(np.linalg.norm(split - single) / np.linalg.norm(single))


def temporary_bytes(work: TunixWork, config: grpo_learner.GRPOConfig) -> int:
    """Returns the temporary memory of the compiled gradient of a whole batch, without running it."""
    rows = work.prompts * work.samples
    array = lambda length, dtype=jnp.float32: jax.ShapeDtypeStruct((rows, *length), dtype)  # noqa: E731
    prompt, completion = (work.prompt_length,), (work.completion_length,)
    example = tunix.WeightedTrainExample(
        prompt_ids=array(prompt, jnp.int32), prompt_mask=array(prompt, bool),
        completion_ids=array(completion, jnp.int32), completion_mask=array(completion, bool),
        advantages=array(()), ref_per_token_logps=array(completion), old_per_token_logps=array(completion),
        token_weights=array(completion),
    )  # fmt: skip
    config.temperature = 0.9
    graph, state = nnx.split(nnx.eval_shape(lambda: work.model(0)))
    loss = function_registry.get_policy_loss_fn(config.policy_loss_fn)

    def loss_of(state: Any, example: Any) -> Any:
        return loss(nnx.merge(graph, state), example, algo_config=config, pad_id=0, eos_id=2)[0]

    analysis = jax.jit(jax.grad(loss_of)).lower(state, example).compile().memory_analysis()
    assert analysis is not None  # a CPU has one
    return analysis.temp_size_in_bytes


def cpu_seconds(work: TunixWork, config: grpo_learner.GRPOConfig, updates: int) -> Iterator[float]:
    """Yields the CPU seconds of each update after the first."""
    marks: list[float] = []
    learner = learner_of(work, config, micro=work.prompts, optimizer=optax.adamw(1e-5), marks=marks)
    learner.train([{"prompts": np.arange(work.prompts).astype(str)}] * (updates + 2))
    yield from np.diff(marks)[1:]


def main() -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=32768, help="of memory and time")
    parser.add_argument("--updates", type=int, default=4, help="that are timed, of each learner in each of two turns")
    options = parser.parse_args()
    small, large = TunixWork(vocab=512, layers=2, width=64), TunixWork(vocab=options.vocab)
    rows: dict[str, Callable[[grpo_learner.GRPOConfig], str]] = {
        "gradient of two micro-batches against one, mean over tokens": lambda config: (
            f"{split_difference(small, dataclasses.replace(config, loss_agg_mode='token-mean')):.1e}"
        ),
        "the same, mean over rows": lambda config: f"{split_difference(small, config):.1e}",
        f"temporary memory of the gradient, V={options.vocab:,}": lambda config: (
            f"{temporary_bytes(large, config) / 2**20:.0f} MiB"
        ),
    }
    both = configs(small.samples)
    print("| | Tunix | kljax in Tunix |\n|---|---|---|")
    for name, measured in rows.items():
        print(f"| {name} | {' | '.join(map(measured, both.values()))} |", flush=True)
    seconds: dict[str, list[float]] = {name: [] for name in both}
    for _ in range(2):
        for name, config in both.items():
            seconds[name] += cpu_seconds(large, config, options.updates)
    base = statistics.median(seconds["Tunix"])
    shares = [f"{statistics.median(times) / base:.2f}" for times in seconds.values()]
    print(f"| CPU seconds of an update, as a share of Tunix's {base:.1f} | {' | '.join(shares)} |")


if __name__ == "__main__":
    main()
