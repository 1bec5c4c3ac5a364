"""Requests for completions under way: their draws, and the clients that wait for them."""

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from train.data.tokenizers import decode_continuation
from train.data.tokenizers.protocol import EpisodeTokenizer
from train.rollouts.endpoint.generator import Generator, RequestedTurn
from train.rollouts.endpoint.sessions import OpenEpisodes, RequestError, SequenceLengths, Session, Sessions
from train.rollouts.endpoint.wire import ReplyTool, RequestOptions, ServedChoice
from train.rollouts.engine import Turn
from train.rollouts.sampler import Sampling

if TYPE_CHECKING:
    from starlette.types import Receive


@dataclasses.dataclass(frozen=True)
class EndpointKeys:
    """The keys of an endpoint: of completions, None for none; of episodes and rewards, None where there are none."""

    completions: str | None = None
    rewards: str | None = None


@dataclasses.dataclass
class Served:
    """The model behind the routes, and the limits of its requests.

    Attributes:
      model: the name of the model.
      tokenizer: of the run.
      sampling: of the run.
      lengths: the tokens of a sequence.
      vocab_size: of the tokenizer.
      sessions: any session, or those of the episodes of a run.
      keys: of the routes.
      max_requests: completions that wait or are under way; more are refused with 429.
      episode_seconds: time of an episode.
    """

    model: str
    tokenizer: EpisodeTokenizer
    sampling: Sampling
    lengths: SequenceLengths
    vocab_size: int
    sessions: Sessions | OpenEpisodes
    keys: EndpointKeys = dataclasses.field(default_factory=EndpointKeys)
    max_requests: int = 1024
    episode_seconds: float = 600.0


class ClientGoneError(Exception):
    """Raised when the client of a request closed its connection."""


class WaitingClient:
    """The client of a request under way: draws and the connection tell it of news."""

    def __init__(self, receive: "Receive") -> None:
        self.gone = False
        self._news = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._watch = asyncio.create_task(self._listen(receive))

    async def _listen(self, receive: "Receive") -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        self._news.set()

    def tell(self) -> None:
        """Tells of news, from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._news.set)

    async def changes(self, draws: Sequence[RequestedTurn]) -> AsyncIterator[bool]:
        """Yields after every chunk of some draws whether all of them ended, which it does once.

        Raises:
          ClientGoneError: the client is gone.
          RequestError: a draw was ended from outside.
        """
        while True:
            self._news.clear()
            if self.gone:
                raise ClientGoneError
            problem = next((draw.problem for draw in draws if draw.problem is not None), None)
            if problem is not None:
                raise RequestError(503, problem)
            over = all(draw.ended for draw in draws)
            yield over
            if over:
                return
            await self._news.wait()

    def close(self) -> None:
        """Ends the watch of the connection."""
        self._watch.cancel()


@dataclasses.dataclass(eq=False)
class CompletionRequest:
    """A request for completions.

    Attributes:
      served: the model.
      session: that the completions belong to.
      ids: of the prompt.
      options: of the request.
      messages, tools, reply_tools: of a chat: its messages, its tools as the template tells them, and those that a
        reply may call.
      draws: the completions.
    """

    served: Served
    session: Session
    ids: list[int]
    options: RequestOptions
    messages: list[dict[str, Any]] | None = None
    tools: Any = None
    reply_tools: Sequence[ReplyTool] = ()
    draws: list[RequestedTurn] = dataclasses.field(default_factory=list)

    def begin(self, generator: Generator, told: Callable[[], None]) -> None:
        """Hands the draws to the generator, which tells of every chunk.

        Raises:
          RequestError: the prompt has no tokens, or there is no room, for those of the draws or for the request.
        """
        options = self.options
        served = self.served
        field = "messages" if self.messages is not None else "prompt"
        if not self.ids:
            raise RequestError(400, "the prompt has no tokens", field)
        most = self.session.most_tokens(self.ids)
        if most < 1:
            raise RequestError(
                400,
                f"the prompt has {len(self.ids)} tokens, and leaves none of max_model_len = {served.lengths.total} "
                "and of the completion's tokens",
                field,
            )
        if generator.open + options.choices > served.max_requests:
            raise RequestError(429, f"{served.max_requests} requests are under way; try again")
        key = self.session.key if options.seed is None else _seed_key(options.seed)
        limit = min(most, options.max_tokens or most)
        for _ in range(options.choices):
            turn = Turn(list(self.ids), limit, key, session=self.session.name or None)
            decode = functools.partial(self._decode, turn)
            self.draws.append(RequestedTurn(turn, options.stops, decode, told, options.stop_ids))
        self.session.begin(self.draws)
        for draw in self.draws:
            generator.submit(draw)

    def _decode(self, turn: Turn, start: int, end: int) -> str:
        return decode_continuation(self.served.tokenizer, [*turn.ids, *turn.tokens[:start]], turn.tokens[start:end])

    def end(self, generator: Generator) -> None:
        """Frees the rows of what is still drawn, once nobody waits for it."""
        for draw in self.draws:
            if not draw.ended:
                generator.cancel(draw)
        self.session.end(self.draws)

    def finish(self) -> list[ServedChoice]:
        """Adds the turns to the session, and returns what is answered.

        Raises:
          RequestError: the episode ended meanwhile.
        """
        choices = [self.choice(number) for number in range(len(self.draws))]
        self.session.add(self.draws)
        return choices

    def choice(self, index: int, start: int = 0) -> ServedChoice:
        """Returns a completion, with its tokens from `start` on."""
        draw = self.draws[index]
        turn = draw.turn
        ids = turn.tokens[start : draw.count]
        text = _before_stop(draw.text, draw.stops)
        names = []
        if self.options.log_probs:
            tokenizer = self.served.tokenizer
            as_ids = self.options.ids_as_tokens
            names = [f"token_id:{token}" if as_ids else tokenizer.decode_all([token]) for token in ids]
        return ServedChoice(index, ids, turn.rollout_log_probs[start : draw.count], names, text, turn.finish)

    async def parts(self, client: WaitingClient) -> AsyncIterator[tuple[ServedChoice, str, bool]]:
        """Yields new tokens of completions, with the text that is sure by now, and whether they are the last.

        All completions are added to the session before the last part of the first one is sent.
        """
        sent = [0] * len(self.draws)
        shown = [""] * len(self.draws)
        async for over in client.changes(self.draws):
            if over:
                self.finish()
            for number, draw in enumerate(self.draws):
                count = draw.count
                if count == sent[number] and not over:
                    continue
                choice = self.choice(number, sent[number])
                text = choice.text if over else _sure(choice.text, draw.stops)
                yield choice, text.removeprefix(shown[number]), over
                sent[number] = count
                shown[number] = text


def _seed_key(seed: int) -> np.ndarray:
    """Returns the data of the key of a seed, as `jax.random.key` does."""
    return np.array([(seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32)


def _before_stop(text: str, stops: Sequence[str]) -> str:
    """Returns a text up to its first stop string."""
    ends = [text.find(stop) for stop in stops if stop in text]
    return text[: min(ends)] if ends else text


def _sure(text: str, stops: Sequence[str]) -> str:
    """Returns the part of a text that later tokens do not change, without what may be part of a stop string.

    Example:
      >>> _sure("four, EN", ["END"])
      'four, '
    """
    lengths = (n for stop in stops for n in range(len(stop) - 1, 0, -1) if text.endswith(stop[:n]))
    return text[: len(text) - max(lengths, default=0)]
