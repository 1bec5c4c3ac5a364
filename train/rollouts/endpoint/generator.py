"""Requests of many threads, and the engine in one: they are submitted, listened to and cancelled from any thread."""

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from train.data.tokenizers import UNKNOWN
from train.rollouts.engine import Turn


class TurnDrawer(Protocol):
    """The methods of `TurnEngine` that the generator calls."""

    def submit(self, turn: Turn) -> None:
        """Queues a turn."""

    def cancel(self, turn: Turn) -> None:
        """Ends a turn."""

    def step(self) -> list[Turn]:
        """Draws tokens; returns the turns that ended."""
        ...

    def is_idle(self) -> bool:
        """Whether there is no turn."""
        ...


@dataclasses.dataclass(eq=False)
class RequestedTurn:
    """A turn that is drawn for a request.

    Attributes:
      turn: the turn; only its first `count` tokens may be read outside of the thread of the engine.
      stops: strings that end it, besides those of the run.
      decode: returns the text of its tokens from one number to another, as it goes on after those before.
      told: called in the thread of the engine after each chunk, and at the end.
      stop_ids: tokens that end it, besides those of the run; the last of its tokens, and no part of its text.
      count: tokens that are drawn.
      text: of these, but for tokens that may be parts of a character.
      ended: whether the turn has all of its tokens.
      problem: why it was ended without them; None if it was not.
    """

    turn: Turn
    stops: Sequence[str]
    decode: Callable[[int, int], str]
    told: Callable[[], None]
    stop_ids: frozenset[int] = frozenset()
    count: int = 0
    text: str = ""
    ended: bool = False
    problem: str | None = None
    _read: int = 0

    def observe(self) -> None:
        """Reads new tokens; a stop token ends the turn, and a stop string with the token that completes it."""
        turn = self.turn
        start = self._read
        last = next((n for n in range(self.count, len(turn.tokens)) if turn.tokens[n] in self.stop_ids), None)
        if last is not None:
            self._end(last + 1)
        piece = self.decode(start, len(turn.tokens) if last is None else last)
        tail = self.text[-max(map(len, self.stops), default=0) :]

        def is_stopped(text: str) -> bool:
            return any(stop in tail + text for stop in self.stops)

        if self.stops and is_stopped(piece):
            end = next(n for n in range(start + 1, len(turn.tokens) + 1) if is_stopped(self.decode(start, n)))
            piece = self.decode(start, end)
            self._end(end)
        if turn.finish or not piece.endswith(UNKNOWN):
            self.text += piece
            self._read = len(turn.tokens)
        self.count = len(turn.tokens)

    def _end(self, count: int) -> None:
        """Ends the turn after some of its tokens."""
        turn = self.turn
        for drawn in (turn.tokens, turn.rollout_log_probs, turn.versions):
            del drawn[count:]
        turn.finish = "stop"


class Generator:
    """Draws for requests: `submit` and `cancel` are called from any thread, `advance` from that of the engine.

    Attributes:
      served: draws that ended with all of their tokens.
    """

    def __init__(self) -> None:
        self.served = 0
        self._changed = threading.Condition()
        self._new: list[RequestedTurn] = []
        self._left: list[RequestedTurn] = []
        self._draws: dict[Turn, RequestedTurn] = {}

    @property
    def open(self) -> int:
        """Draws that wait or are under way."""
        return len(self._new) + len(self._draws)

    def submit(self, draw: RequestedTurn) -> None:
        """Hands a draw to the engine."""
        with self._changed:
            self._new.append(draw)
            self._changed.notify()

    def cancel(self, draw: RequestedTurn) -> None:
        """Ends a draw whose client is gone: its row is free for others."""
        with self._changed:
            self._left.append(draw)
            self._changed.notify()

    def wake(self) -> None:
        """Lets an `advance` that waits return."""
        with self._changed:
            self._changed.notify()

    def advance(self, engine: TurnDrawer, *, seconds: float) -> None:
        """Takes what was submitted and cancelled, and draws a chunk; waits at most so long if there is nothing."""
        with self._changed:
            if not self._new and not self._left and engine.is_idle():
                self._changed.wait(seconds)
            new = self._new
            left = self._left
            self._new = []
            self._left = []
            for draw in new:
                self._draws[draw.turn] = draw
        for draw in new:
            engine.submit(draw.turn)
        for draw in left:
            if self._draws.pop(draw.turn, None) is not None:
                engine.cancel(draw.turn)
        if engine.is_idle():
            return
        engine.step()
        for draw in list(self._draws.values()):
            self._observe(engine, draw)

    def _observe(self, engine: TurnDrawer, draw: RequestedTurn) -> None:
        """Ends a draw with its turn, or at its stop string, and tells of new tokens."""
        turn = draw.turn
        if len(turn.tokens) == draw.count and not turn.finish:
            return
        had_ended = bool(turn.finish)
        draw.observe()
        if turn.finish and not had_ended:
            engine.cancel(turn)
        if turn.finish:
            with self._changed:
                self._draws.pop(turn, None)
            draw.ended = True
            self.served += 1
        draw.told()

    def end_all(self, engine: TurnDrawer, problem: str) -> None:
        """Ends all draws, and tells their requests why."""
        with self._changed:
            draws = [*self._draws.values(), *self._new]
            self._draws.clear()
            self._new = []
            self._left = []
        for draw in draws:
            engine.cancel(draw.turn)
            draw.problem = problem
            draw.ended = True
            draw.told()
