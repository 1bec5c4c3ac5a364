"""Statements that hold in a right update whatever its settings, and numbers that a reader can judge."""

from collections.abc import Iterator

import numpy as np

from kljax.tools.parity.advantages import grouped
from kljax.tools.parity.numbers import tokens_of
from kljax.tools.parity.positions import last_positions, shift_rows
from kljax.tools.parity.replay import MissingFields, Replay
from kljax.tools.parity.report import Invariant
from kljax.tools.parity.rounding import UNITS

# Estimators whose advantages sum to 0 in each group.
CENTERED = ("grpo_advantages", "rloo_advantages")
# A mean log-ratio up to which two forward passes of one policy agree, in nats, and in units of the log-probs' rounding.
SAME = 1e-3
UNITS_OF_PASS = 4.0
# The mean size of the log-ratio, in nats, and the distance of its slope from 1, of a sampler that is another policy.
OTHER_SAMPLER = 0.2
OTHER_SLOPE = 0.1
# Tokens from which a slope says something.
MANY = 64


def invariants_of(replay: Replay) -> Iterator[tuple[str, Invariant]]:
    """Yields each invariant that a dump has the arrays for, with the field that it judges."""
    for name, invariants in (
        ("advantages", _sums_of_groups(replay)),
        ("old_log_probs", _old_policy(replay)),
        ("rollout_log_probs", _sampler(replay)),
        ("mask", _shares(replay)),
        ("divisor", _divisor(replay)),
        ("ratio", _ratios(replay)),
    ):
        for invariant in invariants:
            yield name, invariant


def _sums_of_groups(replay: Replay) -> Iterator[Invariant]:
    """The advantages of the rows of a group sum to 0 if an estimator centers them."""
    arrays = replay.arrays
    mask = replay.arrays["mask"]
    call = replay.recipe.calls.get("advantage")
    if not {"advantages", "group_ids"} <= set(arrays) or call is None or call.function not in CENTERED:
        return
    # Advantages of other rows and steps after the comparison, such as a KL, are no deviations from a mean.
    if any(step.function != "broadcast_to_tokens" for step in call.then):
        return
    values = arrays["advantages"]
    if values.ndim > 1:
        values = np.take_along_axis(values, mask.argmax(1)[:, None], 1)[:, 0]
        if not mask.any(1).all() or (mask & (arrays["advantages"] != values[:, None])).any():
            return
    ids, _, complete = grouped(replay)
    sums = np.bincount(ids, values)
    sizes = np.bincount(ids, np.abs(values))
    try:
        bounds = replay.predict("advantages", replay.recipe).bound
        bound = (
            np.bincount(ids, bounds if bounds.ndim == 1 else bounds.max(1)) + replay.unit("loss", replay.recipe) * sizes
        )
    except MissingFields:
        # Without the rewards, how far their mean was rounded is unknown.
        bound = 1e-3 * sizes
    groups = np.unique(ids[complete])
    wrong = groups[np.abs(sums[groups]) > bound[groups]]
    if len(wrong):
        worst = int(wrong[np.argmax(np.abs(sums[wrong]))])
        members = ", ".join(map(str, np.flatnonzero(ids == worst)[:16]))
        text = f"advantages of {len(wrong)} of {len(groups)} groups do not sum to 0; those of rows {members} to"
        yield Invariant(f"{text} {sums[worst]:.3g}: other rows were compared, or centered twice", False)
    elif len(groups):
        yield Invariant(f"advantages sum to 0 in each of {len(groups)} groups", True)


def _distance(replay: Replay, name: str, first: str) -> tuple[float, float, float, float]:
    """Returns mean, mean size and slope of the log-ratio of two policies, and the mean size of the log-probs."""
    mask, policy, other = (replay.arrays[field] for field in ("mask", first, name))
    a = policy[mask]
    b = other[mask]
    deviation = b - b.mean()
    slope = float((deviation * a).sum() / max((deviation**2).sum(), 1e-30))
    return float((a - b).mean()), float(np.abs(a - b).mean()), slope, float(np.abs(b).mean())


def _old_policy(replay: Replay) -> Iterator[Invariant]:
    """At the first update of a batch the old policy is the policy."""
    if not {"first_log_probs", "old_log_probs"} <= set(replay.arrays) or not replay.arrays["mask"].any():
        return
    mean, size, slope, scale = _distance(replay, "old_log_probs", "first_log_probs")
    forward = replay.recipe.log_probs.forward or replay.dtype
    text = f"old_log_probs: mean log-ratio of the policy at the first update {mean:.3g}, mean size {size:.3g} nats"
    if size <= max(SAME, UNITS_OF_PASS * UNITS[forward] * (1 + scale)):
        yield Invariant(text, True)
        return
    mask, first, old = (replay.arrays[name] for name in ("mask", "first_log_probs", "old_log_probs"))
    inner = mask & shift_rows(mask, 1) & shift_rows(mask, -1)
    reason = "other tokens, temperature or weights"
    for by, where in ((1, "right"), (-1, "left")):
        distance = np.abs(shift_rows(first, by) - old)[inner]
        if distance.size >= 4 and distance.mean() <= 0.1 * np.abs(old[inner]).mean():
            reason = f"they are moved by one position to the {where}"
    yield Invariant(f"{text}, slope {slope:.3g}; it is 0: {reason}", False)


