"""Continuous batching: fewer slots than rows, and what comes out is as if every row had been alone."""

import functools
import math
import re

import jax
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

import kljax
from tests import other_seeds, tiny
from train.models import Decoder, DecoderConfig, LayerKind
from train.models.shard_rows import shard_rows
from train.models.sharding import make_mesh
from train.rl.policy import ScoredPolicy, Sequences, hidden_states, token_stats
from train.rollouts.sampler import Samples, Sampling, sample, stop_table

# A window shorter than the completions, two ropes and soft caps: columns out of order would show.
MODEL = Decoder(
    DecoderConfig(
        vocab_size=24,
        layers=2,
        width=16,
        heads=4,
        kv_heads=2,
        head_dim=4,
        mlp_width=24,
        sliding_window=4,
        pattern=(LayerKind("sliding"), LayerKind("full")),
        attention_softcap=20.0,
        final_softcap=5.0,
        tie_embeddings=True,
    )
)
WIDTH, NEW_TOKENS, SLOTS, GROUP = 6, 9, 3, 4
LENGTHS = (6, 2, 4)
ROWS = GROUP * len(LENGTHS)
PROMPT_IDS = np.repeat(np.arange(len(LENGTHS)), GROUP)
WARM = Sampling(0.7)

draw = jax.jit(sample, static_argnums=0, static_argnames=("max_new_tokens", "sampling", "slots", "group", "unroll"))


@functools.cache
def policy_of(mesh=None) -> kljax.Policy:
    if mesh is not None:
        return tiny.placed(policy_of(), MODEL, mesh)
    # An example, whose rows have many lengths.
    params = tiny.drawn(MODEL, other_seeds.example_key(0))
    with jax.set_mesh(tiny.mesh_of()):
        params["embed_tokens"]["embedding"] *= 20
    return kljax.Policy(params)


def prompts_of() -> tuple[np.ndarray, np.ndarray]:
    mask = np.arange(WIDTH) >= WIDTH - np.array(LENGTHS)[:, None]
    return np.where(mask, other_seeds.example(0).integers(0, 24, mask.shape), 0).astype(np.int32), mask


def arguments_of(**changes) -> dict:
    return {
        "key": other_seeds.example_key(5),
        "max_new_tokens": NEW_TOKENS,
        "sampling": WARM,
        "eos_ids": (5, 9),
        "slots": SLOTS,
        "group": GROUP,
        "limits": np.full(ROWS, NEW_TOKENS),
        "row_ids": np.arange(ROWS),
        **changes,
    }


def run(policy=None, prompts=None, **changes) -> Samples:
    samples = draw(MODEL, policy or policy_of(), *(prompts or prompts_of()), **arguments_of(**changes))
    return jax.tree.map(np.asarray, samples)


def text_of(**changes) -> str:
    """The compiled program of a run."""
    return draw.lower(MODEL, policy_of(), *prompts_of(), **arguments_of(**changes)).compile().as_text()


def check_same(got: Samples, expected: Samples) -> None:
    for name in ("tokens", "token_mask", "completion_mask", "finished"):
        np.testing.assert_array_equal(getattr(got, name), getattr(expected, name), err_msg=name)
    np.testing.assert_allclose(got.fields["rollout_log_probs"], expected.fields["rollout_log_probs"], atol=3e-6)


@pytest.fixture(scope="module")
def queued() -> Samples:
    return run()


def test_rows_are_the_same_with_and_without_queue(queued):
    tokens, mask = prompts_of()
    lengths = queued.completion_mask.sum(-1)
    assert len(set(lengths)) > 4, "rows of many lengths"
    check_same(queued, run(slots=None))
    # Each row with a prompt of its own, every one prefilled, and the layers in a loop.
    check_same(queued, run(prompts=(tokens[PROMPT_IDS], mask[PROMPT_IDS]), group=1, unroll=False))
    for row, prompt in enumerate(PROMPT_IDS):
        np.testing.assert_array_equal(queued.tokens[row, : queued.prompt_lengths[row]], tokens[prompt, mask[prompt]])
    np.testing.assert_array_equal(queued.prompt_lengths, mask[PROMPT_IDS].sum(1))
    stats, _ = jax.jit(token_stats)(
        ScoredPolicy(MODEL, policy_of()), Sequences.rows(queued.tokens, queued.token_mask), temperature=0.7
    )
    np.testing.assert_allclose(
        queued.fields["rollout_log_probs"], np.where(queued.completion_mask, stats.log_prob, 0), atol=1e-5
    )


