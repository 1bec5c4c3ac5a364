"""Sampling: what is recorded is what the trainer computes, and a row depends on itself alone."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import kljax
from tests import other_seeds, tiny
from train.models import Decoder, DecoderConfig, LoraConfig
from train.models import head as heads
from train.models.parameters import abstract_params, init_params
from train.models.shard_rows import shard_rows
from train.models.sharding import make_mesh
from train.rl.policy import ScoredPolicy, Sequences, token_stats
from train.rollouts.sampler import Samples, Sampling, sample
from train.sequences.batch import move_columns

LORA = LoraConfig(rank=2, alpha=8.0, targets=("q_proj", "v_proj", "up_proj"))
CONFIG = DecoderConfig(
    vocab_size=24, layers=2, width=16, heads=4, kv_heads=2, head_dim=4, mlp_width=24, qkv_bias=True, qk_norm=True
)
MODEL = Decoder(dataclasses.replace(CONFIG, lora=LORA))
KEY, EOS, WIDTH, NEW_TOKENS = jax.random.key(11), 5, 6, 7
NEVER, ENDS = -1, 8
WARM, GREEDY = Sampling(0.8), Sampling(0.8, greedy=True)

draw = jax.jit(sample, static_argnums=0, static_argnames=("max_new_tokens", "sampling", "slots", "length", "unroll"))
stats_of = jax.jit(token_stats, static_argnames="entropy")


@functools.cache
def policy_of(mesh=None) -> kljax.Policy:
    """Embeddings as large as the blocks' outputs, and an adapter that matters."""
    if mesh is not None:
        return tiny.placed(policy_of(), MODEL, mesh)
    params = tiny.drawn(MODEL, jax.random.key(0))
    adapter = tiny.drawn(MODEL, jax.random.key(1), adapter=True)
    params["embed_tokens"]["embedding"] *= 12
    return kljax.Policy(params, jax.tree.map(lambda x: x + 0.1, adapter))


