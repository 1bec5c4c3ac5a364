"""The processes that run the agent program of a config."""

import json
import threading
from collections.abc import Sequence
from typing import Any

from train.config.errors import UserError
from train.config.rollout import EndpointSourceSection
from train.config.user_functions import failure
from train.data.workers.process import START_SECONDS, NoAnswer, TooLate, WorkerProcess
from train.rollouts.endpoint.sessions import OpenEpisode, OpenEpisodes, RequestError

GRACE_SECONDS = 30.0
"""How much longer than its episodes a process may take before it is ended."""


class Agents:
    """Worker processes; each runs its share of the episodes of a step."""

    def __init__(self, section: EndpointSourceSection) -> None:
        """Starts the first process.

        Raises:
          UserError: the agent program cannot be imported.
        """
        self._section = section
        self._workers: list[WorkerProcess | None] = [None] * section.processes
        try:
            worker = self._start(0)
            described = worker.ask(None, seconds=START_SECONDS)
        except NoAnswer as error:
            raise UserError(f"rollout.source.agent: got {section.agent!r}, but {error}") from None
        if "error" in described:
            raise UserError(described["error"])

    def _start(self, number: int) -> WorkerProcess:
        chosen = json.dumps({"name": self._section.agent, "arguments": dict(self._section.arguments)})
        worker = self._workers[number]
        if worker is None:
            keys = [name for name in (self._section.api_key_env, self._section.reward_key_env) if name is not None]
            worker = WorkerProcess("agent", chosen, output=True, environment={}, hidden=keys)
            self._workers[number] = worker
        return worker

    def play(
        self, episodes: OpenEpisodes, chosen: Sequence[OpenEpisode], *, base_url: str, model: str, key: str
    ) -> None:
        """Begins to run episodes; each is ended by its result."""
        count = len(self._workers)
        for number in range(count):
            share = chosen[number::count]
            question = {
                "episodes": [{"row": x.row, "api_key": f"{key}:{x.session.name}"} for x in share],
                "base_url": base_url,
                "model": model,
                "concurrency": self._section.concurrency,
                "seconds": self._section.episode_seconds,
            }
            if share:
                arguments = number, episodes, share, question
                threading.Thread(target=self._play_share, args=arguments, daemon=True).start()

    def _play_share(
        self, number: int, episodes: OpenEpisodes, share: Sequence[OpenEpisode], question: dict[str, Any]
    ) -> None:
        rounds = -(-len(share) // self._section.concurrency)
        try:
            worker = self._start(number)
            results = worker.ask(question, seconds=rounds * self._section.episode_seconds + GRACE_SECONDS)
        except NoAnswer as error:
            self._workers[number] = None
            name = "episode_seconds" if isinstance(error, TooLate) else "ended"
            results = [{"failure": (name, str(error))}] * len(share)
        except Exception as error:  # a row that cannot be pickled, or a process that cannot be started
            results = {"error": failure(error)}
        if isinstance(results, dict):
            results = [{"failure": ("exception", results["error"])}] * len(share)
        for episode, result in zip(share, results, strict=True):
            failed = result.get("failure")
            try:
                episodes.end(
                    episode,
                    rewards=result.get("rewards"),
                    failure=None if failed is None else (failed[0], failed[1]),
                )
            except RequestError:
                continue  # its time was over

    def close(self) -> None:
        """Ends the processes."""
        for worker in self._workers:
            if worker is not None:
                worker.close()
        self._workers = [None] * len(self._workers)