def test_free_slot_takes_the_next_row(queued):
    lengths = queued.completion_mask.sum(-1)
    free = np.zeros(SLOTS, int)
    for length in lengths:
        free[free.argmin()] += length
    assert queued.steps == free.max() - 1
    np.testing.assert_allclose(queued.occupancy, lengths.sum() / (free.max() * SLOTS), rtol=1e-6)
    static = sum(lengths[first : first + SLOTS].max() for first in range(0, ROWS, SLOTS))
    assert queued.steps + 1 < static, "a batch that waits for its longest row takes longer"


def test_order_and_numbers_of_rows_are_free(queued):
    order = np.random.default_rng(1).permutation(ROWS)
    prompts = tuple(x[PROMPT_IDS[order]] for x in prompts_of())
    shuffled = run(prompts=prompts, group=1, row_ids=order)
    check_same(shuffled, jax.tree.map(lambda x: x[order] if np.ndim(x) else x, queued))


def test_limits_and_rows_without_a_prompt(queued):
    tokens, mask = prompts_of()
    mask[1] = False
    limits = np.arange(ROWS) % 5
    samples = run(prompts=(tokens, mask), limits=limits)
    full = queued.completion_mask.sum(-1)
    expected = np.where(PROMPT_IDS == 1, 0, np.minimum(limits, full))
    np.testing.assert_array_equal(samples.completion_mask.sum(-1), expected)
    np.testing.assert_array_equal(samples.finished, queued.finished & (expected == full))
    completion_mask = samples.completion_mask
    np.testing.assert_array_equal(samples.tokens[completion_mask], queued.tokens[completion_mask])
    assert not samples.fields["rollout_log_probs"][~completion_mask].any()
    nothing = run(prompts=(tokens, mask & False))
    assert not nothing.token_mask.any()
    assert not nothing.finished.any()
    assert nothing.occupancy == 0


def test_stop_strings_end_rows_and_belong_to_them(queued):
    pieces = [b"", *(bytes((96 + token,)) for token in range(1, 24))]
    words = [
        b"".join(pieces[token] for token in row[completion_mask])
        for row, completion_mask in zip(queued.tokens, queued.completion_mask, strict=True)
    ]
    stops = [words[0][1:3].decode(), words[4][:1].decode()]
    samples = run(stop=stop_table(stops, pieces))
    for row, word in enumerate(words):
        ends = [word.find(stop.encode()) + len(stop) for stop in stops if stop.encode() in word]
        completion_mask = samples.completion_mask[row]
        got = b"".join(pieces[token] for token in samples.tokens[row, completion_mask])
        assert got == (word[: min(ends)] if ends else word)
        assert samples.finished[row] == (bool(ends) or queued.finished[row])
    assert (samples.completion_mask.sum(-1) < queued.completion_mask.sum(-1)).any()


KEPT = Sampling(0.7, top_k=6, top_p=0.9, min_p=0.02, record_kept_tokens=True)


@pytest.fixture(scope="module")
def recorded() -> Samples:
    return run(sampling=KEPT)


def check_same_kept(got: Samples, expected: Samples) -> None:
    check_same(got, expected)
    np.testing.assert_array_equal(got.fields["kept_ids"], expected.fields["kept_ids"])
    np.testing.assert_allclose(got.fields["log_kept_mass"], expected.fields["log_kept_mass"], atol=3e-6)


def kept_by_sorting(logits: np.ndarray) -> set[int]:
    """The tokens that the filters of `KEPT` keep, from logits [V] in float64 that are divided by the temperature."""
    order = np.argsort(-logits)[: KEPT.top_k]
    weights = np.exp(logits - logits.max())[order]
    before = np.cumsum(weights) - weights
    return set(order[(before < KEPT.top_p * weights.sum()) & (weights >= KEPT.min_p)].tolist())


