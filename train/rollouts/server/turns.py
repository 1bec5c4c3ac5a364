"""Turns of episodes that servers draw: ids in, and ids with log-probs and versions out."""

import collections
from collections.abc import Mapping
from concurrent.futures import Future
from queue import Empty, SimpleQueue

import numpy as np

import kljax
from train.rollouts.engine import Turn
from train.rollouts.server.client import POLL_SECONDS
from train.rollouts.server.source import ServerSource
from train.sequences.sample import Sample
from train.sequences.token_fields import VERSIONS


class ServerTurns:
    """Draws turns on servers, all at once, with the methods of `TurnEngine`; a turn is one request.

    The turns of a session go to one server as long as it is there, whose prefix cache has the ids before them. A turn
    ends whenever its server says so, so that another run of the same seed has other tokens.

    Attributes:
      count: `sampled` tokens.
      greedy: whether the most probable tokens are taken.
    """

    def __init__(self, source: ServerSource) -> None:
        """Takes the servers, with nothing in flight."""
        self.greedy = False
        self.count: collections.Counter[str] = collections.Counter()
        self._source = source
        self._sessions: dict[object, int] = {}
        self._open: dict[Turn, Future[list[Sample]]] = {}
        self._ended: SimpleQueue[Turn] = SimpleQueue()

    @property
    def metrics(self) -> Mapping[str, float]:
        """The metrics of the servers."""
        return self._source.metrics

    def update(self, policy: kljax.Policy, version: int) -> None:
        """Sends the weights of the next turns to the servers."""
        self._source.update(policy, version)

    def submit(self, turn: Turn) -> None:
        """Requests a turn."""
        answers = self._source.ask_turn(
            turn.ids,
            max_tokens=turn.max_tokens,
            seed=turn_seed(turn),
            greedy=self.greedy,
            place=None if turn.session is None else self._sessions.setdefault(turn.session, len(self._sessions)),
        )
        self._open[turn] = answers
        answers.add_done_callback(lambda _: self._ended.put(turn))

    def cancel(self, turn: Turn) -> None:
        """Ends the request of a turn; `step` does not return it."""
        if (answers := self._open.pop(turn, None)) is not None:
            answers.cancel()

    def is_idle(self) -> bool:
        """Whether no turn is under way."""
        return not self._open

    def step(self) -> list[Turn]:
        """Waits until a turn ends, at most a moment, and returns those that have.

        Raises:
          SourceError: a server failed, or its answer cannot be used; no turn is under way any more.
        """
        ended: list[Turn] = []
        try:
            waited = [self._ended.get(timeout=POLL_SECONDS)]
            while not self._ended.empty():
                waited.append(self._ended.get())
        except Empty:
            return ended
        try:
            # A turn that was cancelled has no answer.
            for turn in (turn for turn in waited if turn in self._open):
                [answer] = self._open.pop(turn).result()
                self._finish(turn, answer)
                ended.append(turn)
        except BaseException:
            self.forget()
            raise
        return ended

    def _finish(self, turn: Turn, answer: Sample) -> None:
        turn.tokens = answer.completion_ids
        has_log_probs = "rollout_log_probs" in answer.fields
        turn.rollout_log_probs = (
            answer.of_completion("rollout_log_probs") if has_log_probs else [0.0] * len(turn.tokens)
        )
        turn.versions = answer.of_completion(VERSIONS)
        turn.finish = "stop" if answer.finished else "length"
        self.count["sampled"] += len(turn.tokens)

    def forget(self) -> None:
        """Ends the requests that are under way."""
        for turn in list(self._open):
            self.cancel(turn)

    def close(self) -> None:
        """Ends what is in flight, and closes the connections."""
        self.forget()
        self._source.close()


def turn_seed(turn: Turn) -> int:
    """Draws the seed of a turn from the key of its session and the number of its first token."""
    return int(np.random.SeedSequence([*turn.key.tolist(), turn.first]).generate_state(1)[0] % (2**31 - 1))
