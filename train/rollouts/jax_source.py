"""Completions sampled in this process, by one compiled program."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

import kljax
from train.data import decode_completions, encode_prompts
from train.rollouts.source import Completions, Request
from train.sampler import Samples, Sampling, sample, samples_sharding
from train.setting import Setting
from train.sharding import shard_rows
from train.tasks import Example
from train.tracing import traced_once

Sampler = Callable[[kljax.Policy, jax.Array, jax.Array, jax.Array], Samples]


class Sampled(NamedTuple):
    """Samples on the devices, and on the host their texts and which of them ended by themselves."""

    samples: Samples
    texts: list[str]
    finished: np.ndarray


def make_sampler(setting: Setting, *, name: str, greedy: bool = False) -> Sampler:
    """`(policy, prompts, prompt_mask, key) -> Samples`, compiled once, for one number of rows."""
    config, model = setting.config, setting.model
    sampling = Sampling(config.temperature, greedy=greedy)

    def draw(policy: kljax.Policy, prompts: jax.Array, prompt_mask: jax.Array, key: jax.Array) -> Samples:
        return sample(
            model,
            policy,
            prompts,
            prompt_mask,
            key=key,
            max_new_tokens=config.data.max_completion_length,
            sampling=sampling,
            eos_ids=setting.tokenizer.eos_ids,
        )

    return jax.jit(traced_once(draw, name), out_shardings=samples_sharding(setting.mesh))


def complete(
    setting: Setting, sampler: Sampler, policy: kljax.Policy, examples: Sequence[Example], key: jax.Array
) -> Sampled:
    """One completion of each example."""
    prompts = encode_prompts(examples, setting.tokenizer, setting.config.data.max_prompt_length)
    samples = sampler(policy, *shard_rows(prompts, setting.mesh), key)
    tokens, mask, finished = jax.device_get((samples.tokens, samples.completion_mask, samples.finished))
    return Sampled(samples, decode_completions(tokens, mask, setting.tokenizer), finished)


class JaxSource:
    """The sampler of this process, with the weights where they are."""

    def __init__(self, setting: Setting, sampler: Sampler | None = None) -> None:
        self._setting = setting
        self._sampler = sampler or make_sampler(setting, name="rollout")
        self._policy: kljax.Policy | None = None

    def update(self, policy: kljax.Policy, step: int) -> None:
        """Takes the weights; nothing is copied."""
        self._policy = policy

    def sample(self, request: Request) -> Completions:
        """Token n of row r depends on the key, r, n and the prompt alone."""
        if self._policy is None:
            raise ValueError("policy: `update` has to be called before `sample`")
        examples = [example for example in request.examples for _ in range(request.samples)]
        began = time.perf_counter()
        samples, texts, finished = complete(self._setting, self._sampler, self._policy, examples, request.key)
        drawn = float(samples.completion_mask.sum())
        return Completions(
            examples=examples,
            tokens=samples.tokens,
            token_mask=samples.token_mask,
            completion_mask=samples.completion_mask,
            finished=finished,
            texts=texts,
            log_probs=samples.log_probs,
            timings={"rollout_tokens_per_second": drawn / (time.perf_counter() - began)},
        )

    def close(self) -> None:
        """Holds nothing."""