def test_kept_tokens_are_recorded_for_every_sampled_token(recorded):
    policy, completion_mask = policy_of(), recorded.completion_mask
    assert recorded.fields["kept_ids"].shape == (*completion_mask.shape, KEPT.top_k)
    assert (recorded.fields["kept_ids"][~completion_mask] == -1).all()
    assert not recorded.fields["log_kept_mass"][~completion_mask].any()
    hidden = jax.jit(hidden_states)(ScoredPolicy(MODEL, policy), Sequences.rows(recorded.tokens, recorded.token_mask))
    table = np.asarray(policy.params["embed_tokens"]["embedding"], np.float64)
    cap = MODEL.config.final_softcap
    logits = cap * np.tanh(np.asarray(hidden, np.float64) @ table.T / cap) / KEPT.temperature
    sizes = set()
    for row, column in zip(*np.nonzero(completion_mask), strict=True):
        ids, before = recorded.fields["kept_ids"][row, column], logits[row, column - 1]
        selected = kept_by_sorting(before)
        assert set(ids[ids >= 0].tolist()) == selected
        assert recorded.tokens[row, column] in selected
        mass = np.logaddexp.reduce(before[sorted(selected)]) - np.logaddexp.reduce(before)
        np.testing.assert_allclose(recorded.fields["log_kept_mass"][row, column], mass, atol=1e-5)
        sizes.add(len(selected))
    assert len(sizes) > 3, "lists of many lengths"
    fields = recorded.fields
    stats, _ = jax.jit(token_stats)(
        ScoredPolicy(MODEL, policy),
        Sequences.rows(recorded.tokens, recorded.token_mask, completion_mask, fields),
        temperature=0.7,
    )
    # The ratio of the first update is 1: both are log-probs of the distribution that was drawn from.
    np.testing.assert_allclose(fields["rollout_log_probs"] - fields["log_kept_mass"], stats.log_prob, atol=2e-5)


# The programs of windows are compared with one that has no queue, kept tokens too.
@pytest.mark.thorough
def test_kept_tokens_are_the_same_without_a_queue(recorded):
    check_same_kept(run(sampling=KEPT, slots=None), recorded)


def test_kept_tokens_are_equal_on_an_indivisible_mesh(recorded):
    mesh = make_mesh(2, 2, 2)
    with jax.set_mesh(mesh):
        check_same_kept(run(policy_of(mesh), sampling=KEPT, slots=4), recorded)


def test_recording_is_optional_and_changes_no_token(recorded, queued):
    plain = run(sampling=Sampling(0.7, top_k=6, top_p=0.9, min_p=0.02))
    check_same(plain, recorded)
    assert plain.fields.keys() == queued.fields.keys() == {"rollout_log_probs"}


def sent(text: str) -> list[int]:
    """Elements of every floating-point array that the compiled loops over tokens and over free slots send."""
    collected = []
    for computation in text.split("\n\n"):
        lines = computation.splitlines() if "region" in computation.partition("(")[0] else []
        moved = [line for line in lines if re.search(r" (all-gather|all-reduce|all-to-all|collective-permute)\(", line)]
        for line in (line for line in moved if "prefill" not in line):
            arrays = re.findall(r"f32\[([0-9,]+)\]", line.partition(" = ")[2].partition("(%")[0])
            collected += [math.prod(map(int, dims.split(","))) for dims in arrays if dims]
    return collected


# With kept tokens above; on one device the loop over the layers is compared.
@pytest.mark.thorough
@pytest.mark.parametrize("unroll", [True, False])
def test_samples_are_equal_on_an_indivisible_mesh(queued, unroll):
    mesh = make_mesh(2, 2, 2)
    with jax.set_mesh(mesh):
        check_same(run(policy_of(mesh), slots=4, unroll=unroll), queued)


@pytest.mark.parametrize(
    "shape", [(2, 1, 2), *(pytest.param(shape, marks=pytest.mark.thorough) for shape in ((1, 1, 2), (2, 1, 1)))]
)
def test_rows_are_equal_with_split_heads_or_rows(queued, shape):
    mesh = make_mesh(*shape)
    with jax.set_mesh(mesh):
        check_same(run(policy_of(mesh), slots=None), queued)


