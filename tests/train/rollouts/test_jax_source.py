"""Rollouts: rows in the order of their prompts, judged by the task, at the temperature that is trained at."""

import dataclasses

import chex
import jax
import numpy as np
import optax
import pytest

import kljax
from tests import tiny
from train.data.prompts import encode_prompts
from train.data.tasks import Example, Task, load_task
from train.data.tasks.arithmetic import score
from train.data.tokenizers import ByteTokenizer
from train.models.shard_rows import shard_rows
from train.rl.policy import ScoredPolicy, Sequences, token_stats
from train.rl.state import policy_of
from train.rollouts.collect import collect
from train.rollouts.jax_source import JaxSource, begin_samples, make_sampler
from train.rollouts.sampler import Samples

TOKENIZER = ByteTokenizer()
EXAMPLES = [Example(f"{a}+{b}=", str(a + b), str(a + b)) for a, b in ((1, 2), (3, 4), (5, 5), (0, 8))]
TASK = Task("fixed", EXAMPLES, EXAMPLES, score)


def scripted(texts: list[str], finished: list[bool]):
    """A sampler that answers with given texts, row by row, two to a prompt."""

    def draw(policy, prompts, prompt_mask, key, rows) -> Samples:
        prompts, prompt_mask = (jax.numpy.repeat(x, 2, axis=0) for x in (prompts, prompt_mask))
        rows, max_new_tokens = prompts.shape[0], tiny.NEW_TOKENS
        tokens = np.zeros((rows, max_new_tokens), np.int32)
        mask = np.zeros((rows, max_new_tokens), bool)
        for row, (text, done) in enumerate(zip(texts, finished, strict=True)):
            ids = TOKENIZER.encode(text) + [TOKENIZER.eos_id] * done
            tokens[row, : len(ids)], mask[row, : len(ids)] = ids, True
        both = np.concatenate([np.zeros(prompts.shape, bool), mask], axis=1)
        return Samples(
            tokens=jax.numpy.concatenate([prompts, tokens], axis=1),
            token_mask=jax.numpy.concatenate([prompt_mask, mask], axis=1),
            completion_mask=jax.numpy.asarray(both),
            prompt_lengths=prompt_mask.sum(1),
            fields={"rollout_log_probs": jax.numpy.where(both, -1.5, 0)},
            finished=jax.numpy.asarray(np.array(finished)),
        )

    return draw


TEXTS = ["3", "4", "7", "77", "10", "", "8", "8"]
FINISHED = [True, True, True, True, True, False, False, True]


def collected(*overrides: str):
    context = tiny.context_of(tiny.config_of(*overrides), task=TASK)
    context = dataclasses.replace(context, prompts=tiny.SamePrompts(EXAMPLES))
    stream = tiny.stream_of(context, JaxSource(context, {"rollout": scripted(TEXTS, FINISHED)}))
    stream.update(kljax.Policy({}), 0)
    return collect(context, stream, 0)


def test_rows_follow_their_prompts_and_are_scored_individually():
    rollout = collected()
    batch = rollout.batch
    assert rollout.completions.texts == TEXTS
    np.testing.assert_array_equal(batch.group_ids, [0, 0, 1, 1, 2, 2, 3, 3])
    # "8" that was cut off before EOS is not an answer.
    np.testing.assert_array_equal(batch.rewards, [1, 0, 1, 0, 1, 0, 0, 1])
    prompts, mask = encode_prompts([e for e in EXAMPLES for _ in range(2)], TOKENIZER, tiny.PROMPT)
    np.testing.assert_array_equal(batch.tokens[:, : tiny.PROMPT], prompts)
    np.testing.assert_array_equal(batch.token_mask[:, : tiny.PROMPT], mask)
    lengths = [2, 2, 2, 3, 3, 0, 1, 2]
    np.testing.assert_array_equal(batch.completion_mask.sum(-1), lengths)
    assert rollout.completions.metrics == {
        "reward": 0.5,
        "correct": 0.5,
        "completion_length": sum(lengths) / 8,
        "finished": 6 / 8,
        "rollout_occupancy": 1.0,
        "reward_std": 0.5,
        "repeated_completions": 0.0,
        "copied_groups": 0.0,
    }
    assert (batch.rewards.dtype, batch.group_ids.dtype) == (np.float32, np.int32)
    for name in ("old_log_probs", "ref_log_probs", "values", "advantages", "returns", "token_weights"):
        assert getattr(batch, name) is None, name


