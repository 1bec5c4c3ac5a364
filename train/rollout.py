"""Rollouts: sample completions in this process, judge them on the host, and return a batch."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from train.batch import Batch
from train.config.schema import Config
from train.data import decode_completions, encode_prompts
from train.models import Decoder
from train.sampler import Samples, sample
from train.sharding import batch_sharding, shard_rows
from train.state import policy_of
from train.tasks import Example, Task
from train.tokenizer import ByteTokenizer
from train.tracing import traced_once

Tree = Any
Sampler = Callable[[dict[str, Tree], Tree, jax.Array, jax.Array, jax.Array], Samples]


@dataclasses.dataclass(frozen=True)
class Rollout:
    """A sampled and judged batch.

    Attributes:
      batch: on the devices; `rollout_log_probs` only if they are recorded.
      metrics: means over the completions: every named reward, length, and the share that ended by itself.
      completions: the texts, in the order of the rows.
    """

    batch: Batch
    metrics: dict[str, float]
    completions: list[str]


def make_sampler(
    config: Config, model: Decoder, tokenizer: ByteTokenizer, mesh: Mesh, *, name: str, greedy: bool = False
) -> Sampler:
    """`(trainable, base, prompts, prompt_mask, key) -> Samples`, compiled once, for one number of rows."""

    def draw(
        trainable: dict[str, Tree], base: Tree, prompts: jax.Array, prompt_mask: jax.Array, key: jax.Array
    ) -> Samples:
        return sample(
            model,
            policy_of(trainable, base),
            prompts,
            prompt_mask,
            key=key,
            max_new_tokens=config.data.max_completion_length,
            temperature=config.temperature,
            eos_id=tokenizer.eos_id,
            greedy=greedy,
        )

    return jax.jit(traced_once(draw, name), out_shardings=batch_sharding(mesh))


def complete(
    sampler: Sampler,
    trainable: dict[str, Tree],
    base: Tree,
    examples: Sequence[Example],
    *,
    key: jax.Array,
    prompt_length: int,
    tokenizer: ByteTokenizer,
    mesh: Mesh,
) -> tuple[Samples, list[str], np.ndarray]:
    """Samples one completion for each example; returns them with their texts and whether each ended by itself."""
    prompts, prompt_mask = shard_rows(encode_prompts(examples, tokenizer, prompt_length), mesh)
    samples = sampler(trainable, base, prompts, prompt_mask, key)
    tokens, mask, finished = jax.device_get((samples.tokens, samples.completion_mask, samples.finished))
    return samples, decode_completions(tokens, mask, tokenizer), finished


def judge(
    task: Task, examples: Sequence[Example], completions: Sequence[str], finished: np.ndarray
) -> dict[str, np.ndarray]:
    """The named rewards of each completion, `[B]` float32."""
    rows = zip(examples, completions, finished, strict=True)
    scores = [task.score(example, text, bool(done)) for example, text, done in rows]
    return {name: np.asarray([score[name] for score in scores], np.float32) for name in scores[0]}


def collect(
    config: Config,
    sampler: Sampler,
    trainable: dict[str, Tree],
    base: Tree,
    prompts: Sequence[Example],
    *,
    task: Task,
    key: jax.Array,
    tokenizer: ByteTokenizer,
    mesh: Mesh,
) -> Rollout:
    """The rollout batch of one step: `samples_per_prompt` completions of each prompt, judged."""
    group = config.rollout.samples_per_prompt
    examples = [example for example in prompts for _ in range(group)]
    samples, completions, finished = complete(
        sampler,
        trainable,
        base,
        examples,
        key=key,
        prompt_length=config.data.max_prompt_length,
        tokenizer=tokenizer,
        mesh=mesh,
    )
    scores = judge(task, examples, completions, finished)
    group_ids = np.repeat(np.arange(len(prompts), dtype=np.int32), group)
    rewards, group_ids = shard_rows((scores["reward"], group_ids), mesh)
    batch = Batch(
        tokens=samples.tokens,
        token_mask=samples.token_mask,
        completion_mask=samples.completion_mask,
        rewards=rewards,
        group_ids=group_ids,
        rollout_log_probs=samples.log_probs if config.rollout.record_log_probs else None,
    )
    metrics = {name: float(value.mean(dtype=np.float64)) for name, value in scores.items()}
    metrics["completion_length"] = float(jnp.mean(samples.completion_mask.sum(-1)))
    metrics["finished"] = float(finished.mean(dtype=np.float64))
    return Rollout(batch, metrics, completions)
