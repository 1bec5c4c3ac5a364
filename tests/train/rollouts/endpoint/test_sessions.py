"""Sessions: no two tokens of a session are drawn with one number."""

import numpy as np

from train.rollouts.endpoint.generator import RequestedTurn
from train.rollouts.endpoint.sessions import SequenceLengths, Session
from train.rollouts.engine import Turn


def test_draws_that_end_out_of_order_leave_their_numbers_used():
    key = np.zeros(2, np.uint32)
    session = Session("agent", key, SequenceLengths(8, 8))

    def begin() -> RequestedTurn:
        draw = RequestedTurn(Turn([1], 4, key), (), lambda first, last: "", lambda: None)
        session.begin([draw])
        return draw

    first = begin()
    second = begin()
    assert (first.turn.first, second.turn.first) == (0, 4)
    second.count = 4
    session.end([second])
    first.count = 2
    session.end([first])
    assert begin().turn.first == 8
