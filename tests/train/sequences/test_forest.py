"""Forests of slots: what attends to what, and that losses and gradients are those of the sequences one by one."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import tiny
from tests.rounding import norm
from tests.train.sequences.forests import Drawn, assert_is_forest, draw_forest, draw_groups, paths
from train.config.plan import Plan
from train.models.head import stored_head
from train.rl.objective import coefficients, make_objective
from train.rl.terms import make_weighting
from train.sequences.batch import Batch
from train.sequences.forest import Forest, group_forest, row_forest
from train.sequences.write_forest import Placed, write_forest

SEEDS = st.integers(0, 2**31)
PROMPT, GROUP, NEW_TOKENS = 5, 3, 4


SHAPE = (PROMPT, NEW_TOKENS)


def lengths_of(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Masks [B, P + C] of rows, and the lengths of their prompts, which groups share; both may be empty."""
    rng, column = np.random.default_rng(seed), np.arange(PROMPT + NEW_TOKENS)
    prompts = rng.integers(0, PROMPT + 1, 4).repeat(GROUP)
    return column < (prompts + rng.integers(0, NEW_TOKENS + 1, 4 * GROUP))[:, None], prompts


@settings(max_examples=25, deadline=None)
@given(SEEDS, st.sampled_from([None, 1, 3, 30]))
def test_slots_see_what_is_before_them_in_their_sequences(seed, window):
    drawn = draw_forest(seed)
    assert_is_forest(drawn.forest, drawn.token_mask, window)


@settings(max_examples=15, deadline=None)
@given(SEEDS, st.sampled_from([None, 1, 3, 30]))
def test_rows_and_groups_are_forests(seed, window):
    """With empty completions and empty prompts."""
    mask, prompts = lengths_of(seed)
    assert_is_forest(row_forest(jnp.asarray(mask)), mask, window)
    # A completion of an empty prompt has no prompt's slot, which `paths` would begin with.
    assert_is_forest(group_forest(jnp.asarray(mask), jnp.asarray(prompts), SHAPE, GROUP), mask, window)


@settings(max_examples=10, deadline=None)
@given(SEEDS, st.integers(0, 3))
def test_forests_of_narrower_rows_hold_all_tokens(seed, missing):
    """Rows and groups have the slots of their tokens also where rows have fewer columns than P + C."""
    mask, prompts = lengths_of(seed)
    width = PROMPT + NEW_TOKENS - missing
    fits = (mask.sum(-1) <= width).reshape(-1, GROUP).all(-1).repeat(GROUP)
    mask, prompts = mask[fits], prompts[fits]
    if len(mask):
        for_width = group_forest(jnp.asarray(mask[:, :width]), jnp.asarray(prompts), SHAPE, GROUP)
        expected = group_forest(jnp.asarray(mask), jnp.asarray(prompts), SHAPE, GROUP)
        np.testing.assert_array_equal(for_width.places, expected.places[:, :width])
        np.testing.assert_array_equal(for_width.end, expected.end)
        tokens = jnp.arange(mask.size).reshape(mask.shape)
        np.testing.assert_array_equal(for_width.take(tokens[:, :width], -1), expected.take(tokens, -1))
        assert_is_forest(for_width, mask[:, :width], None)
        rows = row_forest(jnp.asarray(mask[:, :width]), jnp.asarray(prompts), NEW_TOKENS)
        slots = jnp.arange(1, width + 1) * jnp.ones((len(mask), 1), int)
        kept = rows.uncut(rows.cut(slots)) > 0
        assert not (mask[:, :width] & (np.arange(width) >= prompts[:, None]) & ~np.asarray(kept)).any()


def forest_of(mask: np.ndarray, prompts: np.ndarray, in_groups: bool) -> Forest:
    arrays = jnp.asarray(mask), jnp.asarray(prompts)
    return group_forest(*arrays, SHAPE, GROUP) if in_groups else row_forest(*arrays, NEW_TOKENS)


@settings(max_examples=10, deadline=None)
@given(SEEDS, st.booleans())
def test_counts_are_the_sequences_with_a_completion(seed, in_groups):
    mask, prompts = lengths_of(seed)
    forest = forest_of(mask, prompts, in_groups)
    expected = np.zeros(forest.depth.size, int)
    some = mask.any(-1)
    for path, row, prompt in zip(paths(forest, mask), mask[some], prompts[some], strict=True):
        expected[path] += row.sum() > prompt
    np.testing.assert_array_equal(np.asarray(forest.counts).reshape(-1), expected)


@settings(max_examples=10, deadline=None)
@given(SEEDS, st.booleans())
def test_head_gets_the_slots_of_completions(seed, in_groups):
    """As many as the most tokens of completions, in which every token of one is."""
    mask, prompts = lengths_of(seed)
    forest = forest_of(mask, prompts, in_groups)
    of_completions = np.zeros(forest.depth.size, bool)
    for path, prompt in zip(paths(forest, mask), prompts[mask.any(-1)], strict=True):
        of_completions[path[prompt:]] = True
    slots = jnp.arange(1.0, forest.depth.size + 1).reshape(forest.depth.shape)
    cut, pull = jax.vjp(forest.cut, slots)
    assert cut.size == NEW_TOKENS * len(mask)
    kept = forest.uncut(cut)
    np.testing.assert_array_equal(kept, np.where(np.isin(slots, cut), slots, 0))
    assert not (of_completions & (np.asarray(kept).reshape(-1) == 0)).any()
    np.testing.assert_array_equal(pull(cut)[0], kept)


