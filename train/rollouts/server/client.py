"""A JSON client that retries requests, for servers that restart or are overloaded."""

import json
import random
import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx

from train.rollouts.source import SourceError

# Statuses worth a retry: time-outs, overload, a server that restarts behind a proxy.
RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0
CONNECT_SECONDS = 10.0


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


class Client:
    """JSON requests to one server; safe to call from several threads.

    Failed connections, time-outs and the statuses in `RETRIED` are retried; any other error status raises at once.
    Errors name the address, the request, the number of attempts and the elapsed time.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float,
        retries: int,
        connections: int = 8,
        key: str | None = None,
        sleep: Callable[[float], None] = time.sleep,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._timeout, self._retries, self._sleep = timeout, retries, sleep
        self._client = httpx.Client(
            transport=transport,
            timeout=httpx.Timeout(timeout, connect=min(timeout, CONNECT_SECONDS), pool=None),
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
            headers={} if key is None else {"Authorization": f"Bearer {key}"},
        )

    def get(self, path: str) -> Any:
        """Returns the JSON of the response, or its text if it is no JSON."""
        return self._request("GET", path, None)

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Returns the JSON of the response, or its text if it is no JSON."""
        return self._request("POST", path, body)

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()

    def _request(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        start, attempts, last = time.monotonic(), self._retries + 1, ""
        for attempt in range(1, attempts + 1):
            retry_after = None
            try:
                response = self._client.request(method, self.url + path, json=body)
            except httpx.TransportError as error:
                last = f"{type(error).__name__}: {error}".strip(": ")
            else:
                if response.is_success:
                    return _content(response)
                last = f"status {response.status_code}: {_message(response)}"
                if response.status_code not in RETRIED:
                    raise SourceError(f"rollout.source: {method} {self.url}{path} was refused with {last}")
                retry_after = _retry_after(response)
            if attempt < attempts:
                self._sleep(wait_before(attempt, random.random(), retry_after))
        times = "once" if attempts == 1 else f"{attempts} times"
        raise SourceError(
            f"rollout.source.url: {method} {self.url}{path} failed {times} in {time.monotonic() - start:.0f} s "
            f"(rollout.source.timeout {self._timeout:g} s, rollout.source.retries {self._retries}); last: {last}"
        )


def _content(response: httpx.Response) -> Any:
    try:
        return response.json()
    except json.JSONDecodeError:
        return response.text


def _message(response: httpx.Response) -> str:
    """Extracts the error message of a server, in any of the usual forms, on one line."""
    content = _content(response)
    inner = content.get("error", content) if isinstance(content, dict) else content
    text = inner.get("message", inner) if isinstance(inner, dict) else inner
    return " ".join(str(text).split())[:300] or "no message"


def _retry_after(response: httpx.Response) -> float | None:
    """Parses the seconds of a Retry-After header; ignores its other form, a date."""
    value = response.headers.get("Retry-After", "")
    return float(value) if value.isdigit() else None
