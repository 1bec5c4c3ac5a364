"""Sessions of an endpoint: the ids of their conversations, which are never tokenised again, and their turns."""

import collections
import dataclasses
import json
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from train.config.errors import UserError
from train.data.tokenizers.protocol import EpisodeTokenizer, Messages
from train.rollouts.endpoint.generator import RequestedTurn
from train.rollouts.engine import Turn
from train.rollouts.episodes.turns import SampledTurn, make_sequences
from train.sequences.sample import common_length

MOST_SESSIONS = 256
"""Sessions of a server without episodes; the one that was not used for the longest time is forgotten."""
MOST_REPLIES = 64
"""Replies of a session that a later request may go on with; the oldest is forgotten."""


class RequestError(Exception):
    """A request that is refused, with the status of HTTP, the field and the reason."""

    def __init__(self, status: int, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.field = field


@dataclasses.dataclass(frozen=True)
class SequenceLengths:
    """The tokens that a sequence of a session may have.

    Attributes:
      prompt: the most of the first prompt, which a row of a batch has before its completion; more count as completion.
      completion: the most tokens after it.
      shared: whether all sequences of an episode have its first prompt before them.
      limit: the most tokens of a sequence; None: prompt + completion.
    """

    prompt: int
    completion: int
    shared: bool = False
    limit: int | None = None

    @property
    def total(self) -> int:
        """The most tokens of a sequence."""
        return self.limit or self.prompt + self.completion


@dataclasses.dataclass(frozen=True)
class _Reply:
    """A reply that was sent: the request before it, and all ids up to its end."""

    messages: list[Any]
    tools: Any
    message: Any
    ids: np.ndarray


class Session:
    """The conversations of one agent: its replies by their messages, and what was sampled.

    Attributes:
      name: of the session.
      key: [2] uint32, data of the key that its tokens are drawn with.
      turns: what was sampled, in the order of the answers.
      texts: of the turns.
      finished: whether the last turn ended by itself, and not by a limit.
      closed: why it takes no more requests; None while it does.
    """

    def __init__(self, name: str, key: np.ndarray, lengths: SequenceLengths) -> None:
        self.name = name
        self.key = key
        self.turns: list[SampledTurn] = []
        self.texts: list[str] = []
        self.finished = False
        self.closed: str | None = None
        self._lengths = lengths
        self._replies: collections.deque[_Reply] = collections.deque(maxlen=MOST_REPLIES)
        self._draws: set[RequestedTurn] = set()
        self._drawn = 0
        self._lock = threading.Lock()

    def prompt_ids(self, tokenizer: EpisodeTokenizer, messages: Messages, tools: Any) -> list[int]:
        """Returns the ids of a conversation: those of the longest earlier one that it goes on from, and what is new.

        Raises:
          RequestError: the tokenizer cannot write the messages.
        """
        said = [_comparable(message) for message in messages]
        with self._lock:
            replies = [
                reply
                for reply in self._replies
                if reply.tools == tools and said[: len(reply.messages) + 1] == [*reply.messages, reply.message]
            ]
        before = max(replies, key=lambda reply: len(reply.ids), default=None)
        try:
            if before is None:
                return tokenizer.conversation_ids(messages, tools)
            start = len(before.messages)
            ids = before.ids.tolist()
            return ids + tokenizer.observation_ids(messages[:start], messages[start + 1 :], before=ids, tools=tools)
        except UserError as error:
            raise RequestError(400, str(error).removeprefix("environment: "), "messages") from error

    def most_tokens(self, ids: Sequence[int]) -> int:
        """Returns how many tokens may be drawn after ids, so that the sequence fits into a row of a batch."""
        lengths = self._lengths
        with self._lock:
            first = len(self.turns[0].prompt_ids) if self.turns else len(ids)
            prompt = len(ids)
            for sequence in make_sequences(self.turns):
                if common_length(sequence.ids, list(ids)) == len(sequence.ids):
                    prompt = min(prompt, sequence.first_trained())
        before = min(first if lengths.shared else prompt, lengths.prompt)
        return min(lengths.total - len(ids), lengths.completion - (len(ids) - before))

    def begin(self, draws: Sequence[RequestedTurn]) -> None:
        """Numbers the tokens of draws, so that no two tokens of the session are drawn with one number.

        Raises:
          RequestError: the session is closed.
        """
        with self._lock:
            if self.closed is not None:
                raise RequestError(404, self.closed, "session")
            for draw in draws:
                turn = draw.turn
                open_ends = (other.turn.first + other.turn.max_tokens for other in self._draws)
                prompt = self.turns[0].prompt_ids if self.turns else turn.ids
                # One turn after another, a token has the number that it has in an episode of this process.
                turn.first = max([self._drawn, len(turn.ids) - len(prompt), *open_ends])
                self._draws.add(draw)

    def add(self, draws: Sequence[RequestedTurn]) -> None:
        """Adds draws that ended, before their answer is sent.

        Raises:
          RequestError: the session was closed meanwhile.
        """
        with self._lock:
            if self.closed is not None:
                raise RequestError(404, self.closed, "session")
            for draw in draws:
                turn = draw.turn
                self.turns.append(SampledTurn(turn.ids, turn.tokens, turn.rollout_log_probs, turn.versions))
                self.texts.append(draw.text)
                self.finished = turn.finish == "stop"

    def remember(self, messages: Messages, tools: Any, reply: Mapping[str, Any], turn: Turn) -> None:
        """Remembers a reply, which a later conversation may go on from."""
        said = [_comparable(message) for message in messages]
        with self._lock:
            self._replies.append(_Reply(said, tools, _comparable(reply), np.array(turn.all_ids(), np.int32)))

    def end(self, draws: Sequence[RequestedTurn]) -> None:
        """Forgets draws that are over."""
        with self._lock:
            for draw in draws:
                if draw in self._draws:
                    self._draws.remove(draw)
                    self._drawn = max(self._drawn, draw.turn.first + draw.count)

    def close(self, reason: str) -> None:
        """Takes no more requests, and no more turns."""
        with self._lock:
            self.closed = self.closed or reason


def _comparable(message: Mapping[str, Any]) -> Any:
    """Returns the parts of a message that a client sends back as it got them."""
    calls = [
        (call.get("id"), call["function"]["name"], json.dumps(call["function"]["arguments"], sort_keys=True))
        for call in message.get("tool_calls") or ()
    ]
    return message["role"], message.get("content") or "", calls, message.get("tool_call_id")


class Sessions:
    """The sessions of a server, which any name opens; without a name each request has one of its own."""

    def __init__(self, lengths: SequenceLengths) -> None:
        self._lengths = lengths
        self._sessions: collections.OrderedDict[str, Session] = collections.OrderedDict()
        self._lock = threading.Lock()

    def find(self, name: str | None) -> Session:
        """Returns the session of a request."""
        if name is None:
            return Session("", _random_key(), self._lengths)
        with self._lock:
            session = self._sessions.get(name) or Session(name, _random_key(), self._lengths)
            # What was sampled is for nobody.
            session.turns.clear()
            session.texts.clear()
            self._sessions[name] = session
            self._sessions.move_to_end(name)
            if len(self._sessions) > MOST_SESSIONS:
                self._sessions.popitem(last=False)
            return session


@dataclasses.dataclass(eq=False)
class OpenEpisode:
    """An episode that an agent program runs.

    Attributes:
      session: its requests; the name is the id of the episode.
      row: the fields of its problem, which the agent program gets.
      deadline: the end of its time, in seconds of `time.monotonic`; None before somebody took it.
      rewards: named rewards; None: the task scores the last turn.
      failure: why the world failed it, by name, and the error.
    """

    session: Session
    row: dict[str, Any]
    deadline: float | None = None
    rewards: dict[str, float] | None = None
    failure: tuple[str, str] | None = None

    @property
    def over(self) -> bool:
        """Whether it was ended."""
        return self.session.closed is not None


class OpenEpisodes:
    """The episodes of a step, which have an id that nobody can guess; requests of any other name are refused.

    Attributes:
      ended: called when an episode ends, from any thread.
    """

    def __init__(self, ended: Callable[[], None]) -> None:
        self.ended = ended
        self._open: dict[str, OpenEpisode] = {}
        self._free: collections.deque[OpenEpisode] = collections.deque()
        self._lock = threading.Lock()

    def open(
        self, rows: Sequence[dict[str, Any]], keys: Sequence[np.ndarray], lengths: SequenceLengths
    ) -> list[OpenEpisode]:
        """Opens the episodes of a step; those of the step before are forgotten."""
        episodes = [
            OpenEpisode(Session(secrets.token_hex(12), key, lengths), row) for row, key in zip(rows, keys, strict=True)
        ]
        with self._lock:
            self._open = {episode.session.name: episode for episode in episodes}
            self._free = collections.deque(episodes)
        return episodes

    def take(self, deadline: float) -> OpenEpisode | None:
        """Gives an episode that nobody has to an agent program; None if there is none."""
        with self._lock:
            episode = self._free.popleft() if self._free else None
        if episode is not None:
            episode.deadline = deadline
        return episode

    def episode(self, name: str) -> OpenEpisode:
        """Returns an episode.

        Raises:
          RequestError: there is none of this name.
        """
        episode = self._open.get(name)
        if episode is None:
            raise RequestError(404, "the episode is over, or there was none; take another one", "session")
        return episode

    def find(self, name: str | None) -> Session:
        """Returns the session of a request.

        Raises:
          RequestError: it names no episode.
        """
        if name is None:
            raise RequestError(
                400,
                "missing; send the id of the episode as X-Session-ID, or behind the API key, as KEY:ID",
                "session",
            )
        return self.episode(name).session

    def end(
        self,
        episode: OpenEpisode,
        *,
        rewards: dict[str, float] | None = None,
        failure: tuple[str, str] | None = None,
    ) -> None:
        """Ends an episode, once: with its rewards, or because the world failed it.

        Raises:
          RequestError: it is over already.
        """
        with self._lock:
            if episode.over:
                raise RequestError(409, "the episode is over already", "session")
            episode.rewards = rewards
            episode.failure = failure
            episode.session.close("the episode is over; take another one")
        self.ended()


def _random_key() -> np.ndarray:
    return np.frombuffer(secrets.token_bytes(8), np.uint32)
