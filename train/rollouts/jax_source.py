"""Completions sampled in this process, by one compiled program for each width of prompts."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import kljax
from train.data.prompts import decode_completions, encode_prompts
from train.data.tasks import Example
from train.data.tokenizers import vocabulary_bytes
from train.models.sharding import shard_rows
from train.rl.tracing import traced_once
from train.rollouts.context import RunContext
from train.rollouts.sampler import Samples, Sampling, StopTable, sample, samples_sharding, stop_table
from train.rollouts.source import Completions, Request

Sampler = Callable[[kljax.Policy, jax.Array, jax.Array, jax.Array], Samples]
# Fewer columns are not worth a program of their own.
NARROWEST = 32


class Sampled(NamedTuple):
    """Samples on the devices, and on the host their texts and which of them ended by themselves."""

    samples: Samples
    texts: list[str]
    finished: np.ndarray


def prompt_widths(longest: int) -> list[int]:
    """Columns of prompts that there is a program for: all, half and a quarter of them, but none for a few.

    Example:
      >>> prompt_widths(256), prompt_widths(7)
      ([64, 128, 256], [7])
    """
    shorter = {-(-longest // parts) for parts in (2, 4)}
    return sorted({longest, *(width for width in shorter if width >= NARROWEST)})


def make_sampler(context: RunContext, *, name: str, samples: int = 1, greedy: bool = False) -> Sampler:
    """`(policy, prompts, prompt_mask, key) -> Samples`, compiled once for each width of prompts that is met.

    Args:
      context: the model, and the lengths, cuts, stops and slots of its config.
      name: of the program.
      samples: rows of each prompt, one after the other; they share what the model computes of it.
      greedy: the most probable tokens instead of a draw.

    Returns:
      A function for one number of rows and prompts of as many columns as one of `prompt_widths`; its result has
      `data.max_prompt_length` of them in any case.
    """
    widths = prompt_widths(context.config.data.max_prompt_length)
    config, size = context.config.rollout, context.model.config.vocab_size
    # Checkpoints often have more rows than their tokenizer has tokens, and any of them may be drawn.
    stop = stop_table(config.stop, vocabulary_bytes(context.tokenizer, size) if config.stop else [])
    programs = {
        width: sampling_program(context, f"{name}_{width}", width, samples, greedy=greedy, stop=stop)
        for width in widths
    }

    def draw(policy: kljax.Policy, prompts: jax.Array, prompt_mask: jax.Array, key: jax.Array) -> Samples:
        return programs[prompts.shape[1]](policy, prompts, prompt_mask, key)

    return draw


def sampling_program(
    context: RunContext, name: str, width: int, samples: int, *, greedy: bool, stop: StopTable | None
) -> Any:
    """What `make_sampler` runs for prompts of `width` columns, not yet compiled."""
    config, model, section = context.config, context.model, context.config.rollout
    sampling = Sampling(config.temperature, section.top_k, section.top_p, section.min_p, greedy)
    missing = config.data.max_prompt_length - width

    def widen(x: jax.Array, fill: int = 0) -> jax.Array:
        return jnp.pad(x, ((0, 0), (missing, 0)), constant_values=fill)

    def draw(policy: kljax.Policy, prompts: jax.Array, prompt_mask: jax.Array, key: jax.Array) -> Samples:
        drawn = sample(
            model,
            policy,
            prompts,
            prompt_mask,
            key=key,
            max_new_tokens=config.data.max_completion_length,
            sampling=sampling,
            eos_ids=context.tokenizer.eos_ids,
            stop=stop,
            slots=section.slots,
            group=samples,
        )
        return dataclasses.replace(
            drawn,
            tokens=widen(drawn.tokens, context.tokenizer.pad_id),
            token_mask=widen(drawn.token_mask),
            completion_mask=widen(drawn.completion_mask),
            log_probs=widen(drawn.log_probs),
        )

    return jax.jit(traced_once(draw, name), out_shardings=samples_sharding(context.mesh))


def complete(
    context: RunContext, sampler: Sampler, policy: kljax.Policy, examples: Sequence[Example], key: jax.Array
) -> Sampled:
    """The completions of each example, as many as the sampler was made for."""
    longest = context.config.data.max_prompt_length
    tokens, mask = encode_prompts(examples, context.tokenizer, longest)
    # Prompts are padded on the left: what no row of them has is cut off.
    width = next(width for width in prompt_widths(longest) if width >= mask.sum(axis=1).max())
    prompts, prompt_mask = shard_rows((tokens[:, -width:], mask[:, -width:]), context.mesh)
    samples = sampler(policy, prompts, prompt_mask, key)
    tokens, mask, finished = jax.device_get((samples.tokens, samples.completion_mask, samples.finished))
    return Sampled(samples, decode_completions(tokens, mask, context.tokenizer), finished)


class JaxSource:
    """The sampler of this process, with the weights where they are."""

    def __init__(self, context: RunContext, sampler: Sampler | None = None) -> None:
        section, mesh = context.config.rollout, context.mesh
        # Prompts that the mesh does not divide are repeated before they are laid over it, and not within the program.
        whole = section.prompts_per_step % (mesh.shape["data"] * mesh.shape["fsdp"]) == 0
        self._repeats = 1 if whole else section.samples_per_prompt
        samples = section.samples_per_prompt // self._repeats
        self._context = context
        self._sampler = sampler or make_sampler(context, name="rollout", samples=samples)
        self._policy: kljax.Policy | None = None

    def update(self, policy: kljax.Policy, step: int) -> None:
        """Takes the weights; nothing is copied."""
        self._policy = policy

    def sample(self, request: Request) -> Completions:
        """Token n of row r depends on the key, r, n and the prompt alone."""
        if self._policy is None:
            raise ValueError("policy: `update` has to be called before `sample`")
        prompts = [example for example in request.examples for _ in range(self._repeats)]
        began = time.perf_counter()
        samples, texts, finished = complete(self._context, self._sampler, self._policy, prompts, request.key)
        drawn, occupancy = jax.device_get((samples.completion_mask.sum(), samples.occupancy))
        return Completions(
            examples=[example for example in request.examples for _ in range(request.samples)],
            tokens=samples.tokens,
            token_mask=samples.token_mask,
            completion_mask=samples.completion_mask,
            finished=finished,
            texts=texts,
            log_probs=samples.log_probs,
            metrics={"rollout_occupancy": float(occupancy)},
            timings={"rollout_tokens_per_second": float(drawn) / (time.perf_counter() - began)},
        )

    def close(self) -> None:
        """Holds nothing."""
