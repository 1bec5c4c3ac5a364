"""An HTTP client that bounds every answer and retries requests, for servers that restart or are overloaded."""

import asyncio
import contextlib
import itertools
import json
import random
import re
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

import httpx
from pydantic_core import from_json

from train.rollouts.server.answers import AnswerError
from train.rollouts.server.body import ENCODINGS, BrokenBodyError, TooLongError, read_body
from train.rollouts.source import SourceError

# Statuses worth a retry: time-outs, overload, a server that restarts behind a proxy.
RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})
SUCCESSES = range(200, 300)
FIRST_WAIT = 0.5
LONGEST_WAIT = 30.0
CONNECT_SECONDS = 10.0
MOST_BYTES = 2**24
"""Limit of an answer that has no limit of its own."""
MOST_ERROR_BYTES = 2**16
"""Limit of the message of a refusal."""

SHOWN_OF_KEY = 8
"""A part of the key of this size or more is not shown."""

_Parsed = TypeVar("_Parsed")


def wait_before(attempt: int, chance: float, retry_after: float | None = None) -> float:
    """Computes the seconds before retry 1, 2, ...: exponential backoff with equal jitter.

    `w / 2 * (1 + chance)` with `w = min(0.5 * 2 ** (attempt - 1), 30)`, or `retry_after` if that is longer, at most 30.

    Example:
      >>> [wait_before(attempt, chance=1.0) for attempt in (1, 2, 3, 9)]
      [0.5, 1.0, 2.0, 30.0]
      >>> wait_before(1, chance=0.0), wait_before(1, chance=0.0, retry_after=5.0)
      (0.25, 5.0)
    """
    longest = min(FIRST_WAIT * 2 ** (attempt - 1), LONGEST_WAIT)
    return max(longest / 2 * (1 + chance), min(retry_after or 0.0, LONGEST_WAIT))


POLL_SECONDS = 0.25
"""A wait for answers hears of a signal within this time."""


def wait_for(future: Future[_Parsed]) -> _Parsed:
    """Returns the result of a future; an interrupt of the caller cancels it."""
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def acknowledged(content: bytes) -> None:
    """Reads an answer that says, in any form, that the request was done.

    Raises:
      AnswerError: for a page of HTML, which comes from a proxy.
    """
    if content.lstrip()[:1] == b"<":
        raise AnswerError(f"the answer is a page: {content[:1000].decode(errors='replace')}", retry=True)


def without_key(text: str, key: str) -> str:
    """Replaces the key, and every part of it of at least 8 characters, by `[key]`.

    Example:
      >>> without_key("no such key: sk-0123456789ab...", "sk-0123456789abcdef")
      'no such key: [key]...'
    """
    size = min(SHOWN_OF_KEY, len(key))
    parts = {key[start : start + size] for start in range(len(key) - size + 1)}
    hidden = bytearray(len(text))
    for start in range(len(text) - size + 1):
        if text[start : start + size] in parts:
            hidden[start : start + size] = b"\1" * size
    runs = itertools.groupby(range(len(text)), lambda index: hidden[index])
    return "".join("[key]" if secret else "".join(text[index] for index in run) for secret, run in runs)


class AttemptError(Exception):
    """Raised for an attempt of a request that another attempt may mend.

    Attributes:
      retry_after: seconds that the server asks to wait.
    """

    def __init__(self, text: str, retry_after: float | None = None) -> None:
        super().__init__(text)
        self.retry_after = retry_after


class StaleError(SourceError):
    """Raised for an answer from other weights than the expected ones."""


