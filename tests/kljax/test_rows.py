"""Packed rows: every statistic of a segment is that of the same sequence in a row of its own."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from kljax import rows
from kljax.typing import Mask
from tests.kljax import calls

# Masks of the sequences: holes, no token at all, a single one, every one, padding within a sequence.
SEQUENCES = [[0, 1, 0, 1, 1], [0, 0, 0], [1], [1, 1, 1], [0, 0, 1, 0, 0], [1, 0, 1]]
# Which of them share a row; a gap is padding between two segments.
GAP = None
PACKED = [[0, 1, GAP, 2], [3, 4, GAP], [GAP, 5]]
LENGTH = 10
PROMPTS = np.array([0, 0, 1, 2, 1, 0])
EXACT = {"rtol": 1e-12, "atol": 1e-14}


def packed(parts: list[np.ndarray], fill: Any = 0) -> jax.Array:
    """Lays `[n_i]` arrays out as `PACKED` says."""
    out = np.full((len(PACKED), LENGTH), fill, parts[0].dtype)
    for row, members in enumerate(PACKED):
        start = 0
        for member in members:
            if member is not GAP:
                out[row, start : start + len(parts[member])] = parts[member]
            start += 1 if member is GAP else len(parts[member])
    return jnp.asarray(out)


def padded(parts: list[np.ndarray]) -> jax.Array:
    """Lays `[n_i]` arrays out as one row each."""
    return jnp.asarray(np.stack([np.pad(part, (0, LENGTH - len(part))) for part in parts]))


def unpacked(tokens: jax.Array) -> list[np.ndarray]:
    """The `[n_i]` parts of an array in packed rows."""
    places = packed([np.full(len(mask), number) for number, mask in enumerate(SEQUENCES)], -1)
    return [np.asarray(tokens)[np.asarray(places) == number] for number in range(len(SEQUENCES))]


def in_segments(mask: jax.Array) -> kljax.Segments:
    """A mask of packed rows with the sequences in them."""
    return kljax.Segments(mask, segment_ids())


def segment_ids() -> jax.Array:
    """Numbered from 0 in every row; gaps and the rest of the row belong to none."""
    inner = {member: index for members in PACKED for index, member in enumerate(members) if member is not GAP}
    return packed([np.full(len(mask), inner[number]) for number, mask in enumerate(SEQUENCES)], -1)


MASKS = [np.array(mask, bool) for mask in SEQUENCES]


def draw(seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=len(mask)) for mask in SEQUENCES]


def test_layout_matches_its_description() -> None:
    np.testing.assert_array_equal(segment_ids()[0], [0, 0, 0, 0, 0, 1, 1, 1, -1, 3])
    chosen = [mask.astype(int) for mask in MASKS]
    for part, mask in zip(unpacked(packed(chosen)), chosen, strict=True):
        np.testing.assert_array_equal(part, mask)


STATISTICS: dict[str, Callable[..., jax.Array]] = {
    "sum": rows.row_sum,
    "count": lambda values, mask: rows.row_count(mask),
    "any": lambda values, mask: rows.row_any(mask),
    "mean": rows.row_mean,
    "max": functools.partial(rows.row_max, initial=-jnp.inf),
}


@pytest.mark.parametrize("name", STATISTICS)
def test_segment_statistic_equals_its_sequence_statistic(name: str) -> None:
    ids, statistic = segment_ids(), jax.jit(STATISTICS[name])
    full = np.where(ids >= 0, packed(draw(0)), np.nan)
    per_segment = statistic(full, in_segments(packed(MASKS)))
    assert per_segment.shape == (len(PACKED), LENGTH)
    parts = unpacked(rows.to_tokens(per_segment, in_segments(packed(MASKS))))
    for part, values, mask in zip(parts, draw(0), MASKS, strict=True):
        expected = statistic(values, mask)
        assert (expected.dtype, expected.shape) == (per_segment.dtype, (1,))
        np.testing.assert_allclose(part, np.broadcast_to(expected, part.shape), **EXACT)


@pytest.mark.parametrize("name", ["last", "cumsum"])
def test_marks_and_running_sums_stay_within_their_segment(name: str) -> None:
    @jax.jit
    def of(values: jax.Array, mask: Mask) -> jax.Array:
        return rows.row_last(mask) if name == "last" else rows.row_cumsum(kljax.masked(values, mask), mask)

    parts = unpacked(of(packed(draw(0)), in_segments(packed(MASKS))))
    for part, values, mask in zip(parts, draw(0), MASKS, strict=True):
        np.testing.assert_allclose(part, of(values, mask), **EXACT)


def test_first_segment_token_is_a_row_position() -> None:
    ids, mask = segment_ids(), packed(MASKS)
    first = rows.to_tokens(rows.row_first(in_segments(mask)), in_segments(mask))
    for row, own_ids, own_mask in zip(first, ids, mask, strict=True):
        for segment in set(np.asarray(own_ids)[np.asarray(own_mask)]):
            inside = np.asarray(own_ids) == segment
            expected = np.argmax(np.asarray(own_mask) & inside)
            np.testing.assert_array_equal(np.asarray(row)[inside], expected)


def check_per_sequence(function: Callable[..., Any], arrays: list[list[np.ndarray]]) -> None:
    """Checks values and gradients of `function(*arrays, mask)` against each sequence by itself, without padding."""

    @jax.jit
    def value_and_grads(*arrays: jax.Array, mask: Mask) -> Any:
        def per_token(*arrays: jax.Array) -> Any:
            # A number of a row by itself is given to its tokens.
            return jax.tree.map(
                lambda leaf: kljax.masked(jnp.broadcast_to(leaf, arrays[0].shape), mask), function(*arrays, mask)
            )

        value, pull = jax.vjp(per_token, *arrays)
        return value, pull(jax.tree.map(jnp.ones_like, value))

    together = value_and_grads(*map(packed, arrays), mask=in_segments(packed(MASKS)))
    for leaf in jax.tree.leaves(together):
        np.testing.assert_array_equal(np.asarray(leaf)[np.asarray(segment_ids()) < 0], 0)
    of_sequences = [unpacked(leaf) for leaf in jax.tree.leaves(together)]
    for number, mask in enumerate(MASKS):
        alone = value_and_grads(*(jnp.asarray(array[number]) for array in arrays), mask=jnp.asarray(mask))
        for part, expected in zip((leaf[number] for leaf in of_sequences), jax.tree.leaves(alone), strict=True):
            np.testing.assert_allclose(part, expected, **EXACT)


@pytest.mark.parametrize("function", [kljax.sequence_ratios, kljax.geometric_ratios])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_ratios(function: Callable[..., Any], clip: float | None) -> None:
    check_per_sequence(functools.partial(function, log_ratio_clip=clip), [draw(0), draw(1)])


@pytest.mark.parametrize("rule", ["skip", "reset", "zero"])
def test_returns(rule: str) -> None:
    returns = functools.partial(kljax.reinforce_plus_plus_returns, gamma=0.9, masked_tokens=rule)
    check_per_sequence(returns, [draw(0)])


@pytest.mark.parametrize("rule", ["skip", "zero", "none"])
def test_advantages(rule: str) -> None:
    check_per_sequence(functools.partial(kljax.gae, gamma=0.9, lam=0.8, masked_tokens=rule), [draw(0), draw(1)])


def test_last_tokens() -> None:
    last = unpacked(kljax.last_token_mask(in_segments(packed(MASKS))))
    for part, mask in zip(last, MASKS, strict=True):
        np.testing.assert_array_equal(part, kljax.last_token_mask(jnp.asarray(mask)))


MODES: dict[str, dict[str, Any]] = {
    "token_mean": {},
    "token_sum": {},
    "seq_mean_token_sum": {},
    "seq_mean_token_mean": {},
    "seq_mean_token_sum_norm": {"max_length": 7.0},
    "prompt_mean": {"num_groups": 4},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("empty_rows", ["drop", "count"])
@pytest.mark.parametrize("denominator", [None, 3.0])
def test_token_weights(mode: str, empty_rows: str, denominator: float | None) -> None:
    if mode == "token_sum" and denominator is not None:
        pytest.skip("divides by 1")
    options = {**MODES[mode], "mode": mode, "empty_rows": empty_rows, "denominator": denominator}
    per_token = packed([np.full(len(mask), prompt) for mask, prompt in zip(MASKS, PROMPTS, strict=True)], -1)
    prompts = ({"group_ids": jnp.asarray(PROMPTS)}, {"group_ids": per_token}) if mode == "prompt_mean" else ({}, {})
    alone = kljax.token_weights(padded(MASKS), **options, **prompts[0])
    together = kljax.token_weights(in_segments(packed(MASKS)), **options, **prompts[1])
    assert together.dtype == alone.dtype
    for part, expected in zip(unpacked(together), alone, strict=True):
        np.testing.assert_allclose(part, expected[: len(part)], **EXACT)
    np.testing.assert_allclose(together.sum(), alone.sum(), **EXACT)
    total = kljax.aggregate(packed(draw(0)), in_segments(packed(MASKS)), **options, **prompts[1])
    expected = kljax.aggregate(padded(draw(0)), padded(MASKS), **options, **prompts[0])
    np.testing.assert_allclose(total, expected, **EXACT)


def test_segments_are_checked() -> None:
    mask = jnp.ones((2, 3), bool)
    for ids, wrong in {
        "T": ([[0, 0, 0], [0, 1, 3]], "segments.ids: got 3, expected ids below T = 3"),
        "run": ([[0, 0, 0], [0, 1, 0]], r"segments.ids: got \[0, 1, 0\], expected each id in one run"),
        "gap": ([[0, 0, 0], [1, -1, 1]], r"segments.ids: got \[1, -1, 1\], expected each id in one run"),
        "shape": ([0, 0, 0], r"segments.ids: got shape \[3\], expected \[2, 3\] as segments.mask has"),
    }.values():
        with pytest.raises(ValueError, match=wrong):
            kljax.Segments(mask, jnp.asarray(ids))
    with pytest.raises(TypeError, match=r"segments\.ids: got dtype float64, expected an integer type"):
        kljax.Segments(mask, jnp.zeros((2, 3)))
    with pytest.raises(TypeError, match=r"mask.mask: got dtype float64, expected bool"):
        kljax.last_token_mask(kljax.Segments(jnp.ones((2, 3)), jnp.zeros((2, 3), int)))
    chosen = kljax.last_token_mask(kljax.Segments(mask, jnp.asarray([[-1, -1, 0], [1, 1, 0]])))
    np.testing.assert_array_equal(chosen, [[False, False, True], [False, True, True]])


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.uint32])
def test_narrow_segment_ids_number_long_rows(dtype: type) -> None:
    ids = np.repeat(np.arange(2), [120, 80])[None]
    mask, rewards = jnp.ones(ids.shape, bool), jnp.asarray(ids, float)

    def results(ids: np.ndarray) -> tuple[jax.Array, jax.Array]:
        packed = kljax.Segments(mask, ids)
        weights = kljax.token_weights(packed, mode="seq_mean_token_mean")
        return weights, kljax.opo_advantages(rewards, 0 * ids, packed, num_groups=1)

    jax.tree.map(np.testing.assert_array_equal, results(ids.astype(dtype)), results(ids))


def test_invalid_traced_id_gives_nan() -> None:
    ids = jnp.array([[0, 5, 5]])
    mask = jnp.ones((1, 3), bool)
    ratios = jax.jit(lambda ids: kljax.sequence_ratios(*jnp.ones((2, 1, 3)), kljax.Segments(mask, ids)))
    np.testing.assert_array_equal(ratios(ids), [[1, np.nan, np.nan]])


def test_segments_are_a_pytree_of_anything() -> None:
    packed = kljax.Segments(jnp.ones((2, 3), bool), jnp.zeros((2, 3), int))
    assert [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(packed)] == [".mask", ".ids"]
    # Cotangents of integers have no ids, and a spec is none.
    assert jax.tree.map(lambda leaf: np.zeros(leaf.shape), packed).shape == (2, 3)
    spec = jax.sharding.PartitionSpec("rows")
    assert kljax.Segments(spec, spec).ids == spec


# How to call each function of `test_packed_rows_are_separate_rows`; its arrays are those of its signature.
CLIPS = {"clip_low": 0.2, "clip_high": 0.3}
CASES: dict[str, list[dict[str, Any]]] = {
    "importance_weights": [
        {"level": "sequence", "mode": "mask", "lower": 0.2, "upper": 2.0},
        {"level": "geometric", "mode": "clip", "lower": 0.8, "upper": 1.5},
        {"level": "geometric", "upper": 1.5, "normalize": "rows"},
        {"level": "sequence", "upper": 1.5, "normalize": "tokens"},
        {"level": "token", "upper": 1.5, "normalize": "rows"},
    ],
    "truncated_importance_weights": [{"level": "sequence"}],
    "rejection_mask": [{"level": level, "lower": 0.6, "upper": 1.6} for level in ("token", "sequence", "geometric")],
    "max_lag_mask": [{"max_lag": 1, "level": level} for level in ("token", "sequence")],
    "veto_mask": [{"min_ratio": 0.4, "max_ratio": 4.0}],
    "kl_rejection_mask": [{"reduction": name, "lower": -0.5, "upper": 0.5} for name in ("token", "sum", "mean", "max")],
    "divergence_mask": [{"level": "sequence", "max_divergence": 0.3}],
    "off_policy_sequence_mask": [{"max_kl": 0.1}],
    "ppo_clip_loss": [{"level": level} for level in ("token", "sequence", "geometric", "average", "geometric_average")],
    "gspo_loss": [{**CLIPS, "gradient": "token"}, {**CLIPS, "gradient": "sequence"}],
    "cispo_loss": [{"level": "geometric"}],
    "sapo_loss": [{"level": "sequence"}],
    "gmpo_loss": [{}],
    "vespo_loss": [{}, {"weights": True}],
    "rec_loss": [{"clip_mode": "gspo_one_side", "weight": "gspo_importance_sampling"}],
    "dpo_loss": [{}],
    "a2po_loss": [{"coef": 0.3}],
    "gvpo_loss": [{"num_groups": 3, "coef": 0.3}],
    "flowrl_loss": [{"num_groups": 3}],
    "clipped_tokens": [{"level": "geometric"}],
    "clip_fraction": [{"level": "geometric"}],
    "dual_clip_fraction": [{"level": "geometric", "dual_clip": 1.1}],
    "ratio_fraction": [{"level": "geometric", "lower": 0.8}],
    "mean_metric": [
        {"mode": mode} for mode in ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_max")
    ],
    "masked_fraction": [{"mode": "seq_mean_token_max"}],
    "mean_by_position": [{"num_buckets": 4}],
    "log_prob_diff_extremes": [{"level": "sequence"}],
    "ratio_quantiles": [{"level": "sequence"}],
    "ppo_kl": [{"mode": "seq_mean_token_sum"}],
    "reference_kl": [{"mode": "seq_mean_token_sum"}],
    "rollout_kl": [{"mode": "seq_mean_token_sum"}],
    "log_prob_abs_diff": [{"mode": "seq_mean_token_mean"}],
    "log_prob_squared_diff": [{"mode": "seq_mean_token_mean"}],
    "chi_squared": [{"level": "sequence"}],
    "kl_by_position": [{"num_buckets": 4}],
    "perplexity": [{}],
    "log_perplexity": [{}],
    "log_perplexity_diff": [{}, {"absolute": True}],
    "perplexity_ratio": [{}],
    "place_rewards": [{}],
    "subtract_kl": [{"coef": 0.3}],
    "kl_shaped_rewards": [{"coef": 0.3}],
    "remax_advantages": [{}],
    "iw_opd_advantages": [{}],
    "topd_advantages": [{"num_groups": 3, "alpha": 0.4}],
    "correct_rollout": [{"steps": (functools.partial(kljax.rejection_mask, level="geometric", upper=1.2),)}],
    "opo_advantages": [{"num_groups": 3}, {"num_groups": 3, "singleton": "reward", "valid": True}],
    "otb_advantages": [
        {"num_groups": 3, "align": align, "zero_tail": zero_tail, "singleton": "reward", "valid": valid}
        for align, zero_tail, valid in (("token", True, None), ("position", False, True), ("position", True, None))
    ],
}
# Of one number per sequence: `[N]` of separate rows, `[..., T]` of packed ones.
PLACES_ZEROS = "distillation_rewards"  # a reward of 0 at the last token of each sequence
MASKED = calls.masked_functions()
OF_SEQUENCES = ("scores", "rewards", "baselines", "group_ids", "valid")
OWN_TESTS = {
    *("last_token_mask", "sequence_ratios", "geometric_ratios", "gae", "reinforce_plus_plus_returns"),
    *("token_weights", "aggregate", "broadcast_to_tokens"),
}


def drawn(name: str, seed: int) -> list[np.ndarray]:
    """The parts of an array by the name of its parameter, one for each sequence."""
    fixed = {
        "group_ids": [np.full(len(mask), prompt) for mask, prompt in zip(MASKS, PROMPTS, strict=True)],
        "valid": [np.full(len(mask), number != 3) for number, mask in enumerate(MASKS)],
        "kept": [part > 0 for part in draw(seed)],
        "rejected_mask": [~mask for mask in MASKS],
        "weights": [np.exp(part) for part in draw(seed)],
    }
    per_row = [np.full_like(part, part[0]) for part in draw(seed)]
    return fixed.get(name, per_row if name in OF_SEQUENCES else draw(seed))


def in_own_rows(name: str, parts: list[np.ndarray]) -> jax.Array:
    return jnp.asarray(np.stack([part[0] for part in parts])) if name in OF_SEQUENCES else padded(parts)


def in_packed_rows(parts: list[np.ndarray]) -> jax.Array:
    """Outside of every segment lies what must not matter: a NaN, a mask that is set."""
    return packed(parts, {"f": np.nan, "b": True}.get(parts[0].dtype.kind, 0))


@pytest.mark.parametrize("name", CASES)
def test_packed_rows_are_separate_rows(name: str) -> None:
    signature = inspect.signature(getattr(kljax, name)).parameters
    listed = [key for key, about in signature.items() if about.default is about.empty and key not in CASES[name][0]]
    optional = {key for case in CASES[name] for key in ("weights", "valid") if case.get(key)}
    arrays = {key: drawn(key, seed) for seed, key in enumerate([*listed, *sorted(optional)]) if key != "mask"}
    floats = [key for key, parts in arrays.items() if parts[0].dtype.kind == "f"]
    cotangent = draw(99)

    def value_and_grads(given: dict[str, Any], cotangent: jax.Array) -> list[Any]:
        def run(case: dict[str, Any]) -> Any:
            options = {key: value for key, value in case.items() if key not in optional}
            used = {key: value for key, value in given.items() if key not in optional or case.get(key)}
            data = {key: value for key, value in used.items() if key not in floats}
            if "group_ids" in data:
                data["group_ids"] = kljax.Groups(data["group_ids"], options.pop("num_groups"), data.pop("valid", None))

            def values(arrays: dict[str, jax.Array]) -> Any:
                out = getattr(kljax, name)(**arrays, **data, **options)
                return jax.tree.map(lambda leaf: per_token(leaf, given["mask"]), out)

            def total(arrays: dict[str, jax.Array]) -> tuple[jax.Array, Any]:
                out = values(arrays)
                real = [leaf for leaf in jax.tree.leaves(out) if leaf.dtype == jnp.float64]
                return sum(((leaf * cotangent).sum() if leaf.ndim > 1 else leaf.sum()) for leaf in real) + 0.0, out

            return jax.grad(total, has_aux=True)({key: used[key] for key in floats if key in used})

        return [run(case) for case in CASES[name]]

    separate = {key: in_own_rows(key, parts) for key, parts in arrays.items()} | {"mask": padded(MASKS)}
    shared = {key: in_packed_rows(parts) for key, parts in arrays.items()} | {"mask": in_packed_rows(MASKS)}
    shared = {key: in_segments(value) if "mask" in key else value for key, value in shared.items()}

    def run(own: dict[str, jax.Array], shared: dict[str, Any]) -> Any:
        return value_and_grads(own, padded(cotangent)), value_and_grads(shared, packed(cotangent))

    for (grads, out), (packed_grads, packed_out) in zip(*calls.traced_program(run)(separate, shared), strict=True):
        for part, full in zip(jax.tree.leaves(out), jax.tree.leaves(packed_out), strict=True):
            assert (part.dtype, part.ndim) == (full.dtype, full.ndim)
            check_leaf(part, full)
        for key, expected in grads.items():
            if key not in OF_SEQUENCES:
                check_leaf(expected, packed_grads[key])
                continue
            sums = [part.sum() for part in unpacked(packed_grads[key])]
            np.testing.assert_allclose(sums, expected, **EXACT)


def per_token(leaf: jax.Array, mask: jax.Array) -> jax.Array:
    """A number per row is given to its tokens."""
    return jnp.where(mask, leaf[:, None], 0) if leaf.shape == (len(MASKS),) else leaf


def check_leaf(expected: np.ndarray, whole: np.ndarray) -> None:
    """Compares an array of separate rows, or a statistic of all of them, with that of packed rows."""
    if expected.ndim < 2:
        np.testing.assert_allclose(whole, expected, **EXACT)
        return
    np.testing.assert_array_equal(whole[np.asarray(segment_ids()) < 0], 0)
    for part, row in zip(unpacked(whole), expected, strict=True):
        np.testing.assert_allclose(part, row[: len(part)], **EXACT)


def test_every_function_accepting_segments_is_compared() -> None:
    assert {name for name in calls.public_functions() if calls.takes_segments(name)} == CASES.keys() | OWN_TESTS


@pytest.mark.parametrize("name", sorted(set(MASKED) - CASES.keys() - OWN_TESTS))
def test_segments_are_a_mask_to_every_other_function(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, mask, reductions = calls.calls_of(name)[0], calls.mask_name(name), []
    monkeypatch.setattr(rows, "segment_ids", reductions.append)
    ids = jnp.broadcast_to(jnp.arange(calls.LENGTH) // 6 - 1, call.data[mask].shape)

    def both(arrays: Any, data: Any) -> Any:
        alone = {**data, mask: data[mask] & (ids >= 0)}
        return call(arrays, {**data, mask: kljax.Segments(data[mask], ids)}), call(arrays, alone)

    jax.tree.map(np.testing.assert_array_equal, *calls.traced_program(both)(call.arrays, call.data))
    # A statistic of sequences says so in its docstring, and is compared above.
    assert not reductions or name == PLACES_ZEROS


def test_advantages_of_segments_are_given_to_their_tokens() -> None:
    def to_tokens(advantages: jax.Array) -> jax.Array:
        return kljax.broadcast_to_tokens(advantages, in_segments(in_packed_rows(MASKS)))

    numbers = jnp.arange(12.0).reshape(3, 4)
    tokens, pull = jax.vjp(to_tokens, numbers)
    ids = np.asarray(segment_ids())
    chosen = np.asarray(packed(MASKS)) & (ids >= 0)
    expected = np.take_along_axis(np.asarray(numbers), np.maximum(ids, 0), 1)
    np.testing.assert_array_equal(tokens, np.where(chosen, expected, 0))
    counts = [[(chosen[row] & (ids[row] == number)).sum() for number in range(4)] for row in range(3)]
    np.testing.assert_array_equal(pull(jnp.ones_like(tokens))[0], counts)
    for shape in ((3,), (2, 4)):
        with pytest.raises(ValueError, match=r"advantages: got shape .*, expected \[3, S\], one per segment"):
            to_tokens(jnp.ones(shape))


def test_functions_needing_token_arrays_say_so() -> None:
    mask, scores = kljax.Segments(jnp.ones((2, 3), bool), jnp.zeros((2, 3), int)), jnp.ones(2)
    with pytest.raises(ValueError, match=r"scores: got shape \[2\], expected \[2, 3\]: with kljax.Segments each"):
        kljax.place_rewards(scores, mask)
    for function in (
        lambda: kljax.remax_advantages(jnp.ones((2, 3)), scores, mask),
        lambda: kljax.opo_advantages(scores, jnp.zeros(2, int), mask, num_groups=1),
        lambda: kljax.otb_advantages(*jnp.ones((3, 2, 3)), mask, jnp.zeros(2, int), num_groups=1),
    ):
        with pytest.raises(ValueError, match="shapes differ"):
            function()
    pairs = dict.fromkeys(("rejected_log_probs", "rejected_ref_log_probs"), jnp.ones((2, 3)))
    with pytest.raises(ValueError, match=r"mask, rejected_mask: got kljax\.Segments for one of the two"):
        kljax.dpo_loss(*jnp.ones((2, 2, 3)), mask, **pairs, rejected_mask=mask.mask)
