"""The routes of an endpoint, in one asyncio loop; the engine draws in another thread."""

import asyncio
import dataclasses
import functools
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from train.config.errors import UserError
from train.data.reward_call import WrongRewardError, named_rewards
from train.rollouts.endpoint.answers import Event, chat_body, chat_events, ids_body, plain_body, plain_events
from train.rollouts.endpoint.completions import ClientGoneError, CompletionRequest, Served, WaitingClient
from train.rollouts.endpoint.generator import Generator
from train.rollouts.endpoint.sessions import OpenEpisodes, RequestError, Session
from train.rollouts.endpoint.wire import (
    Body,
    ServedChoice,
    error_body,
    read_ids,
    read_messages,
    read_options,
    read_tools,
)

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


class AsciiResponse(JSONResponse):
    """JSON in ASCII: a lone surrogate, in a tool call or in the record of a problem, has no UTF-8."""

    def render(self, content: Any) -> bytes:
        """Writes the content."""
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


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
            except ClientGoneError:
                self.clients_gone += 1
                refused = RequestError(499, "the client closed the connection")
            except TimeoutError:
                refused = RequestError(504, f"no answer within {ANSWER_SECONDS:g} s")
            except Exception:
                log.exception("the endpoint has a fault")
                refused = RequestError(500, "the endpoint has a fault, which its log shows")
            headers = {"Retry-After": "1"} if refused.status in (429, 503) else {}
            return AsciiResponse(error_body(refused), refused.status, headers)

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
            raise ClientGoneError from error
        try:
            body = json.loads(bytes(parts)) if parts else {}
        except (ValueError, RecursionError) as error:
            raise RequestError(400, f"body: got no JSON: {error}") from None
        if not isinstance(body, dict):
            raise RequestError(400, "body: expected a JSON object")
        return body

    # Completions.

    async def _health(self, request: Request) -> Response:
        return AsciiResponse({"status": "ok", "open": self._generator.open, "served": self._generator.served})

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
        return AsciiResponse({"object": "list", "data": [model]})

    async def _chat(self, request: Request) -> Response:
        body, session = await self._open(request)
        options = read_options(body, self._served.sampling, chat=True)
        messages = read_messages(body)
        tools, reply_tools = read_tools(body)
        ids = await asyncio.to_thread(session.prompt_ids, self._served.tokenizer, messages, tools)
        asked = CompletionRequest(self._served, session, ids, options, messages, tools, reply_tools)
        return await self._answer(request, asked, chat_body, chat_events)

    async def _complete(self, request: Request) -> Response:
        body, session = await self._open(request)
        options = read_options(body, self._served.sampling, chat=False)
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, str):
            said = [{"role": "user", "content": prompt}]
            tokenizer = self._served.tokenizer
            first = [] if tokenizer.bos_id is None else [tokenizer.bos_id]

            def tokenize() -> list[int]:
                if tokenizer.has_template:
                    return [*first, *tokenizer.encode(prompt)]
                return tokenizer.conversation_ids(said)

            try:
                ids = await asyncio.to_thread(tokenize)
            except UserError as error:
                raise RequestError(400, str(error), "prompt") from error
        else:
            ids = read_ids({"prompt": prompt}, "prompt", self._served.vocab_size)
        asked = CompletionRequest(self._served, session, ids, options)
        return await self._answer(request, asked, plain_body, plain_events)

    async def _generate(self, request: Request) -> Response:
        body, session = await self._open(request)
        chosen = body.get("sampling_params") or {}
        if not isinstance(chosen, dict):
            raise RequestError(400, "sampling_params: expected an object", "sampling_params")
        options = read_options(chosen, self._served.sampling, chat=False)
        if body.get("stream") or options.stream:
            raise RequestError(400, "stream: got true, expected false; /v1/completions streams", "stream")
        ids = read_ids(body, "token_ids", self._served.vocab_size)
        options = dataclasses.replace(options, ids_as_tokens=True)
        return await self._answer(request, CompletionRequest(self._served, session, ids, options), ids_body)

    async def _open(self, request: Request) -> tuple[Body, Session]:
        """Checks the key of a request, reads its body, and finds its session.

        Raises:
          RequestError: the key, the body, its model or the session is wrong.
        """
        name = self._session_name(request)
        body = await self._body(request)
        model = body.get("model")
        if model not in (None, self._served.model):
            raise RequestError(404, f"model: got {model!r}, expected {self._served.model!r}", "model")
        user = body.get("user")
        return body, self._served.sessions.find(name or (user if isinstance(user, str) and user else None))

    async def _answer(
        self,
        request: Request,
        asked: CompletionRequest,
        body: Callable[[CompletionRequest, Sequence[ServedChoice]], Event],
        events: Callable[[CompletionRequest, WaitingClient], AsyncIterator[Event]] | None = None,
    ) -> Response:
        """Draws for a request, and answers it at once or as a stream."""
        client = WaitingClient(request.receive)
        try:
            asked.begin(self._generator, client.tell)
        except RequestError:
            client.close()
            raise
        if asked.options.stream and events is not None:
            return _EventStream(self, asked, client, events(asked, client))
        try:
            async for _ in client.changes(asked.draws):
                pass
            choices = asked.finish()
        finally:
            self._leave(asked, client)
        return AsciiResponse(body(asked, choices))

    def _leave(self, asked: CompletionRequest, client: WaitingClient) -> None:
        client.close()
        asked.end(self._generator)

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
            if await request.is_disconnected():
                raise ClientGoneError
            episode = self._episodes.take(time.monotonic() + self._served.episode_seconds)
            if episode is not None:
                name = episode.session.name
                key = self._served.keys.completions or "none"
                return AsciiResponse(
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
        return AsciiResponse({"id": session.name, "row": episode.row, "over": episode.over, "turns": turns})

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
            return AsciiResponse({"id": episode.session.name})
        reward = body.get("reward", body.get("rewards"))
        try:
            rewards = None if reward is None else named_rewards(reward)
        except WrongRewardError as error:
            raise RequestError(400, f"reward: {error}", "reward") from None
        self._episodes.end(episode, rewards=rewards)
        return AsciiResponse({"id": episode.session.name})


class _EventStream(Response):
    """Server-sent events of a request. A reader that leaves them, or reads none for long, ends it."""

    def __init__(
        self, endpoint: Endpoint, asked: CompletionRequest, client: WaitingClient, events: AsyncIterator[Event]
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
                    await write(json.dumps(event))
                await write("[DONE]")
            except RequestError as error:
                await write(json.dumps(error_body(error)))
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (ClientGoneError, TimeoutError, OSError):
            self._endpoint.clients_gone += 1
        finally:
            self._endpoint._leave(self._asked, self._client)


def _bearer(request: Request) -> str | None:
    kind, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" and key.strip() else None


def _equal(sent: str | None, key: str | None) -> bool:
    """Compares keys in constant time."""
    return sent is not None and key is not None and hmac.compare_digest(sent.encode(), key.encode())