class RefusedError(SourceError):
    """Raised for a request that a server refuses; `status` is that of the answer."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


class Client:
    """Requests to servers, whose answers have limits of bytes and of time; safe to call from several threads.

    Failed connections, time-outs, the statuses in `RETRIED` and answers that say so (`AnswerError.retry`) are retried;
    any other error raises at once. Errors name the address, the request, the number of attempts and the elapsed time.
    They never show the key, even if the server repeats it.

    The requests run in an event loop of their own thread: only there a limit of time holds whatever a server sends,
    also one byte of a header now and then.
    """

    def __init__(
        self,
        *,
        timeout: float,
        retries: int,
        connections: int = 8,
        key: str | None = None,
        field: str = "rollout.source.url",
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.retries = retries
        self._timeout = timeout
        self._sleep = sleep
        self._key = key
        self._field = field
        self._connections = asyncio.Semaphore(connections)
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        try:
            self._client = httpx.AsyncClient(
                transport=transport,
                timeout=httpx.Timeout(None, connect=min(timeout, CONNECT_SECONDS)),
                # `request` bounds what is queued; what controls a server has no part of that bound.
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=connections),
                headers={"Accept-Encoding": ", ".join(ENCODINGS), **headers},
            )
        except (ImportError, OSError, ValueError, httpx.InvalidURL) as error:
            # An address that is not valid may be shown with a part of its password.
            reason = "" if isinstance(error, httpx.InvalidURL) else f": {error}"
            raise SourceError(
                "rollout.source.url: cannot use the proxies or certificates that the environment names (HTTP_PROXY, "
                f"HTTPS_PROXY, ALL_PROXY, SSL_CERT_FILE){reason}"
            ) from None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="requests", daemon=True)
        self._thread.start()

    def get(self, url: str, read: Callable[[bytes], _Parsed]) -> _Parsed:
        """Returns the answer, read by `read`, which raises `AnswerError`."""
        return self.run(self.request("GET", "", None, read, lambda: contextlib.nullcontext(url)))

    def post(self, url: str, body: Mapping[str, Any], read: Callable[[bytes], _Parsed]) -> _Parsed:
        """Returns the answer, read by `read`, which raises `AnswerError`."""
        return self.run(self.request("POST", "", body, read, lambda: contextlib.nullcontext(url)))

    def start(self, work: Coroutine[Any, Any, _Parsed]) -> Future[_Parsed]:
        """Begins the work in the event loop of the requests, for `wait_for`; `close` ends what nobody waits for."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, _Parsed]) -> _Parsed:
        """Runs work in the event loop of the requests; an interrupt of the caller cancels it."""
        return wait_for(self.start(work))

    async def request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None,
        read: Callable[[bytes], _Parsed],
        server: Callable[[], AbstractAsyncContextManager[str]],
        *,
        most_bytes: int = MOST_BYTES,
        attempts: int | None = None,
        fresh: bool = False,
        queued: bool = False,
    ) -> _Parsed:
        """Sends a request until it is answered, refused, or has failed too often.

        Args:
          method: of HTTP.
          path: after the address of the server.
          body: JSON, or a function that makes it for each attempt; None for none.
          read: reads the answer, or raises `AnswerError`.
          server: called for each attempt, which it encloses: yields the address when the attempt may begin, and may
            turn an error into another.
          most_bytes: limit of the answer, also after decompression.
          attempts: the most attempts; None: one more than the retries of the client.
          fresh: closes the connection after the answer, so that a balancer of connections may choose another server.
          queued: waits until fewer than `connections` queued requests are under way.

        Raises:
          SourceError: no attempt was answered, or an answer cannot be used.
        """
        start = time.monotonic()
        attempts = self.retries + 1 if attempts is None else attempts
        async with self._connections if queued else contextlib.nullcontext():
            for attempt in range(1, attempts + 1):
                try:
                    async with server() as url:
                        content = body() if callable(body) else body
                        exchange = self._exchange(method, url + path, content, most_bytes=most_bytes, fresh=fresh)
                        return await self._attempt(f"{method} {url}{path}", exchange, read)
                except AttemptError as error:
                    last = str(error)
                    retry_after = error.retry_after
                if attempt < attempts:
                    await self._sleep(wait_before(attempt, random.random(), retry_after))
        times = "once" if attempts == 1 else f"{attempts} times"
        raise self._error(
            f"{self._field}: {method} {url}{path} failed {times} in {time.monotonic() - start:.0f} s "
            f"(rollout.source.timeout {self._timeout:g} s, rollout.source.retries {self.retries}); last: {last}"
        )

    def hurry(self) -> None:
        """Gives later requests one attempt of a few seconds: the run ends, and its server may hang."""
        self.retries = 0
        self._timeout = min(self._timeout, CONNECT_SECONDS)

    def close(self) -> None:
        """Ends the requests that are under way, and closes the connections."""
        if self._loop.is_closed():
            return
        self.run(self._end())
        self.run(self._loop.shutdown_asyncgens())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def clean(self, text: str, longest: int = 1000) -> str:
        """Makes text of a server fit to be shown: one line of printable characters, shortened, without the key."""
        # The key goes first: a part of it would stay if the text were cut before.
        shown = " ".join((without_key(text, self._key) if self._key else text).split())[:longest]
        return "".join(letter if letter.isprintable() else "?" for letter in shown)

    async def _end(self) -> None:
        requests = asyncio.all_tasks() - {asyncio.current_task()}
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)
        await self._client.aclose()

    async def _attempt(
        self, request: str, exchange: Awaitable[tuple[int, float | None, bytes]], read: Callable[[bytes], _Parsed]
    ) -> _Parsed:
        """Awaits one exchange, and reads its answer; an error that another attempt may mend is an `AttemptError`."""
        try:
            status, retry_after, content = await exchange
            if status in SUCCESSES:
                return read(content)
        except TimeoutError:
            raise AttemptError("no complete answer in time") from None
        except (httpx.HTTPError, OSError) as error:
            raise AttemptError(self.clean(_reason(error), 300)) from None
        except BrokenBodyError as error:
            raise AttemptError(f"the answer has {error}") from None
        except AnswerError as error:
            text = self.clean(str(error), 500)
            if error.retry:
                raise AttemptError(text) from None
            if error.stale:
                raise StaleError(self.clean(f"rollout.source: {request}: {text}")) from None
            raise self._error(f"rollout.source: {text}") from None
        except TooLongError as error:
            raise self._error(
                f"rollout.source.max_response_bytes: the answer to {request} has more than {error.limit} bytes"
            ) from None
        text = f"status {status}: {self.clean(_message(content), 300) or 'no message'}"
        if status in RETRIED:
            raise AttemptError(text, retry_after)
        raise RefusedError(self.clean(f"rollout.source: {request} was refused with {text}"), status)

    async def _exchange(
        self, method: str, url: str, body: Mapping[str, Any] | None, *, most_bytes: int, fresh: bool
    ) -> tuple[int, float | None, bytes]:
        """Sends one request; returns the status, the wait that the server asks for, and the body."""
        # ASCII: a lone surrogate in a stop text has no UTF-8.
        content = None if body is None else json.dumps(body).encode("ascii")
        headers = {} if body is None else {"Content-Type": "application/json"}
        if fresh:
            headers["Connection"] = "close"
        async with (
            asyncio.timeout(self._timeout),
            self._client.stream(method, url, content=content, headers=headers) as response,
        ):
            wait = _retry_after(response.headers.get("Retry-After", ""))
            if response.status_code in SUCCESSES:
                return response.status_code, wait, await read_body(response, most_bytes)
            try:
                message = await read_body(response, MOST_ERROR_BYTES)
            except (TooLongError, BrokenBodyError):
                message = b"a message that is too long or damaged"
            return response.status_code, wait, message

    def _error(self, text: str) -> SourceError:
        return SourceError(self.clean(text))


def _reason(error: BaseException) -> str:
    """Describes an error by its name and its first cause, which names the failed call."""
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    if isinstance(cause, BaseExceptionGroup):
        cause = cause.exceptions[0]
    return f"{type(error).__name__}: {cause}".strip(": ")


def _message(content: bytes) -> str:
    """Extracts the error message of a server, in any of the usual forms."""
    try:
        parsed = from_json(content)
    except ValueError:
        parsed = content.decode(errors="replace")
    inner = parsed.get("error", parsed) if isinstance(parsed, dict) else parsed
    text = inner.get("message", inner) if isinstance(inner, dict) else inner
    return str(text)


def _retry_after(value: str) -> float | None:
    """Parses the seconds of a Retry-After header; ignores its other form, a date."""
    return float(value) if re.fullmatch("[0-9]{1,9}", value) else None
