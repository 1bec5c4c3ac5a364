"""The benchmark of long tails: the same tokens both ways, and steps that only the queue saves. No time is looked at."""

import json

import numpy as np
import pytest

from benchmarks.suites.model import long_tail
from train.rollouts.sampler import Samples

TAIL = long_tail.Tail(rows=8, slots=2, group=2, prompt_length=4, max_new_tokens=12, median=3.0, vocab=32, layers=1)


def test_queue_saves_the_steps_of_the_longest_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(long_tail, "TAIL", TAIL)
    assert long_tail.main(["--rounds", "1", "--json", str(tmp_path / "found.json")]) == 0
    recorded = json.loads((tmp_path / "found.json").read_text())
    lengths = TAIL.lengths()
    assert lengths.min() >= 1
    assert lengths.max() <= TAIL.max_new_tokens
    longest = [lengths[first : first + TAIL.slots].max() for first in range(0, TAIL.rows, TAIL.slots)]
    assert recorded["static"]["steps"] == sum(longest) - len(longest)
    assert recorded["continuous"]["steps"] < recorded["static"]["steps"]
    for name in ("continuous", "static"):
        rounds = recorded[name]["steps"] + (1 if name == "continuous" else len(longest))
        assert recorded[name]["occupancy"] == pytest.approx(lengths.sum() / (rounds * TAIL.slots))
    assert set(recorded["gain"]) == {"tokens_per_second", "tokens_per_cpu_second"}


def test_differing_ways_are_an_error(monkeypatch):
    def of(token: int) -> Samples:
        full = np.full((2, 3), token)
        return Samples(full, full > 0, full > 0, np.ones(2, bool), {"log_probs": full * -1.0})

    programs = {"continuous": lambda: [of(1)], "static": lambda: [of(2)]}
    monkeypatch.setattr(long_tail, "programs_of", lambda tail: programs)
    with pytest.raises(RuntimeError, match="differ"):
        long_tail.measure(TAIL, 0)
