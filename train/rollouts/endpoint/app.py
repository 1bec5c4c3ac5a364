"""The routes of an endpoint, in one asyncio loop; the engine draws in another thread."""

import asyncio
import contextlib
import dataclasses
import functools
import hmac
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from train.data.reward_call import WrongRewardError, named_rewards
from train.data.tokenizers import decode_continuation
from train.data.tokenizers.calls import ReadTurn
from train.data.tokenizers.protocol import EpisodeTokenizer
from train.data.tokenizers.rendered import read_turn
from train.rollouts.endpoint.generator import Generator, RequestedTurn
from train.rollouts.endpoint.sessions import OpenEpisodes, RequestError, SequenceLengths, Session, Sessions
from train.rollouts.endpoint.wire import (
    Body,
    ReplyTool,
    RequestOptions,
    ServedChoice,
    error_body,
    read_ids,
    read_messages,
    read_options,
    read_tools,
    reply_message,
    usage,
)
from train.rollouts.engine import Turn
from train.rollouts.sampler import Sampling

log = logging.getLogger(__name__)
MOST_BYTES = 2**20
"""Of the body of a request."""
BODY_SECONDS = 30.0
"""Longest time in which a body arrives."""
SEND_SECONDS = 60.0
"""Longest time that a reader of a stream leaves a part of it; then the request ends, and its turn is kept."""
ANSWER_SECONDS = 3600.0
"""Longest time of a request."""
TAKE_SECONDS = 10.0
"""Longest wait of a program that asks for an episode."""


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


class _ClientGoneError(Exception):
    """Raised when the client of a request closed its connection."""