def prompts_of(lengths: list[int], width: int = WIDTH, fill: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Left-padded prompts; row r holds the same tokens whatever the width and the padding."""
    tokens, mask = np.full((len(lengths), width), fill, np.int32), np.zeros((len(lengths), width), bool)
    for row, length in enumerate(lengths):
        tokens[row, width - length :] = np.random.default_rng(row).integers(0, 24, length)
        mask[row, width - length :] = True
    return tokens, mask


def run(tokens: np.ndarray, mask: np.ndarray, policy=None, **changes) -> Samples:
    rows = np.arange(len(tokens), dtype=np.int32)
    arguments = {
        "key": KEY,
        "max_new_tokens": NEW_TOKENS,
        "sampling": WARM,
        "eos_ids": (EOS,),
        "row_ids": rows,
        **changes,
    }
    # As many for every run, so that runs share a program.
    arguments["eos_ids"] = np.pad(np.array(arguments["eos_ids"]), (0, ENDS - len(arguments["eos_ids"])), mode="edge")
    samples = draw(MODEL, policy or policy_of(), tokens, mask, **arguments)
    return jax.tree.map(np.asarray, samples)


LENGTHS = [6, 1, 3, 2, 5, 4, 6, 2]


def prompts_in(samples: Samples, x: np.ndarray, width: int = WIDTH) -> np.ndarray:
    """The values of the prompts, padded on the left with 0."""
    return move_columns(np.where(samples.completion_mask, 0, x), samples.prompt_lengths - width, width)


def completions_in(samples: Samples, x: np.ndarray) -> np.ndarray:
    """The values of the completions, [B, C]."""
    return move_columns(x, samples.prompt_lengths, NEW_TOKENS)


def test_recorded_log_probs_equal_the_trainer():
    policy = policy_of()
    samples = run(*prompts_of(LENGTHS), policy)
    assert other_seeds.shown(0 < samples.finished.sum() < len(LENGTHS)), "rows that end early and rows that do not"
    stats, _ = stats_of(
        ScoredPolicy(MODEL, policy), Sequences.rows(samples.tokens, samples.token_mask), temperature=0.8
    )
    expected = np.where(samples.completion_mask, stats.log_prob, 0)
    np.testing.assert_allclose(samples.fields["rollout_log_probs"], expected, atol=1e-5)
    assert samples.fields["rollout_log_probs"].dtype == np.float32
    assert (samples.fields["rollout_log_probs"][samples.completion_mask] < 0).all()
    plain, _ = stats_of(
        ScoredPolicy(MODEL, kljax.Policy(policy.params)),
        Sequences.rows(samples.tokens, samples.token_mask),
        temperature=0.8,
    )
    assert np.abs(np.where(samples.completion_mask, plain.log_prob, 0) - expected).max() > 1e-2, "the adapter counts"


def test_masks_hold_the_completion_through_its_eos():
    tokens, mask = prompts_of(LENGTHS)
    samples = run(tokens, mask)
    np.testing.assert_array_equal(samples.prompt_lengths, LENGTHS)
    np.testing.assert_array_equal(prompts_in(samples, samples.tokens), tokens)
    np.testing.assert_array_equal(prompts_in(samples, samples.token_mask), mask)
    columns = np.arange(samples.tokens.shape[1])
    np.testing.assert_array_equal(samples.completion_mask, samples.token_mask & (columns >= np.array(LENGTHS)[:, None]))
    np.testing.assert_array_equal(samples.token_mask, columns < samples.token_mask.sum(1, keepdims=True))
    for row, drawn in enumerate(completions_in(samples, samples.tokens)):
        ends = np.flatnonzero(drawn == EOS)
        length = ends[0] + 1 if samples.finished[row] else NEW_TOKENS
        assert samples.finished[row] == (len(ends) > 0)
        assert samples.completion_mask[row].sum() == length
        assert (samples.tokens[row, LENGTHS[row] + length :] == EOS).all()
    assert not samples.fields["rollout_log_probs"][~samples.completion_mask].any()


def test_samples_follow_the_distribution():
    rows = 4000
    tokens, mask = (np.repeat(x, rows, axis=0) for x in prompts_of([3]))
    policy = policy_of()
    samples = run(tokens, mask, policy, max_new_tokens=1)
    frequency = np.bincount(samples.tokens[:, 3], minlength=24) / rows
    each = np.concatenate([tokens[:24, -3:], np.arange(24, dtype=np.int32)[:, None]], axis=1)
    stats, _ = stats_of(
        ScoredPolicy(MODEL, policy),
        Sequences.rows(each, np.ones(each.shape, bool)),
        temperature=0.8,
    )
    probability = np.exp(stats.log_prob[:, 3])
    np.testing.assert_allclose(probability.sum(), 1, atol=1e-5)
    error = np.sqrt(probability * (1 - probability) / rows)
    assert (np.abs(frequency - probability) < 5 * error + 1e-3).all()


def test_row_is_the_same_alone_split_or_permuted():
    tokens, mask = prompts_of(LENGTHS)
    full = run(tokens, mask)
    for ids in ([4], [7, 2, 0, 1, 6, 4, 5, 3]):
        part = run(tokens[ids], mask[ids], row_ids=np.array(ids, np.int32))
        np.testing.assert_array_equal(part.tokens, full.tokens[ids])
        np.testing.assert_array_equal(part.completion_mask, full.completion_mask[ids])
        np.testing.assert_allclose(part.fields["rollout_log_probs"], full.fields["rollout_log_probs"][ids], atol=2e-6)
    same_prompt = run(np.repeat(tokens[:1], 8, axis=0), np.repeat(mask[:1], 8, axis=0))
    assert len({tuple(row) for row in same_prompt.tokens}) > 4, "rows with one prompt have keys of their own"
    other = run(tokens, mask, key=jax.random.key(12))
    assert (other.tokens != full.tokens).any()


def test_left_padding_width_and_content_change_nothing():
    near = run(*prompts_of(LENGTHS))
    far = run(*prompts_of(LENGTHS, width=WIDTH + 5, fill=EOS))
    width = WIDTH + NEW_TOKENS
    np.testing.assert_array_equal(far.tokens[:, :width], near.tokens)
    np.testing.assert_array_equal(far.completion_mask[:, :width], near.completion_mask)
    assert not far.token_mask[:, width:].any()
    # Log-probs of several nats: 1e-6 of them is a few units in the last place of float32.
    np.testing.assert_allclose(far.fields["rollout_log_probs"][:, :width], near.fields["rollout_log_probs"], rtol=1e-6)


def test_special_tokens_inside_a_prompt_are_harmless():
    tokens, mask = prompts_of(LENGTHS)
    tokens[0, 2], tokens[0, WIDTH - 1], tokens[2, WIDTH - 1] = EOS, EOS, 0
    policy = policy_of()
    samples = run(tokens, mask, policy)
    assert samples.completion_mask.any(1).all(), "a prompt that ends with EOS is still continued"
    np.testing.assert_array_equal(prompts_in(samples, samples.tokens), np.where(mask, tokens, 0))
    stats, _ = stats_of(
        ScoredPolicy(MODEL, policy), Sequences.rows(samples.tokens, samples.token_mask), temperature=0.8
    )
    expected = np.where(samples.completion_mask, stats.log_prob, 0)
    np.testing.assert_allclose(samples.fields["rollout_log_probs"], expected, atol=1e-5)


def test_sampled_padding_id_is_an_ordinary_token():
    drawn = (run(*prompts_of(LENGTHS), eos_ids=(NEVER,), key=jax.random.key(number)) for number in range(100))
    samples = next(samples for samples in drawn if (completions_in(samples, samples.tokens) == 0).any())
    assert completions_in(samples, samples.completion_mask).all()
    assert not samples.finished.any()


def test_greedy_takes_the_most_likely_token():
    policy = policy_of()
    samples = run(*prompts_of(LENGTHS), policy, sampling=GREEDY, eos_ids=(NEVER,))
    again = run(*prompts_of(LENGTHS), policy, sampling=GREEDY, eos_ids=(NEVER,), key=jax.random.key(99))
    np.testing.assert_array_equal(samples.tokens, again.tokens)
    rows = np.arange(len(LENGTHS))
    for token in range(24):
        column = samples.prompt_lengths + token % NEW_TOKENS
        changed = samples.tokens.copy()
        changed[rows, column] = token
        stats, _ = stats_of(ScoredPolicy(MODEL, policy), Sequences.rows(changed, samples.token_mask), temperature=0.8)
        best = samples.fields["rollout_log_probs"][rows, column]
        assert (np.asarray(stats.log_prob)[rows, column] <= best + 1e-5).all()


def test_loop_stops_when_every_row_is_done():
    tokens, mask = prompts_of(LENGTHS)
    full = run(tokens, mask, sampling=GREEDY, eos_ids=(NEVER,))
    assert full.steps == NEW_TOKENS - 1, "the first token needs no step"
    assert full.occupancy == 1
    # Every row ends at the token that it draws third, unless it drew it before.
    ends = tuple({int(row[prompt + 2]) for row, prompt in zip(full.tokens, LENGTHS, strict=True)})
    early = run(tokens, mask, sampling=GREEDY, eos_ids=ends)
    lengths = early.completion_mask.sum(-1)
    assert early.steps == lengths.max() - 1 < NEW_TOKENS - 1
    assert early.finished.all()
    np.testing.assert_allclose(early.occupancy, lengths.mean() / lengths.max(), rtol=1e-6)
    for row, length in enumerate(lengths):
        end = LENGTHS[row] + length
        np.testing.assert_array_equal(early.tokens[row, :end], full.tokens[row, :end])
        assert early.tokens[row, end - 1] in ends


def test_row_of_the_most_tokens_is_not_finished():
    tokens, mask = prompts_of(LENGTHS)
    full, cut = (run(tokens, mask, eos_ids=(NEVER,), **options) for options in ({}, {"length": 9}))
    assert cut.tokens.shape == (len(LENGTHS), 9)
    np.testing.assert_array_equal(cut.token_mask.sum(1), np.minimum(np.array(LENGTHS) + NEW_TOKENS, 9))
    np.testing.assert_array_equal(cut.tokens[cut.token_mask], full.tokens[:, :9][cut.token_mask])
    np.testing.assert_array_equal(
        cut.fields["rollout_log_probs"], np.where(cut.completion_mask, full.fields["rollout_log_probs"][:, :9], 0)
    )
    assert not cut.finished.any()


def test_row_without_a_prompt_is_padding():
    tokens, mask = prompts_of([0, *LENGTHS[1:]])
    samples = run(tokens, mask)
    assert not samples.token_mask[0].any()
    assert not samples.completion_mask[0].any()
    assert not samples.finished[0]
    assert np.isfinite(samples.fields["rollout_log_probs"]).all()
    assert not samples.fields["rollout_log_probs"][0].any()
    np.testing.assert_array_equal(samples.tokens[1:], run(*prompts_of(LENGTHS)).tokens[1:])


@pytest.mark.parametrize("shape", [pytest.param((8, 1, 1), marks=pytest.mark.thorough), (2, 2, 2)])
def test_samples_are_the_same_on_every_mesh(shape):
    tokens, mask = prompts_of(LENGTHS)
    single = run(tokens, mask)
    mesh = make_mesh(*shape)
    with jax.set_mesh(mesh):
        sharded = shard_rows({"tokens": tokens, "mask": mask}, mesh)
        samples = run(sharded["tokens"], sharded["mask"], policy_of(mesh))
    np.testing.assert_array_equal(samples.tokens, single.tokens)
    np.testing.assert_array_equal(samples.completion_mask, single.completion_mask)
    np.testing.assert_allclose(samples.fields["rollout_log_probs"], single.fields["rollout_log_probs"], atol=2e-6)


def test_each_phase_has_one_layer_loop():
    tokens, mask = prompts_of([2, 3])

    def loops(layers: int) -> int:
        model = Decoder(dataclasses.replace(CONFIG, layers=layers))
        abstract = jax.eval_shape(lambda: init_params(model, jax.random.key(0), make_mesh()))
        arguments = {"key": KEY, "max_new_tokens": 3, "sampling": WARM, "eos_ids": (EOS,), "unroll": False}
        return draw.lower(model, kljax.Policy(abstract), tokens, mask, **arguments).as_text().count("stablehlo.while")

    assert loops(2) == loops(5) > 0


@pytest.mark.parametrize("transposed", [False, True])
def test_large_tied_head_is_read_as_stored(transposed, monkeypatch):
    """The program of a large head has no transpose of it; a small one gets one on a CPU, outside the loop."""
    config = dataclasses.replace(CONFIG, vocab_size=2**17 + 1, width=64, layers=1, tie_embeddings=True)
    model, shape = Decoder(config), (2**17 + 1, 64)
    assert 4 * shape[0] * shape[1] > heads.TRANSPOSED_BYTES
    if transposed:
        monkeypatch.setattr(heads, "TRANSPOSED_BYTES", 4 * shape[0] * shape[1])
    rest = {"key": KEY, "max_new_tokens": 2, "sampling": GREEDY, "eos_ids": (EOS,)}
    params = abstract_params(model, make_mesh())
    text = str(jax.make_jaxpr(lambda policy: sample(model, policy, *prompts_of([3]), **rest))(kljax.Policy(params)))
    assert (f"f32[{shape[1]},{shape[0]}]" in text) == transposed


def test_zero_max_new_tokens_is_an_error():
    with pytest.raises(ValueError, match="max_new_tokens: got 0, expected at least 1"):
        run(*prompts_of([2]), max_new_tokens=0)
