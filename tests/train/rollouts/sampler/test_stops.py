"""Stop strings: against a search of the whole text, whatever the borders between tokens."""

import numpy as np
import pytest

from train.rollouts.sampler import stop_table

VOCABULARY = [
    b"",
    b"a",
    b"b",
    b"ab",
    b"ba",
    b"aab",
    b"\n",
    b"\n\n",
    "é".encode(),
    "é".encode()[:1],
    "é".encode()[1:],
    b"aba",
]


def first_stop(text: list[bytes], stops: list[str]) -> int | None:
    """The token after which the text holds one of the strings, by looking at all of it each time."""
    seen = b""
    for index, piece in enumerate(text):
        seen += piece
        if any(stop.encode() in seen for stop in stops):
            return index
    return None


@pytest.mark.parametrize(
    "stops", [["ab"], ["aba", "bb"], ["\n\n"], ["aé"], ["é", "aabaab"], ["abaab", "baa", "b\n"]], ids=str
)
def test_search_ends_at_the_token_completing_a_string(stops):
    rng, table = np.random.default_rng(0), stop_table(stops, VOCABULARY)
    tokens = rng.integers(0, len(VOCABULARY), (300, 12))
    states, actual = np.zeros(300, np.int32), np.full(300, -1)
    for index in range(12):
        states = np.asarray(table.advance(states, tokens[:, index]))
        actual = np.where((states == table.matched) & (actual < 0), index, actual)
    expected = [first_stop([VOCABULARY[token] for token in row], stops) for row in tokens]
    np.testing.assert_array_equal(actual, [-1 if position is None else position for position in expected])
    assert 0 < (actual >= 0).sum() < 300


def test_states_are_as_many_as_prefixes():
    table = stop_table(["stop", "step"], VOCABULARY)
    assert table.next.shape == (len({"", "s", "st", "sto", "ste"}) + 1, len(VOCABULARY))
    assert stop_table([], VOCABULARY) is None


def test_an_empty_string_would_stop_everything():
    with pytest.raises(ValueError, match="stop: got an empty string"):
        stop_table(["a", ""], VOCABULARY)