class _Client:
    """The client of a request under way: draws and the connection tell it of news."""

    def __init__(self, receive: Receive) -> None:
        self.gone = False
        self._news = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._watch = asyncio.create_task(self._listen(receive))

    async def _listen(self, receive: Receive) -> None:
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
          _ClientGoneError: the client is gone.
          RequestError: a draw was ended from outside.
        """
        while True:
            self._news.clear()
            if self.gone:
                raise _ClientGoneError
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


@dataclasses.dataclass
class _Asked:
    """A request for completions: its session, prompt, options and draws, and what a chat has besides."""

    session: Session
    ids: list[int]
    options: RequestOptions
    draws: list[RequestedTurn]
    messages: list[dict[str, Any]] | None = None
    tools: Any = None
    reply_tools: Sequence[ReplyTool] = ()


class Endpoint:
    """The routes; `app` is an ASGI application.

    Attributes:
      clients_gone: requests whose client left before the answer.
    """

    def __init__(self, served: Served, generator: Generator) -> None:
        """Serves the completions of a generator."""
        self._served = served
        self._generator = generator
        self._began = int(time.time())
        self.clients_gone = 0
        routes = [
            Route("/health", self._health, methods=["GET"]),
            Route("/v1/models", self._guarded(self._models), methods=["GET"]),
            Route("/v1/chat/completions", self._guarded(self._chat), methods=["POST"]),
            Route("/v1/completions", self._guarded(self._complete), methods=["POST"]),
            Route("/inference/v1/generate", self._guarded(self._generate), methods=["POST"]),
        ]
        if isinstance(served.sessions, OpenEpisodes) and served.keys.rewards is not None:
            routes += [
                Route("/v1/episodes", self._guarded(self._take_episode), methods=["POST"]),
                Route("/v1/episodes/{name}", self._guarded(self._show_episode), methods=["GET"]),
                Route("/v1/episodes/{name}/reward", self._guarded(self._reward), methods=["POST"]),
            ]
        self.app = Starlette(routes=routes)

    # What every route has: keys, limits, errors.

    def _guarded(self, answer: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """Answers errors with a body as OpenAI's."""

        @functools.wraps(answer)
        async def guarded(request: Request) -> Response:
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    return await answer(request)
            except RequestError as error:
                refused = error
            except _ClientGoneError:
                self.clients_gone += 1
                refused = RequestError(499, "the client closed the connection")
            except TimeoutError:
                refused = RequestError(504, f"no answer within {ANSWER_SECONDS:g} s")
            except Exception:
                log.exception("the endpoint has a fault")
                refused = RequestError(500, "the endpoint has a fault, which its log shows")
            headers = {"Retry-After": "1"} if refused.status in (429, 503) else {}
            return JSONResponse(error_body(refused), refused.status, headers)

        return guarded

    def _session_name(self, request: Request) -> str | None:
        """Checks the key of completions; returns the session that the key or a header names, if any.

        Raises:
          RequestError: the key is another one.
        """
        sent = _bearer(request)
        key = self._served.keys.completions
        named = None
        if sent is not None and ":" in sent and not _equal(sent, key):
            sent, _, named = sent.rpartition(":")
        if key is not None and not _equal(sent, key):
            raise RequestError(401, "the API key is missing or wrong", "authorization")
        return named or request.headers.get("x-session-id")

    def _check_reward_key(self, request: Request) -> None:
        """Checks the key of episodes and rewards.

        Raises:
          RequestError: the key is another one.
        """
        if not _equal(_bearer(request), self._served.keys.rewards):
            raise RequestError(401, "the key of rewards is missing or wrong", "authorization")

    async def _body(self, request: Request) -> dict[str, Any]:
        """Reads the body of a request, a JSON object.

        Raises:
          RequestError: it is none, too large, or does not arrive.
        """
        # A page in a browser may send other types without asking.
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise RequestError(415, "content-type: expected application/json", "content-type")
        parts = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for part in request.stream():
                    parts += part
                    if len(parts) > MOST_BYTES:
                        raise RequestError(413, f"body: got more than {MOST_BYTES} bytes")
        except TimeoutError:
            raise RequestError(408, f"body: did not arrive within {BODY_SECONDS:g} s") from None
        except RequestError:
            raise
        except Exception as error:  # the connection broke
            raise _ClientGoneError from error
        try:
            body = json.loads(bytes(parts)) if parts else {}
        except (ValueError, RecursionError) as error:
            raise RequestError(400, f"body: got no JSON: {error}") from None
        if not isinstance(body, dict):
            raise RequestError(400, "body: expected a JSON object")
        return body

    # Completions.

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok", "open": self._generator.open, "served": self._generator.served})

    async def _models(self, request: Request) -> Response:
        self._session_name(request)
        served = self._served
        model = {
            "id": served.model,
            "object": "model",
            "created": self._began,
            "owned_by": "kljax",
            "max_model_len": served.lengths.total,
        }
        return JSONResponse({"object": "list", "data": [model]})

    async def _chat(self, request: Request) -> Response:
        name = self._session_name(request)
        body = await self._body(request)
        session = self._find(body, name)
        options = read_options(body, self._served.sampling, chat=True)
        messages = read_messages(body)
        tools, reply_tools = read_tools(body)
        ids = await asyncio.to_thread(session.prompt_ids, self._served.tokenizer, messages, tools)
        asked = _Asked(session, ids, options, [], messages, tools, reply_tools)
        return await self._answer(request, asked, self._chat_answer, self._chat_events)

    async def _complete(self, request: Request) -> Response:
        name = self._session_name(request)
        body = await self._body(request)
        session = self._find(body, name)
        options = read_options(body, self._served.sampling, chat=False)
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, str):
            said = [{"role": "user", "content": prompt}]
            tokenizer = self._served.tokenizer
            first = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
            ids = [*first, *tokenizer.encode(prompt)] if tokenizer.has_template else tokenizer.conversation_ids(said)
        else:
            ids = read_ids({"prompt": prompt}, "prompt", self._served.vocab_size)
        return await self._answer(request, _Asked(session, ids, options, []), self._plain_answer, self._plain_events)

    async def _generate(self, request: Request) -> Response:
        name = self._session_name(request)
        body = await self._body(request)
        session = self._find(body, name)
        chosen = body.get("sampling_params") or {}
        if not isinstance(chosen, dict):
            raise RequestError(400, "sampling_params: expected an object", "sampling_params")
        options = read_options(chosen, self._served.sampling, chat=False)
        if body.get("stream") or options.stream:
            raise RequestError(400, "stream: got true, expected false; /v1/completions streams", "stream")
        ids = read_ids(body, "token_ids", self._served.vocab_size)
        options = dataclasses.replace(options, ids_as_tokens=True)
        return await self._answer(request, _Asked(session, ids, options, []), self._ids_answer, None)

    def _find(self, body: Body, name: str | None) -> Session:
        """Finds the session of a request, and checks its model."""
        model = body.get("model")
        if model not in (None, self._served.model):
            raise RequestError(404, f"model: got {model!r}, expected {self._served.model!r}", "model")
        user = body.get("user")
        return self._served.sessions.find(name or (user if isinstance(user, str) and user else None))

    async def _answer(
        self,
        request: Request,
        asked: _Asked,
        answer: Callable[[_Asked, list[ServedChoice]], dict[str, Any]],
        events: Callable[[_Asked, _Client], AsyncIterator[dict[str, Any]]] | None,
    ) -> Response:
        """Draws for a request, and answers it at once or as a stream."""
        client = _Client(request.receive)
        try:
            self._begin(asked, client)
        except RequestError:
            client.close()
            raise
        if asked.options.stream and events is not None:
            return _EventStream(self, asked, client, events(asked, client))
        try:
            async for _ in client.changes(asked.draws):
                pass
            choices = self._finish(asked)
        finally:
            self._leave(asked, client)
        return JSONResponse(answer(asked, choices))

    def _begin(self, asked: _Asked, client: _Client) -> None:
        """Hands the draws of a request to the generator.

        Raises:
          RequestError: there is no room, for their tokens or for the request.
        """
        options = asked.options
        ids = asked.ids
        most = asked.session.most_tokens(ids)
        if most < 1:
            raise RequestError(
                400,
                f"the prompt has {len(ids)} tokens, and leaves none of max_model_len = {self._served.lengths.total} "
                "and of the completion's tokens",
                "messages" if asked.messages is not None else "prompt",
            )
        if self._generator.open + options.choices > self._served.max_requests:
            raise RequestError(429, f"{self._served.max_requests} requests are under way; try again")
        key = asked.session.key if options.seed is None else _seed_key(options.seed)
        limit = min(most, options.max_tokens or most)
        for _ in range(options.choices):
            turn = Turn(list(ids), limit, key, session=asked.session.name or None)
            decode = functools.partial(self._decode, turn)
            asked.draws.append(RequestedTurn(turn, options.stops, decode, client.tell, options.stop_ids))
        asked.session.begin(asked.draws)
        for draw in asked.draws:
            self._generator.submit(draw)

    def _decode(self, turn: Turn, start: int, end: int) -> str:
        return decode_continuation(self._served.tokenizer, [*turn.ids, *turn.tokens[:start]], turn.tokens[start:end])

    def _leave(self, asked: _Asked, client: _Client) -> None:
        """Frees the rows of what is still drawn, once nobody waits for it."""
        client.close()
        for draw in asked.draws:
            if not draw.ended:
                self._generator.cancel(draw)
        asked.session.end(asked.draws)

    def _finish(self, asked: _Asked) -> list[ServedChoice]:
        """Adds the turns of a request to its session, and returns what is answered.

        Raises:
          RequestError: the episode ended meanwhile.
        """
        choices = [self._choice(asked, number) for number in range(len(asked.draws))]
        asked.session.add(asked.draws)
        return choices

    def _choice(self, asked: _Asked, index: int, start: int = 0) -> ServedChoice:
        """Returns a completion, with its tokens from `start` on."""
        draw = asked.draws[index]
        turn = draw.turn
        ids = turn.tokens[start : draw.count]
        text = _before_stop(draw.text, draw.stops)
        names = []
        if asked.options.log_probs:
            tokenizer = self._served.tokenizer
            as_ids = asked.options.ids_as_tokens
            names = [f"token_id:{token}" if as_ids else tokenizer.decode_all([token]) for token in ids]
        return ServedChoice(index, ids, turn.rollout_log_probs[start : draw.count], names, text, turn.finish)

    def _head(self, asked: _Asked, kind: str, name: str) -> dict[str, Any]:
        head = {
            "id": f"{name}-{secrets.token_hex(8)}",
            "object": kind,
            "created": int(time.time()),
            "model": self._served.model,
        }
        versions = [version for draw in asked.draws for version in draw.turn.versions[: draw.count]]
        return head | ({"weight_version": max(versions)} if versions else {})

    def _used(self, asked: _Asked) -> dict[str, int]:
        return usage(len(asked.ids), sum(draw.count for draw in asked.draws))

    def _message(self, asked: _Asked, choice: ServedChoice) -> tuple[dict[str, Any], str]:
        """Returns the message of a completion, remembered for the requests that go on from it, and why it ended."""
        tools = asked.reply_tools
        turn = ReadTurn(choice.text, [])
        if tools:
            names = [tool.name for tool in tools]
            turn = read_turn(
                self._served.tokenizer, names, prompt=asked.ids, ids=choice.ids, text=choice.text, tools=asked.tools
            )
        message = reply_message(choice.text, turn, tools, lambda: f"call_{secrets.token_hex(8)}")
        assert asked.messages is not None
        (read,) = read_messages({"messages": [message]})
        asked.session.remember(asked.messages, asked.tools, [(read, asked.draws[choice.index].turn)])
        return message, "tool_calls" if "tool_calls" in message else choice.finish

    def _chat_answer(self, asked: _Asked, choices: list[ServedChoice]) -> dict[str, Any]:
        written = []
        for choice in choices:
            message, finish = self._message(asked, choice)
            log_probs = choice.chat_log_probs() if asked.options.log_probs else None
            entry = {"index": choice.index, "message": message, "finish_reason": finish, "logprobs": log_probs}
            written.append(entry | ({"token_ids": list(choice.ids)} if asked.options.token_ids else {}))
        head = self._head(asked, "chat.completion", "chatcmpl") | self._prompt_ids(asked)
        return head | {"choices": written, "usage": self._used(asked)}

    def _plain_answer(self, asked: _Asked, choices: list[ServedChoice]) -> dict[str, Any]:
        written = []
        for choice in choices:
            log_probs = choice.plain_log_probs() if asked.options.log_probs else None
            entry = {
                "index": choice.index,
                "text": choice.text,
                "finish_reason": choice.finish,
                "logprobs": log_probs,
            }
            if asked.options.token_ids:
                entry |= {"token_ids": list(choice.ids), "prompt_token_ids": asked.ids}
            written.append(entry)
        return self._head(asked, "text_completion", "cmpl") | {"choices": written, "usage": self._used(asked)}

    def _ids_answer(self, asked: _Asked, choices: list[ServedChoice]) -> dict[str, Any]:
        written = []
        for choice in choices:
            log_probs = choice.chat_log_probs() if asked.options.log_probs else None
            written.append(
                {
                    "index": choice.index,
                    "token_ids": list(choice.ids),
                    "finish_reason": choice.finish,
                    "logprobs": log_probs,
                }
            )
        head = self._head(asked, "generate", "gen")
        return {"request_id": head["id"], **head, "choices": written, "usage": self._used(asked)}

    def _prompt_ids(self, asked: _Asked) -> dict[str, Any]:
        return {"prompt_token_ids": asked.ids} if asked.options.token_ids else {}

    async def _chat_events(self, asked: _Asked, client: _Client) -> AsyncIterator[dict[str, Any]]:
        """Yields the parts of a chat; with tools a reply comes as a whole, as it may be a call."""
        options = asked.options
        head = self._head(asked, "chat.completion.chunk", "chatcmpl")
        role = {"role": "assistant", "content": ""}
        first = [{"index": n, "delta": role, "finish_reason": None} for n in range(len(asked.draws))]
        yield head | self._prompt_ids(asked) | {"choices": first}
        async for choice, text, ended in self._parts(asked, client):
            delta: dict[str, Any] = {"content": text} if text and not asked.reply_tools else {}
            finish: str | None = None
            if ended:
                message, finish = self._message(asked, self._choice(asked, choice.index))
                if asked.reply_tools and message["content"]:
                    delta["content"] = message["content"]
                if "tool_calls" in message:
                    delta["tool_calls"] = [{"index": n, **call} for n, call in enumerate(message["tool_calls"])]
            entry: dict[str, Any] = {"index": choice.index, "delta": delta, "finish_reason": finish}
            if options.log_probs:
                entry["logprobs"] = choice.chat_log_probs()
            if options.token_ids:
                entry["token_ids"] = list(choice.ids)
            yield head | {"choices": [entry]}
        if options.usage:
            yield head | {"choices": [], "usage": self._used(asked)}

    async def _plain_events(self, asked: _Asked, client: _Client) -> AsyncIterator[dict[str, Any]]:
        options = asked.options
        head = self._head(asked, "text_completion", "cmpl")
        async for choice, text, ended in self._parts(asked, client):
            entry: dict[str, Any] = {"index": choice.index, "text": text}
            entry["finish_reason"] = choice.finish if ended else None
            entry["logprobs"] = choice.plain_log_probs() if options.log_probs else None
            if options.token_ids:
                entry["token_ids"] = list(choice.ids)
            yield head | {"choices": [entry]}
        if options.usage:
            yield head | {"choices": [], "usage": self._used(asked)}

    async def _parts(self, asked: _Asked, client: _Client) -> AsyncIterator[tuple[ServedChoice, str, bool]]:
        """Yields new tokens of completions, with the text that is sure by now, and whether they are the last.

        All completions are added to the session before the last part of the first one is sent.
        """
        sent = [0] * len(asked.draws)
        shown = [""] * len(asked.draws)
        async for over in client.changes(asked.draws):
            if over:
                self._finish(asked)
            for number, draw in enumerate(asked.draws):
                count = draw.count
                if count == sent[number] and not over:
                    continue
                choice = self._choice(asked, number, sent[number])
                text = choice.text if over else _sure(choice.text, draw.stops)
                yield choice, text.removeprefix(shown[number]), over
                sent[number] = count
                shown[number] = text

    # Episodes.

    @property
    def _episodes(self) -> OpenEpisodes:
        assert isinstance(self._served.sessions, OpenEpisodes)
        return self._served.sessions

    async def _take_episode(self, request: Request) -> Response:
        """Gives an episode to a program: its problem, and the key with which its agent asks for completions."""
        self._check_reward_key(request)
        for wait in (0.0, *[0.1] * int(TAKE_SECONDS / 0.1)):
            await asyncio.sleep(wait)
            episode = self._episodes.take(time.monotonic() + self._served.episode_seconds)
            if episode is not None:
                name = episode.session.name
                key = self._served.keys.completions or "none"
                return JSONResponse(
                    {"id": name, "row": episode.row, "api_key": f"{key}:{name}", "model": self._served.model}
                )
        raise RequestError(503, "no episode is free now; ask again")

    async def _show_episode(self, request: Request) -> Response:
        self._check_reward_key(request)
        episode = self._episodes.episode(request.path_params["name"])
        session = episode.session
        turns = [
            {"prompt_token_ids": list(turn.prompt_ids), "token_ids": list(turn.ids), "text": text}
            for turn, text in zip(session.turns, session.texts, strict=True)
        ]
        return JSONResponse({"id": session.name, "row": episode.row, "over": episode.over, "turns": turns})

    async def _reward(self, request: Request) -> Response:
        """Ends an episode: `{"reward": 1.0}`, `{"rewards": {...}}`, `{"failure": "text"}`, or `{}`: the task scores."""
        self._check_reward_key(request)
        episode = self._episodes.episode(request.path_params["name"])
        body = await self._body(request)
        unknown = sorted(body.keys() - {"reward", "rewards", "failure"})
        if unknown or len(body) > 1:
            raise RequestError(
                400, f"got {', '.join(unknown or sorted(body))}, expected one of reward, rewards and failure", "reward"
            )
        failure = body.get("failure")
        if failure is not None:
            self._episodes.end(episode, failure=("exception", str(failure)[:1000]))
            return JSONResponse({"id": episode.session.name})
        reward = body.get("reward", body.get("rewards"))
        try:
            rewards = None if reward is None else named_rewards(reward)
        except WrongRewardError as error:
            raise RequestError(400, f"reward: {error}", "reward") from None
        self._episodes.end(episode, rewards=rewards)
        return JSONResponse({"id": episode.session.name})


class _EventStream(Response):
    """Server-sent events of a request. A reader that leaves them, or reads none for long, ends it."""

    def __init__(
        self, endpoint: Endpoint, asked: _Asked, client: _Client, events: AsyncIterator[dict[str, Any]]
    ) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        del self.headers["content-length"]
        self._endpoint = endpoint
        self._asked = asked
        self._client = client
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events, and `[DONE]`."""

        async def write(data: str) -> None:
            async with asyncio.timeout(SEND_SECONDS):
                body = f"data: {data}\n\n".encode()
                await send({"type": "http.response.body", "body": body, "more_body": True})

        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                async for event in self._events:
                    await write(json.dumps(event, ensure_ascii=False))
                await write("[DONE]")
            except RequestError as error:
                await write(json.dumps(error_body(error)))
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (_ClientGoneError, TimeoutError, OSError):
            self._endpoint.clients_gone += 1
        finally:
            self._endpoint._leave(self._asked, self._client)


def _bearer(request: Request) -> str | None:
    kind, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" and key.strip() else None


def _equal(sent: str | None, key: str | None) -> bool:
    """Compares keys in constant time."""
    return sent is not None and key is not None and hmac.compare_digest(sent.encode(), key.encode())


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