def test_prompt_of_a_group_is_read_where_a_completion_follows():
    """A row without one has no experts for its last token, which is that of the prompt."""
    mask = np.ones((2 * GROUP, PROMPT + NEW_TOKENS), bool)
    mask[:2, PROMPT:] = mask[GROUP:, PROMPT:] = False
    rows = np.broadcast_to(np.arange(2 * GROUP)[:, None], mask.shape)
    forest = forest_of(mask, np.full(2 * GROUP, PROMPT), in_groups=True)
    read = np.asarray(forest.take(jnp.asarray(rows), -1))
    np.testing.assert_array_equal(read[:, :PROMPT], np.array([[2], [GROUP]]).repeat(PROMPT, axis=1))


@settings(max_examples=25, deadline=None)
@given(SEEDS)
def test_values_travel_between_tokens_and_slots(seed):
    """Forth and back, to the next token, and their gradients: sums over all sequences that share a token."""
    drawn, rng = draw_forest(seed), np.random.default_rng(seed)
    forest, flat = drawn.forest, drawn.forest.depth.size
    np.testing.assert_array_equal(
        forest.gather(forest.take(drawn.tokens), -1), np.where(drawn.token_mask, drawn.tokens, -1)
    )
    with jax.enable_x64(True):
        x = rng.normal(size=(*forest.depth.shape, 2))
        trained = drawn.token_mask & drawn.completion_mask
        slope = rng.normal(size=(*trained.shape, 2)) * trained[..., None]
        value, pull = jax.vjp(forest.gather, x)
        expected, into, before = np.zeros((*trained.shape, 2)), np.zeros((flat, 2)), np.full(flat, -1)
        for row, path in enumerate(paths(forest, drawn.token_mask)):
            expected[row, drawn.token_mask[row]] = x.reshape(flat, 2)[path]
            np.add.at(into, path, slope[row, drawn.token_mask[row]])
            before[path[1:]] = path[:-1]
        np.testing.assert_array_equal(value, expected)
        np.testing.assert_allclose(pull(slope)[0].reshape(flat, 2), into, rtol=0, atol=1e-14)

        follows = before >= 0
        value, pull = jax.vjp(forest.before, x)
        np.testing.assert_array_equal(value.reshape(flat, 2)[follows], x.reshape(flat, 2)[before[follows]])
        slope = rng.normal(size=(flat, 2)) * follows[:, None]
        into = np.zeros((flat, 2))
        np.add.at(into, before[follows], slope[follows])
        np.testing.assert_allclose(pull(slope.reshape(x.shape))[0].reshape(flat, 2), into, rtol=0, atol=1e-14)


def test_token_is_read_where_it_is_trained():
    """A prompt of one sequence is a completion of the one before, or the other way round."""
    of_unit = [[Placed(0, 4, 1), Placed(1, 6, 4, shared=4)], [Placed(2, 4, 4), Placed(3, 4, 2, shared=3)]]
    forest = write_forest([of_unit], rows=2, width=8, sequences=4, columns=6)
    np.testing.assert_array_equal(forest.readers[0, :, 0], [0, 1, 2, 3, 10, 11, -1, -1])
    np.testing.assert_array_equal(forest.readers[1, :, 0], [12, 13, 20, 15, 21, -1, -1, -1])
    assert forest.readers.shape[-1] == 1
    np.testing.assert_array_equal(forest.parents[:, 0], [0, 2])
    np.testing.assert_array_equal(forest.branches[:, 0], [8, 4])


# ---- losses ----

TERMS = ("kl.loss.coef=0.3", "kl.rollout.coef=0.2", "loss.entropy_coef=0.05")
VALUE = ("advantage.type=gae", "loss.value_coef=0.5")
CASES = {
    "ppo": (*TERMS, *VALUE),
    "gspo": ("loss.type=gspo",),
    "exact": ("kl.loss={coef: 0.3, estimator: exact}",),
    "sequence level": ("loss.level=sequence", "loss.aggregation=seq_mean_token_mean"),
    "prompts": ("loss.type=cispo", "loss.aggregation=prompt_mean"),
}


@functools.cache
def gradient_of(options: tuple[str, ...]):
    # Sequences of 11 columns are drawn with trained tokens from the second one on.
    lengths = ("data.max_prompt_length=1", "data.max_completion_length=10")
    drawn = ("rollout.prompts_per_step=10", "optim.share_prompts=false", *lengths)
    config = tiny.config_of(*drawn, *options)
    objective = make_objective(Plan.of(config), tiny.model_of(config))
    return config, jax.jit(jax.value_and_grad(objective, has_aux=True))