def test_log_probs_are_recorded_on_request_only():
    recorded = collected().batch.rollout_log_probs
    np.testing.assert_array_equal(recorded, np.where(collected().batch.completion_mask, -1.5, 0))
    assert collected("rollout.record_log_probs=false").batch.rollout_log_probs is None
    # What needs them switches them on.
    needing = collected("rollout.record_log_probs=false", "kl.rollout.coef=0.1")
    assert needing.batch.rollout_log_probs is not None


def test_sampler_and_log_probs_have_one_temperature():
    config = tiny.config_of("temperature=0.6")
    state = tiny.state_of(config, optax.identity())
    context, policy = tiny.context_of(config), policy_of(state.trainable, None)
    sampler = make_sampler(context, "held_out")
    examples = load_task(config).train[:8]
    samples = begin_samples(context, sampler, policy, examples, jax.random.key(1))
    assert len(samples.finished) == 8
    stats = jax.jit(token_stats)

    def log_probs(temperature: float) -> np.ndarray:
        scored, _ = stats(
            ScoredPolicy(context.model, policy),
            Sequences.rows(samples.tokens, samples.token_mask),
            temperature=temperature,
        )
        return np.where(samples.completion_mask, scored.log_prob, 0)

    np.testing.assert_allclose(samples.fields["rollout_log_probs"], log_probs(0.6), atol=2e-6)
    assert np.abs(samples.fields["rollout_log_probs"] - log_probs(1.0)).max() > 1e-2
    again = begin_samples(context, sampler, policy, examples, jax.random.key(1))
    np.testing.assert_array_equal(samples.tokens, again.tokens)
    other = begin_samples(context, sampler, policy, examples, jax.random.key(2))
    assert (np.asarray(samples.tokens) != np.asarray(other.tokens)).any()


def test_short_prompts_go_through_a_narrower_program():
    """Which says the same: the columns that are left out hold nothing."""
    config = tiny.config_of("data.max_prompt_length=64")
    state = tiny.state_of(config, optax.identity())
    context, policy = tiny.context_of(config), policy_of(state.trainable, None)
    sampler, widths = make_sampler(context, "held_out"), []

    def watched(policy, prompts, prompt_mask, key, rows) -> Samples:
        widths.append(prompts.shape[1])
        return sampler(policy, prompts, prompt_mask, key, rows)

    short, key = EXAMPLES * 2, jax.random.key(1)
    narrow = begin_samples(context, watched, policy, short, key)
    full = sampler(policy, *shard_rows(encode_prompts(short, TOKENIZER, 64), context.mesh), key)
    long = [Example("1" * 40, "1", "1"), *short[1:]]
    begin_samples(context, watched, policy, long, key)
    assert widths == [32, 64]
    chex.assert_trees_all_equal_shapes_and_dtypes(narrow, full)
    for name in ("tokens", "token_mask", "completion_mask", "finished"):
        np.testing.assert_array_equal(getattr(narrow, name), getattr(full, name), err_msg=name)
    np.testing.assert_allclose(narrow.fields["rollout_log_probs"], full.fields["rollout_log_probs"], atol=2e-6)


def test_mesh_not_dividing_the_rows_is_named():
    prompts, _ = encode_prompts(EXAMPLES[:3], TOKENIZER, tiny.PROMPT)
    with pytest.raises(ValueError, match=r"3 rows are not divisible by mesh\.data x mesh\.fsdp = 2"):
        shard_rows(prompts, tiny.mesh_of(2, 1, 1))
