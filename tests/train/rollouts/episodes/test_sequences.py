"""Sequences of turns: every sampled id is trained once, and after the ids that it was sampled after."""

import gzip
import json
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.rollouts.episodes.rows import RowShape, place_sequences
from train.rollouts.episodes.turns import Episode, SampledTurn, make_sequences
from train.sequences.sample import common_length

CASES = json.loads(gzip.decompress((pathlib.Path(__file__).parent / "drift_cases.json.gz").read_bytes()))


def turn(prompt, ids, start=0.0) -> SampledTurn:
    return SampledTurn(prompt, ids, [start - 0.5 * n for n in range(len(ids))], [0] * len(ids))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_drift_of_templates_forks_and_is_never_merged(case):
    prompt, sampled, rendered = case["prompt_ids"], case["sampled_ids"], case["rendered_ids"]
    first = turn(prompt, sampled)
    # The bridge keeps the sampled ids.
    after = case["next_prompt_ids"]
    (sequence,) = make_sequences([first, turn(after, [7, 8])])
    assert sequence.ids == [*after, 7, 8]
    assert [i for i, was in zip(sequence.ids, sequence.trained, strict=True) if was] == [*sampled, 7, 8]
    # What the template renders goes on with the sequence only if it has all of its ids.
    sequences = make_sequences([first, turn(rendered, [7, 8])])
    assert (len(sequences) == 1) == case["tokens_kept"]
    trained = [i for s in sequences for i, was in zip(s.ids, s.trained, strict=True) if was]
    assert trained == [*sampled, 7, 8]
    if not case["tokens_kept"]:
        assert common_length(sequences[0].ids, sequences[1].ids) == case["first_difference"]


def test_cases_are_those_of_five_templates():
    assert len(CASES) == 102
    assert sum(not case["tokens_kept"] for case in CASES) == 63


def test_turn_continues_the_longest_sequence_that_it_extends():
    drawn = [turn([1], [2]), turn([1], [2, 3]), turn([1, 2, 3, 4], [5])]
    assert [(s.ids, s.trained) for s in make_sequences(drawn)] == [
        ([1, 2], [False, True]),
        ([1, 2, 3, 4, 5], [False, True, True, False, True]),
    ]


@pytest.mark.parametrize(("last_only", "kept"), [(False, [[1, 2], [3, 4]]), (True, [[3, 4]])])
def test_held_out_episode_that_forked_has_its_last_sequence(last_only, kept):
    shape = RowShape(2, 6, 0, samples=2, fork_rows=0 if last_only else 1, last_only=last_only)
    episodes = [Episode([turn([1], [2]), turn([3], [4])]) for _ in range(shape.episodes)]
    rows = place_sequences(episodes, shape)
    assert [row[1].ids for row in rows if row is not None] == kept * shape.episodes


small = st.lists(st.integers(0, 3), min_size=1, max_size=4)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3), small, small), min_size=1, max_size=6))
def test_each_sampled_id_is_trained_once_after_its_prompt(steps):
    turns: list[SampledTurn] = []
    for goes_on, number, observed, sampled in steps:
        earlier = turns[number % len(turns)] if turns else None
        prompt = [*earlier.prompt_ids, *earlier.ids, *observed] if goes_on and earlier else observed
        turns.append(turn(prompt, sampled, -len(turns)))
    sequences = make_sequences(turns)
    trained = sorted(
        (log_prob, token)
        for s in sequences
        for token, was, log_prob in zip(s.ids, s.trained, s.fields["rollout_log_probs"], strict=True)
        if was
    )
    assert trained == sorted(pair for t in turns for pair in zip(t.rollout_log_probs, t.ids, strict=True))
    for each in turns:
        whole = [*each.prompt_ids, *each.ids]
        start = len(each.prompt_ids)
        assert any(
            s.ids[: len(whole)] == whole
            and all(s.trained[start : len(whole)])
            and s.fields["rollout_log_probs"][start] == each.rollout_log_probs[0]
            for s in sequences
        )


@pytest.mark.parametrize(
    "wrong", [SampledTurn([1], [2], [], [0]), SampledTurn([1], [2], [0.0], []), SampledTurn([], [2], [0.0], [0])]
)
def test_turn_without_its_log_probs_is_refused(wrong):
    with pytest.raises(ValueError, match=r"^turn 1: got \d prompt ids, 1 ids, \d log-probs and \d versions, expected"):
        make_sequences([turn([1], [2]), wrong])