def batch_of(drawn: Drawn, seed: int) -> Batch:
    """A prepared batch of drawn sequences; fields hold 1e4 where no token is trained."""
    rng, mask = np.random.default_rng(seed), drawn.completion_mask

    def field(center: float, spread: float) -> np.ndarray:
        return np.where(mask, center + spread * rng.normal(size=mask.shape), 1e4)

    return Batch(
        tokens=drawn.tokens,
        token_mask=drawn.token_mask,
        completion_mask=mask,
        rewards=rng.normal(size=len(mask)),
        group_ids=drawn.groups,
        rollout_log_probs=field(-3.2, 0.1),
        old_log_probs=field(-3.2, 0.3),
        ref_log_probs=field(-3.2, 0.5),
        ref_hidden=rng.normal(size=(*mask.shape, 16)),
        values=field(0, 1),
        advantages=field(0, 1),
        returns=field(0, 1),
    )


@pytest.mark.parametrize("trees", [True, False], ids=["trees", "packed"])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_equal_sequences_one_by_one(case, trees):
    """In float64: trees whose tokens are trained in several sequences, with opinions that differ."""
    with jax.enable_x64(True):
        config, run = gradient_of(CASES[case])
        plan = Plan.of(config)
        state = tiny.wide(tiny.state_of(config, tiny.keep_gradient()).trainable)
        head = {"ref_head": stored_head(tiny.model_of(config), tiny.wide(tiny.host_params()))} if plan.exact_kl else {}
        for seed in range(2):
            drawn = draw_forest(seed, vocab=256, trees=trees)
            assert (drawn.forest.readers.shape[-1] > 1) == trees
            batch = make_weighting(plan)(batch_of(drawn, seed))
            # The states of a shared token are those of its first reader.
            hidden = drawn.forest.gather(drawn.forest.take(batch.ref_hidden))
            batch = jax.tree.map(jnp.asarray, dataclasses.replace(batch, ref_hidden=hidden))
            (loss, metrics), gradient = jax.device_get(run(state, None, batch, coefficients(config), **head))
            forest = jax.tree.map(jnp.asarray, drawn.forest)
            (packed_loss, others), packed = jax.device_get(
                run(state, None, batch, coefficients(config), packed=forest, **head)
            )
            scale = np.sqrt(sum(np.square(x).sum() for x in jax.tree.leaves(gradient)))
            assert scale > 1e-5
            np.testing.assert_allclose(packed_loss, loss, rtol=1e-11)
            chex.assert_trees_all_close(others, metrics, rtol=1e-10, atol=1e-10)
            chex.assert_trees_all_close(packed, gradient, rtol=0, atol=1e-11 * scale)


# ---- rounding ----

# Without clips, at which a rounding would make the loss jump.
SMOOTH = ("loss.type=importance_sampling", "kl.loss={coef: 0.3, estimator: k2, gradient: value}", *TERMS[1:])
DRAWS = 48
"""The loss is off by about one unit in its last place, of which a mean of fewer draws says little."""
FORMS = {
    "trees": (functools.partial(draw_forest, vocab=256), (4, 18, 4)),
    "packed": (functools.partial(draw_forest, vocab=256, trees=False), (4, 18, 1)),
    "groups": (functools.partial(draw_groups, vocab=256), (2, 35, 1)),
}


def draws_of(form: str) -> list[Drawn]:
    """Forests of one shape, so that one program computes all."""
    draw, shape = FORMS[form]
    drawn = [one for one in map(draw, range(5 * DRAWS)) if one.forest.readers.shape == shape][:DRAWS]
    assert len(drawn) == DRAWS
    return drawn


@pytest.mark.parametrize("form", FORMS)
def test_float32_is_as_exact_as_in_sequences_one_by_one(form):
    """The mean distance of loss and gradient from float64 is at most twice that of the sequences one by one."""
    config, run = gradient_of(SMOOTH)
    plan = Plan.of(config)
    state = tiny.state_of(config, tiny.keep_gradient()).trainable

    def rounded(x):
        return np.asarray(x, np.float32 if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype)

    def apart(result, exact) -> float:
        return norm(jax.tree.map(lambda x, y: np.asarray(x, np.float64) - y, result, exact))

    distances: dict[str, list[float]] = {name: [] for name in ("loss", "gradient", "loss of rows", "gradient of rows")}
    for seed, drawn in enumerate(draws_of(form)):
        # Both read the same numbers.
        batch = make_weighting(plan)(jax.tree.map(rounded, batch_of(drawn, seed)))
        with jax.enable_x64(True):
            (loss, _), gradient = jax.device_get(run(tiny.wide(state), None, tiny.wide(batch), coefficients(config)))
        for suffix, forest in (("", drawn.forest), (" of rows", None)):
            (value, _), slope = jax.device_get(run(state, None, batch, coefficients(config), packed=forest))
            distances[f"loss{suffix}"].append(abs(float(value) - loss))
            distances[f"gradient{suffix}"].append(apart(slope, gradient) / norm(gradient))
    means = {name: np.mean(values) for name, values in distances.items()}
    for name in ("loss", "gradient"):
        assert 0 < means[name] <= 2 * means[f"{name} of rows"], means
