"""Sums that a tool computes, with demonstrations: the task and the environment of `tests.round_trip.episodes`."""

import json

from train.data.tasks import Example, Task

PROBLEMS = ("1+2", "4+3", "2+2", "5+4")


class Adder:
    """Has one tool."""

    def reset(self, answer: str) -> None:
        """Begins an episode."""
        self.answer = answer

    def add(self, a: int, b: int) -> str:
        """Adds."""
        return str(a + b)

    def reward(self, text: str) -> float:
        """1 for the right answer."""
        return float(text == self.answer)


def task() -> Task:
    """Makes the task: the same problems for training and evaluation."""
    examples = [_demonstrate(problem) for problem in PROBLEMS]
    return Task("sums", examples, examples, lambda example, text, _: {"reward": float(text == example.answer)})


def _demonstrate(problem: str) -> Example:
    a, b = map(int, problem.split("+"))
    call = json.dumps({"name": "add", "arguments": {"a": a, "b": b}})
    turns = (("assistant", f"<tool_call>{call}</tool_call>"), ("tool", str(a + b)), ("assistant", str(a + b)))
    return Example(problem, str(a + b), str(a + b), messages=(("user", problem),), demonstration=turns)
