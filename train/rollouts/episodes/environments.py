"""Environments in worker processes: an episode stays in its process, which loses its own episodes alone if it hangs."""

import json
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from train.config.environment import EnvironmentSection
from train.config.errors import UserError
from train.data.workers.process import START_SECONDS, NoAnswer, TooLate, WorkerProcess

START = "step_seconds", START_SECONDS
"""The limit of the first answer of a process, and the name of a failure beyond it."""
Answer = dict[str, Any]
"""What the worker module `environment` answers; or a `failure`, its name and text."""


class Environments:
    """The worker processes of an environment.

    Attributes:
      form: `text`, or `tools`.
      tools: the JSON schemas of the tools.
      has_scores: whether it scores the state after a turn.
      call_seconds: time of the last call of each episode.
    """

    def __init__(self, section: EnvironmentSection, clock: Callable[[], float] = time.monotonic) -> None:
        """Starts a process.

        Args:
          section: of the config.
          clock: the time in seconds.

        Raises:
          UserError: the class cannot be imported, or is no environment.
        """
        self._section = section
        self._clock = clock
        self.call_seconds: dict[int, float] = {}
        self._workers: list[WorkerProcess | None] = [None] * section.processes
        self._started: list[set[int]] = [set() for _ in range(section.processes)]
        described = self._ask(0, None, *START)
        if "form" not in described:
            problem = described.get("error") or ": ".join(described["failure"])
            raise UserError(f"environment.name: got {section.name!r}, but {problem}")
        self.form = described["form"]
        self.tools = described["tools"]
        self.has_scores = described["has_scores"]

    def answer(self, questions: Sequence[dict[str, Any]]) -> list[Answer]:
        """Asks each episode's own process, all processes at once; returns the answers in the order of the questions."""
        by_process: dict[int, list[int]] = defaultdict(list)
        for number, question in enumerate(questions):
            by_process[question["episode"] % len(self._workers)].append(number)
        answers: list[Answer] = [{}] * len(questions)

        def ask(process: int) -> None:
            for number in by_process[process]:
                answers[number] = self._answer(process, questions[number])

        if len(by_process) <= 1:
            for process in by_process:
                ask(process)
        else:
            with ThreadPoolExecutor(len(by_process)) as threads:
                list(threads.map(ask, by_process))
        return answers

    def _answer(self, process: int, question: dict[str, Any]) -> Answer:
        episode = question["episode"]
        self.call_seconds[episode] = 0.0
        started = self._started[process]
        if question["do"] == "reset":
            if self._workers[process] is None:
                first = self._ask(process, None, *START)
                if "failure" in first:
                    return first
            started.add(episode)
        elif episode not in started:
            return {"failure": ("lost", "its process was ended by another episode")}
        began = self._clock()
        answer = self._ask(process, question, *_limit_of(self._section, question["do"]))
        self.call_seconds[episode] = self._clock() - began
        if "error" in answer:
            return {"failure": ("exception", answer["error"])}
        return answer

    def _ask(self, process: int, question: Any, limit: str, seconds: float) -> Answer:
        worker = self._workers[process]
        try:
            if worker is None:
                section = self._section
                chosen = json.dumps({"name": section.name, "arguments": dict(section.arguments)})
                worker = self._workers[process] = WorkerProcess("environment", chosen, output=True, environment={})
            answer: Answer = worker.ask(question, seconds=seconds)
        except NoAnswer as error:
            self._workers[process] = None
            self._started[process].clear()
            return {"failure": (limit if isinstance(error, TooLate) else "ended", str(error))}
        return answer

    def close(self) -> None:
        """Ends the processes."""
        for worker in self._workers:
            if worker is not None:
                worker.close()
        self._workers = [None] * len(self._workers)


def _limit_of(section: EnvironmentSection, do: str) -> tuple[str, float]:
    """Returns the least limit of the time of a call, which may not alone take longer than its turn or episode."""
    limits = {"step_seconds": section.step_seconds}
    if section.episode_seconds is not None:
        limits["episode_seconds"] = section.episode_seconds
    if section.turn_seconds is not None and do in ("call", "step"):
        limits["turn_seconds"] = section.turn_seconds
    return min(limits.items(), key=lambda limit: limit[1])
