"""Sampling in this process, with compiled programs for each prompt-length bucket."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np

import kljax
from train.config.schema import Config
from train.context import RunContext
from train.data.prompts import decode_completions, encode_prompts
from train.data.tasks import Example
from train.data.tokenizers import vocabulary_bytes
from train.distributed.global_arrays import held_rows, to_host, to_host_rows
from train.models.shard_rows import shard_rows
from train.models.sharding import batch_sharding
from train.rl.tracing import traced_once
from train.rollouts.routes import records_routes
from train.rollouts.sampler import Samples, Sampling, StopTable, WindowedSampler, samples_sharding, stop_table
from train.rollouts.source import Completions, InTurn, Request

# Shorter buckets would save less time than they take to compile.
MIN_BUCKET = 32
Kind = Literal["rollout", "held_out", "greedy"]
"""What a sampler completes: the prompts of steps, several times each; held-out ones, once; or these greedily."""


class Sampler(Protocol):
    """Completes prompts, as `WindowedSampler` does."""

    def __call__(
        self,
        policy: kljax.Policy,
        prompts: jax.Array,
        prompt_mask: jax.Array,
        key: jax.Array,
        rows: Mapping[str, Any] | None = None,
        /,
    ) -> Samples: ...


def prompt_buckets(max_prompt_length: int) -> list[int]:
    """Lists the prompt-length buckets: P, P/2 and P/4, but none below 32 except P itself.

    Example:
      >>> prompt_buckets(256), prompt_buckets(7)
      ([64, 128, 256], [7])
    """
    shorter = {-(-max_prompt_length // divisor) for divisor in (2, 4)}
    return sorted({max_prompt_length, *(bucket for bucket in shorter if bucket >= MIN_BUCKET)})


def make_sampler(context: RunContext, kind: Kind) -> Sampler:
    """Makes a sampler, compiled on first use of each bucket and window.

    Returns:
      A function of a fixed number of rows, with prompts in a length of `prompt_buckets`. Its output always has the
      columns of a batch. `rows` are as of `WindowedSampler`.
    """
    programs = sampling_programs(context, kind)
    layout = context.layout

    def identity(drawn: Samples) -> Samples:
        return drawn

    to_training = jax.jit(traced_once(identity, f"{kind}_to_training"), out_shardings=samples_sharding(context.mesh))

    def run_program(
        policy: kljax.Policy,
        prompts: jax.Array,
        prompt_mask: jax.Array,
        key: jax.Array,
        rows: Mapping[str, Any] | None = None,
    ) -> Samples:
        weights = layout.weights(policy)
        key_data = np.asarray(jax.random.key_data(key))
        with layout.active():
            # A key belongs to the mesh under which it was made.
            key = jax.random.wrap_key_data(jnp.asarray(key_data))
            drawn = programs[prompts.shape[1]](weights, prompts, prompt_mask, key, rows)
        return drawn if layout.mesh is context.mesh else to_training(drawn)

    return run_program


def sampling_programs(context: RunContext, kind: Kind) -> dict[int, WindowedSampler]:
    """Makes the not yet compiled samplers of a kind, by prompt-length bucket; rollouts record what the config says."""
    section = context.config.rollout
    samples = 1
    sampling = dataclasses.replace(plain_sampling(context.config), greedy=kind == "greedy")
    if kind == "rollout":
        sampling = dataclasses.replace(rollout_sampling(context.config), record_routes=records_routes(context))
        _, samples = rollout_rows(context)
    size = context.model.config.vocab_size
    # Checkpoints often have more vocabulary rows than their tokenizer has tokens, and any row may be sampled.
    stop = stop_table(section.stop, vocabulary_bytes(context.tokenizer, size) if section.stop else [])
    return {
        bucket: sampling_program(context, f"{kind}_{bucket}", samples, sampling=sampling, stop=stop)
        for bucket in prompt_buckets(context.config.data.max_prompt_length)
    }


def plain_sampling(config: Config) -> Sampling:
    """Returns the sampling options of a config, without records."""
    section = config.rollout
    return Sampling(config.temperature, section.top_k, section.top_p, section.min_p)


def rollout_sampling(config: Config) -> Sampling:
    """Returns the sampling options of rollouts."""
    return dataclasses.replace(plain_sampling(config), record_kept_tokens=config.rollout.record_kept_tokens)


def rollout_rows(context: RunContext) -> tuple[int, int]:
    """Returns how often a rollout repeats each prompt before its program, and the completions per prompt within it.

    The mesh must divide the rows: if it does not divide the prompts, they are repeated before the program.
    """
    section = context.config.rollout
    divides = section.prompts_per_step % context.layout.row_parts == 0
    return (1, section.samples_per_prompt) if divides else (section.samples_per_prompt, 1)


def sampling_program(
    context: RunContext, name: str, samples: int, *, sampling: Sampling, stop: StopTable | None
) -> WindowedSampler:
    """Makes the not yet compiled sampler of `make_sampler` for one prompt length."""
    config = context.config
    layout = context.layout
    return WindowedSampler(
        layout.model,
        layout.mesh,
        name=name,
        max_new_tokens=config.data.completion_length(),
        sampling=sampling,
        eos_ids=context.tokenizer.eos_ids,
        stop=stop,
        slots=config.rollout.slots,
        group=samples,
        length=config.data.row_length(),
        unroll=layout.unroll,
    )


def begin_samples(
    context: RunContext,
    sampler: Sampler,
    policy: kljax.Policy,
    examples: Sequence[Example],
    key: jax.Array,
    *,
    first_row: int | None = None,
) -> Samples:
    """Starts to sample completions of each example, in the smallest bucket that fits all prompts; does not wait.

    With one completion of each, `first_row` is the number of the first row for `key`, so that a part of many examples
    draws the tokens that it has among all of them.
    """
    max_prompt_length = context.config.data.max_prompt_length
    tokens, mask = encode_prompts(examples, context.tokenizer, max_prompt_length)
    longest = mask.sum(axis=1).max()
    bucket = next(bucket for bucket in prompt_buckets(max_prompt_length) if bucket >= longest)
    # Prompts are padded on the left, so the last columns have all their tokens.
    local_rows = held_rows(batch_sharding(context.layout.mesh), len(examples))
    prompts, prompt_mask = shard_rows((tokens[local_rows, -bucket:], mask[local_rows, -bucket:]), context.layout.mesh)
    rows = None if first_row is None else {"row_ids": np.arange(first_row, first_row + len(examples), dtype=np.int32)}
    return sampler(policy, prompts, prompt_mask, key, rows)


class JaxSource(InTurn):
    """Samples in this process, with the weights as the update has them or laid out for sampling.

    It answers the requests of steps and those for held-out prompts, each kind with programs of its own.
    """

    def __init__(self, context: RunContext, samplers: Mapping[Kind, Sampler] | None = None) -> None:
        """Makes each sampler at its first request, unless `samplers` has it."""
        super().__init__()
        self._repeats, _ = rollout_rows(context)
        self._context = context
        self._samplers = dict(samplers or {})
        self._weights: tuple[kljax.Policy, int] | None = None

    def update(self, policy: kljax.Policy, version: int) -> None:
        """Sets the weights without a copy."""
        self._weights = policy, version

    def sample(self, request: Request) -> Completions:
        """Starts to sample the completions; token n of row r depends only on the key, r, n and the prompt.

        Raises:
          ValueError: before the first `update`.
        """
        if self._weights is None:
            raise ValueError("policy: missing; call `update` before `sample`")
        policy, version = self._weights
        start = time.perf_counter()
        samples = self._begin(request, policy)
        # All programs are started here: those that come later wait for the scores of the batch.
        measured = {"rollout_occupancy": samples.occupancy}
        fields = dict(samples.fields)
        if "log_kept_mass" in fields:
            # The log-probs of the distribution that the tokens were drawn from.
            log_kept_mass = fields.pop("log_kept_mass")
            fields["rollout_log_probs"] = fields["rollout_log_probs"] - log_kept_mass
            measured["rollout_kept_mass"] = kljax.masked_mean(jnp.exp(log_kept_mass), samples.completion_mask)
        token_count = samples.completion_mask.sum()
        rows = request.rows

        def finish() -> dict[str, Any]:
            arrays = to_host_rows((samples.tokens, samples.token_mask, samples.completion_mask, samples.finished))
            tokens, token_mask, mask, finished = map(rows.select_own, arrays)
            texts = decode_completions(tokens, token_mask, mask, self._context.tokenizer)
            seconds = time.perf_counter() - start
            return {
                "finished": finished,
                "texts": texts,
                "metrics": {name: float(value) for name, value in to_host(measured).items()},
                "timings": {"rollout_tokens_per_second": float(to_host(token_count)) / seconds},
            }

        return Completions(
            examples=[request.examples[row * len(request.examples) // rows.count] for row in rows.own],
            tokens=samples.tokens,
            token_mask=samples.token_mask,
            completion_mask=samples.completion_mask,
            prompt_lengths=samples.prompt_lengths,
            finish=finish,
            fields=fields,
        ).with_versions(version)

    def _begin(self, request: Request, policy: kljax.Policy) -> Samples:
        if request.first_row is None:
            prompts = [example for example in request.examples for _ in range(self._repeats)]
            return begin_samples(self._context, self._sampler("rollout"), policy, prompts, request.key)
        # The last held-out prompts are filled up with repeated ones, so that every request runs the same program.
        size = self._context.config.eval.batch_size
        prompts = (list(request.examples) * size)[:size]
        sampler = self._sampler("greedy" if request.greedy else "held_out")
        return begin_samples(self._context, sampler, policy, prompts, request.key, first_row=request.first_row)

    def _sampler(self, kind: Kind) -> Sampler:
        if kind not in self._samplers:
            self._samplers[kind] = make_sampler(self._context, kind)
        return self._samplers[kind]

    def close(self) -> None:
        """No-op."""