def _sampler(replay: Replay) -> Iterator[Invariant]:
    """The sampler is nearly the policy of the first update."""
    first = next((name for name in ("first_log_probs", "old_log_probs") if name in replay.arrays), "log_probs")
    if "rollout_log_probs" not in replay.arrays or not replay.arrays["mask"].any():
        return
    mean, size, slope, _ = _distance(replay, "rollout_log_probs", first)
    title = {"first_log_probs": "the policy at the first update"}.get(first, first)
    text = f"rollout_log_probs: mean log-ratio of {title} {mean:.3g}, mean size {size:.3g} nats, slope {slope:.3g}"
    far = size > OTHER_SAMPLER or (abs(slope - 1) > OTHER_SLOPE and replay.arrays["mask"].sum() >= MANY)
    fresh = first == "first_log_probs"
    hint = ": the sampler has other tokens, positions, temperature or weights" if far and fresh else ""
    yield Invariant(text + hint, not far if fresh else None)


def _shares(replay: Replay) -> Iterator[Invariant]:
    """The share of trained tokens by position; an end-of-sequence token behind the mask is left untrained."""
    arrays = replay.arrays
    mask = replay.arrays["mask"]
    layout = replay.layout
    rows = np.asarray(mask.any(1))
    if not rows.any():
        return
    if {"prompt_lengths", "lengths"} <= set(arrays):
        completions = layout.completions(mask.shape[1])
        some = rows & completions.any(1)
        last = completions & (np.arange(mask.shape[1]) == layout.lengths[:, None] - 1)
        groups = {
            "first tokens": completions & (np.arange(mask.shape[1]) == layout.prompts[:, None]),
            "last tokens": last & layout.complete[:, None],
            "last tokens of rows cut at the limit": last & ~layout.complete[:, None],
            "answers of tools": completions & layout.tools if layout.tools is not None else np.zeros_like(mask),
            "prompt and padding": ~completions,
        }
        counts = {name: (int((mask & group)[some].sum()), int(group[some].sum())) for name, group in groups.items()}
        shares = ", ".join(f"{inside} of {total} {name}" for name, (inside, total) in counts.items() if total)
        yield Invariant(f"trained: {shares}; {int((~rows).sum())} of {len(rows)} rows have no trained token")
        return
    if "tokens" not in arrays or not (eos := replay.dump.header.get("eos_id")):
        return
    behind = np.minimum(last_positions(mask) + 1, mask.shape[1] - 1)
    ends = np.isin(arrays["tokens"], eos if isinstance(eos, list) else [eos])
    trained = (ends & mask).any(1)
    untrained = np.asarray(rows & ~trained & (ends & ~mask)[np.arange(len(mask)), behind])
    if untrained.any():
        text = f"the end-of-sequence token behind the trained tokens is not trained in {int(untrained.sum())}"
        yield Invariant(f"{text} of {int(rows.sum())} rows", False)


def _divisor(replay: Replay) -> Iterator[Invariant]:
    """A system's count of tokens is the number of trained tokens."""
    if "divisor" not in replay.arrays:
        return
    reduction = replay.recipe.reduction
    tokens = int(replay.arrays["mask"].sum())
    count = float(replay.arrays["divisor"])
    if reduction.share != 1:
        yield Invariant(f"divisor: {count:g} tokens of a larger batch; {tokens} are trained here")
    elif count == max(tokens, 1):
        yield Invariant(f"divisor: {count:g}, the number of trained tokens", True)
    else:
        more = tokens_of(replay, round(count)) if count == round(count) else ""
        text = f"divisor: the system counted {count:g} tokens, and {tokens} are trained{more}"
        yield Invariant(text, False if reduction.mode == "token_mean" else None)


def _ratios(replay: Replay) -> Iterator[Invariant]:
    """Ratios that are all 1 show no clip, no cap and no old policy."""
    arrays = replay.arrays
    mask = replay.arrays["mask"]
    if "loss" not in replay.recipe.calls:
        return
    if "old_log_probs" not in arrays:
        yield Invariant("old_log_probs are not recorded: the policy is its own old policy, and every ratio is 1")
    elif mask.any() and np.array_equal(arrays["log_probs"][mask], arrays["old_log_probs"][mask]):
        yield Invariant("every ratio is 1, which hides clips, caps and the old policy: record the second update")