def test_mesh_sends_each_prompt_when_taken():
    """Nor are caches, or the logits of a step; what the loops send are activations, and one prompt."""
    mesh, prompts, config = make_mesh(2, 2, 2), 16, MODEL.config
    tokens, mask = np.zeros((prompts, 32), np.int32), np.ones((prompts, 32), bool)
    arguments = {
        "key": other_seeds.example_key(5),
        "max_new_tokens": NEW_TOKENS,
        "sampling": WARM,
        "eos_ids": (5,),
        "slots": 8,
    }
    with jax.set_mesh(mesh):
        placed = shard_rows((tokens, mask), mesh)
        text = draw.lower(MODEL, policy_of(mesh), *placed, group=2, **arguments).compile().as_text()
    single = config.layers * 32 * config.kv_heads // 2 * config.head_dim
    assert max(sent(text)) == single, "keys or values of one prompt, on one device"


def test_cache_is_updated_in_place():
    """In no loop is an array made that has the shape of a layer's cache, but by writing a part of the one before."""
    text = text_of()
    columns = f"(?:{WIDTH}|{NEW_TOKENS})"
    made = re.compile(rf"= f32\[{SLOTS},2,(?:4,{columns}|{columns},4)\]\S* ([\w-]+)\(")
    loops = []
    for computation in text.split("\n\n"):
        lines = [line for line in computation.splitlines() if "prefill" not in line]
        actual = [line for line in lines if (match := made.search(line)) and match[1] == "fusion"]
        loops += actual if "region" in computation.partition("(")[0] else []
    # Keys and values of two layers: completions in the loop over tokens, prompts in the two over free slots.
    assert len(loops) == 2 * 2 * 3
    assert all("dynamic-update-slice" in line.partition("=")[0] for line in loops), loops


def test_rows_of_a_prompt_read_one_copy():
    """Without a queue no array holds a prompt's keys or values for every row; those of the rows begin after it."""
    text = text_of(slots=None)

    def arrays(rows: int, columns: int) -> set[str]:
        return set(re.findall(rf"f32\[{rows},2,(?:4,{columns}|{columns},4)\]", text))

    assert not arrays(ROWS, WIDTH + NEW_TOKENS) | arrays(ROWS, WIDTH)
    assert len(arrays(ROWS, NEW_TOKENS)) == len(arrays(len(LENGTHS), WIDTH)) == 2
    made = re.findall(rf"%(\S+) = f32\[{ROWS},2,(?:4,{NEW_TOKENS}|{NEW_TOKENS},4)\]\S* fusion", text)
    assert sum("dynamic-update-slice" in name for name in made) == 2 * MODEL.config.layers, made


@pytest.mark.parametrize("slots", [None, SLOTS])
def test_loop_repeats_no_constant_computation(slots):
    """Neither rotations nor random numbers."""

    def inside(jaxpr, names: set, within: bool) -> set:
        for equation in jaxpr.eqns:
            names |= {equation.primitive.name} if within else set()
            for inner in jaxprs_in_params(equation.params):
                inside(inner, names, within or equation.primitive.name == "while")
        return names

    tokens, mask = prompts_of()
    chosen = {"slots": slots, "group": GROUP, "max_new_tokens": NEW_TOKENS, "unroll": True}
    rest = {"key": other_seeds.example_key(5), "sampling": WARM, "eos_ids": (5,)}
    traced = jax.make_jaxpr(lambda policy: sample(MODEL, policy, tokens, mask, **rest, **chosen))(policy_of())
    actual = inside(traced.jaxpr, set(), False)
    assert "exp" in actual
    assert not actual & {"cos", "sin", "random_bits", "random_fold_in", "threefry2x32"}


def test_impossible_slots_are_named():
    with pytest.raises(ValueError, match="slots: got 0, expected at least 1"):
        run(slots=0)
    with pytest.raises(ValueError, match="group: got 0, expected at least 1"):
        run(group=0)
    mesh = make_mesh(2, 2, 2)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"slots: got 3, expected a multiple of .* = 4"):
        run(policy_of(mesh), slots=3)
