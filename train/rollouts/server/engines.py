"""A pool of servers that sample: control goes to each of them, requests to the least busy one or to a router."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from train.config.errors import UserError, warn
from train.config.rollout import OpenAISourceSection
from train.distributed.exchange import exchange_json
from train.rollouts.server.answers import read_models, read_workers
from train.rollouts.server.client import CONNECT_SECONDS, AttemptError, Client, RefusedError, StaleError
from train.rollouts.server.control import READS, Endpoints, Server, balancer_hint, check_version, endpoints_of
from train.rollouts.source import SourceError

LEAVE_OUT = "set rollout.source.on_engine_failure=drop to go on without it"

_Parsed = TypeVar("_Parsed")
Ask = Callable[[], tuple[Mapping[str, Any], Callable[[bytes], _Parsed]]]
"""Called when a request is sent: returns its JSON, and what reads the answer or raises `AnswerError`."""


class Engines:
    """The servers of `rollout.source.urls`, or the one of `url`.

    An engine that fails a control call, or has other weights than it was given, ends the run or leaves the pool, as
    `on_engine_failure` says. An engine that fails a request is avoided until the end of the batch, and judged then.

    Attributes:
      urls: the addresses in use.
      endpoints: of the program that all of them run.
      label: of the weights that each of them has to have; None before the first update.
      versions: number of RL steps of the weights by their label, of all that were sent.
      labels_in_use: of the weights that requests of any process may still name, as of the last `agree`.
    """

    def __init__(self, client: Client, section: OpenAISourceSection) -> None:
        """Takes the client of the requests, and the addresses."""
        self.urls = [url.rstrip("/") for url in section.urls or (section.url or "",)]
        self.endpoints: Endpoints = endpoints_of("")
        self.label: str | None = None
        self.versions: dict[str, int] = {}
        self.labels_in_use: set[str] = set()
        self._client = client
        self._router = section.router and section.router.rstrip("/")
        self._drops = section.on_engine_failure == "drop"
        self._keeps = section.in_flight == "keep"
        self._is_pool = bool(section.urls)
        self._of_adapter = False
        self._lost: set[str] = set()
        self._down: set[str] = set()
        self._under_way: Counter[str] = Counter()
        self._sent: Counter[str] = Counter()
        self._warned = False
        # One batch at a time leaves engines out; others wait until the router has none of them.
        self._leaving = asyncio.Lock()
        # Of the event loop alone: what is under way, by the label of its weights, and what waits to go on.
        self._users: Counter[str | None] = Counter()
        self._unfinished = 0
        self._may_go_on = asyncio.Event()
        self._may_go_on.set()
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @property
    def metrics(self) -> Mapping[str, float]:
        """The number of engines in use, for a pool."""
        return {"rollout_engines": float(len(self.urls))} if self._is_pool else {}

    def models(self) -> dict[str, str]:
        """Returns the models that every server has, with their owners, and takes the endpoints of these.

        Raises:
          UserError: the servers run different programs; `SourceError` if one is not reachable.
        """
        addresses = [*self.urls, *([self._router] if self._router else [])]
        listed = [self._client.get(f"{url}/v1/models", read_models) for url in addresses]
        common = {name: owner for name, owner in listed[0].items() if all(name in models for models in listed)}
        programs = {endpoints_of(owner).name for models in listed for owner in models.values()}
        if len(programs) > 1:
            raise UserError(f"rollout.source.urls: got servers of {' and '.join(sorted(programs))}, expected one kind")
        if common:
            self.endpoints = endpoints_of(next(iter(common.values())))
            return common
        return {f"{name} ({url})": "" for url, models in zip(addresses, listed, strict=True) for name in models}

    def check_routes(self) -> None:
        """Checks that each address is one server, and the router has as many as there are.

        Raises:
          UserError: an address is a router, or the router has others.
        """

        async def count(url: str) -> int:
            server = Server(self._client, url)
            counts = [0]
            for path in ("/list_workers", "/workers"):
                with contextlib.suppress(SourceError):
                    counts.append(await server.read_if_there(path, read_workers, attempts=1) or 0)
            return max(counts)

        for url in self.urls:
            if (workers := self._client.run(count(url))) > 1:
                field = "rollout.source.urls" if self._is_pool else "rollout.source.url"
                raise UserError(f"{field}: got the address of a router with {workers} servers; {balancer_hint(url)}")
        if self._router and (workers := self._client.run(count(self._router))) not in (0, len(self.urls)):
            raise UserError(
                f"rollout.source.router: {self._router} has {workers} servers, but rollout.source.urls has "
                f"{len(self.urls)}; list every server behind the router, and no other"
            )

    def agree(self) -> None:
        """Takes the engines out that another process has lost, and collects the labels that requests may still name.

        Raises:
          SourceError: none is left.
        """
        parts = exchange_json("engines", [sorted(self._lost), sorted(self._client.run(self._labels_of_requests()))])
        self.labels_in_use = {label for _, labels in parts for label in labels}
        for url in sorted({url for lost, _ in parts for url in lost}):
            if url in self.urls:
                if len(self.urls) == 1:
                    raise SourceError(f"rollout.source.urls: no engine is left; the last one to fail was {url}")
                self.urls.remove(url)
            self._lost.add(url)

    def everywhere(self, call: Callable[[Server], Awaitable[Any]]) -> None:
        """Calls every engine at the same time, and waits for all; an engine that fails ends the run or is left out.

        Raises:
          SourceError: as `on_engine_failure` says, or no engine is left.
        """
        self._client.run(self._everywhere(call))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Pauses every engine for an update; at the end resumes all of them, also those that failed.

        Before that their caches forget what the old weights computed.
        """
        urls = list(self.urls)
        try:
            self.everywhere(lambda server: self.endpoints.pause(server, keep=self._keeps))
            yield
            self.everywhere(lambda server: self.endpoints.forget_cache(server, keep=self._keeps))
        except BaseException:
            self._client.run(self._resume_if_possible(urls))
            raise
        self._client.run(self._resume_if_possible([url for url in urls if url not in self.urls]))
        self.everywhere(self.endpoints.resume)

    @contextlib.contextmanager
    def held_back(self) -> Iterator[None]:
        """Waits for the requests of this process that are under way, if they are not kept; others begin afterwards."""
        self._client.run(self._hold_back())
        try:
            yield
        finally:
            self._client.run(self._go_on())

    def announce(self, label: str, version: int) -> None:
        """Notes the label of weights that are about to be sent, which answers may tell from then on."""
        self.versions[label] = version

    def expect(self, label: str, version: int, *, adapter: bool = False) -> None:
        """Sets the label of the weights that every engine has to have from now on, and their number of RL steps."""
        self.versions[label] = version
        self.label = label
        self._of_adapter = adapter

    def confirm(self, label: str, version: int, *, adapter: bool = False) -> None:
        """Expects the label, as `expect` does, and reads it back from every engine."""
        self.expect(label, version, adapter=adapter)
        self._client.run(self._judge(self.urls, reads=READS))

    def complete(
        self,
        path: str,
        asks: Sequence[Ask[_Parsed]],
        *,
        most_bytes: int,
        url: str | None = None,
        place: int | None = None,
    ) -> Future[list[_Parsed]]:
        """Begins to post requests, and returns at once; the first error ends all.

        A request that an engine fails goes to another. At the end each engine tells its weights again, and requests
        that an engine with other weights answered are repeated.

        Args:
          path: path of the requests.
          asks: one for each request.
          most_bytes: limit of each answer, also after decompression.
          url: the engine to ask; None: any.
          place: number of the engine to prefer, modulo those that are ready; None: the least busy one.

        Returns:
          The answers to come, in order, for `wait_for`.
        """

        async def answers() -> list[_Parsed]:
            self._unfinished += 1
            try:
                return await self._answers(path, asks, most_bytes, url, place)
            finally:
                self._unfinished -= 1

        return self._client.start(answers())

    async def _answers(
        self,
        path: str,
        asks: Sequence[Ask[_Parsed]],
        most_bytes: int,
        url: str | None,
        place: int | None,
    ) -> list[_Parsed]:
        answers: dict[int, tuple[str, _Parsed]] = {}

        async def ask(number: int) -> None:
            tried: list[str] = [] if url is None else [url]
            attempts = self._client.retries + (1 if url or self._router else len(self.urls))
            reading: list[Callable[[bytes], _Parsed]] = []

            def body() -> Mapping[str, Any]:
                content, read_answer = asks[number]()
                reading[:] = [read_answer]
                return content

            def read(content: bytes) -> _Parsed:
                return reading[0](content)

            answer = await self._client.request(
                "POST",
                path,
                body,
                read,
                lambda: contextlib.nullcontext(url) if url else self._choose(tried, place),
                most_bytes=most_bytes,
                attempts=attempts,
                queued=True,
            )
            answers[number] = tried[-1], answer

        while missing := [number for number in range(len(asks)) if number not in answers]:
            before = len(self.urls)
            try:
                async with asyncio.TaskGroup() as group:
                    for number in missing:
                        group.create_task(ask(number))
            except BaseExceptionGroup as group_error:
                raise group_error.exceptions[0] from None
            if url is not None:
                break
            async with self._under_way_with_weights():
                await self._judge({*self.urls} if self._router else {asked for asked, _ in answers.values()})
            # Another batch may have judged meanwhile.
            if not self._router:
                answers = {number: pair for number, pair in answers.items() if pair[0] in self.urls}
            elif len(self.urls) < before:
                answers = {}  # nobody knows which requests it sent to the lost engine
        return [answers[number][1] for number in range(len(asks))]

    @contextlib.asynccontextmanager
    async def _under_way_with_weights(self) -> AsyncIterator[None]:
        """Waits until nothing is held back, and encloses what needs the weights of then until it ends."""
        await self._may_go_on.wait()
        label = self.label
        self._users[label] += 1
        self._is_idle.clear()
        try:
            yield
        finally:
            self._users[label] -= 1
            if not self._users.total():
                self._is_idle.set()

    async def _hold_back(self) -> None:
        self._may_go_on.clear()
        if not self._keeps:
            await self._is_idle.wait()

    async def _go_on(self) -> None:
        self._may_go_on.set()

    async def _labels_of_requests(self) -> set[str]:
        """Returns the labels of what is under way, and the newest one if a request is still to be sent."""
        labels = {label for label, count in self._users.items() if count}
        return {label for label in labels | ({self.label} if self._unfinished else set()) if label is not None}

    @contextlib.asynccontextmanager
    async def _choose(self, tried: list[str], place: int | None) -> AsyncIterator[str]:
        """Yields the address for an attempt; an engine that fails it is avoided by later ones."""
        async with self._under_way_with_weights():
            if self._router:
                url = self._router
            else:
                ready = [url for url in self.urls if url not in self._down] or self.urls
                others = [url for url in ready if url not in tried] or ready
                url = min(others, key=lambda url: (self._under_way[url], self._sent[url]))
                url = url if place is None else others[place % len(others)]
            tried.append(url)
            self._under_way[url] += 1
            self._sent[url] += 1
            try:
                yield url
                self._down.discard(url)
            except AttemptError:
                self._down.add(url)
                raise
            except (StaleError, RefusedError) as error:
                lacks_adapter = isinstance(error, RefusedError) and error.status == 404 and self._of_adapter
                if isinstance(error, RefusedError) and not lacks_adapter:
                    raise
                if self._drops and not self._router and len(self.urls) > 1:
                    self._down.add(url)
                    raise AttemptError(str(error)) from None
                if self._is_pool:
                    raise SourceError(f"{error}{'' if self._drops else f'; {LEAVE_OUT}'}") from None
                raise SourceError(f"{error}; it restarted, or {balancer_hint(url)}") from None
            finally:
                self._under_way[url] -= 1

    async def _everywhere(self, call: Callable[[Server], Awaitable[Any]], urls: Collection[str] | None = None) -> None:
        asked = [url for url in self.urls if urls is None or url in urls]
        results = await asyncio.gather(*(call(Server(self._client, url)) for url in asked), return_exceptions=True)
        failed = {url: result for url, result in zip(asked, results, strict=True) if isinstance(result, BaseException)}
        for error in failed.values():
            if not isinstance(error, SourceError):
                raise error
        async with self._leaving:
            failed = {url: error for url, error in failed.items() if url in self.urls}
            if not failed:
                return
            left = len(self.urls) - len(failed)
            text = "; ".join(str(error) for error in failed.values())
            if not self._is_pool:
                raise SourceError(text) from None
            if not self._drops or not left:
                hint = f"; {left} of {len(self.urls)} engines are left, {LEAVE_OUT}" if left else "; no engine is left"
                raise SourceError(f"{text}{hint}") from None
            for url, error in failed.items():
                await self._leave_out(url, error)

    async def _leave_out(self, url: str, error: BaseException) -> None:
        """Takes an engine out of the pool, and out of the router: it may still answer, with old weights."""
        if url not in self.urls:
            return  # `agree` was first
        self.urls.remove(url)
        self._lost.add(url)
        self._down.discard(url)
        left = len(self.urls)
        warn(f"rollout.source.urls: {url} is left out from now on, {left} of {left + 1} servers remain: {error}")
        if self._router:
            router = Server(self._client, self._router)
            # Refused if another process was first: the list tells.
            with contextlib.suppress(SourceError):
                await router.post(f"/remove_worker?url={url}", {}, attempts=1)
            routed = await router.read_if_there("/list_workers", read_workers)
            if routed != left:
                shown = "does not tell its servers" if routed is None else f"still has {routed} servers"
                raise SourceError(f"{error}; and rollout.source.router {self._router} {shown}, expected {left}")

    async def _judge(self, urls: Collection[str], *, reads: int = 1) -> None:
        """Asks engines for the label of their weights, and those that failed a request whether they are there."""
        label = self.label

        async def check(server: Server) -> None:
            if label is None:
                await server.get("/v1/models", read_models)
            elif not await check_version(self.endpoints, server, label, adapter=self._of_adapter, reads=reads):
                self._warn_unchecked(server.url)

        await self._everywhere(check, {*self._down} if label is None else {*urls, *self._down})
        self._down.clear()
        if self._router and label is not None:
            router = Server(self._client, self._router)
            await check_version(self.endpoints, router, label, adapter=self._of_adapter, reads=READS)

    def _warn_unchecked(self, url: str) -> None:
        if not self._warned:
            self._warned = True
            warn(
                f"rollout.source: {url} does not tell which weights it has (GET /weight_info), so nothing checks that "
                "completions are from the newest; use a newer vLLM with VLLM_SERVER_DEV_MODE=1"
            )

    async def _resume_if_possible(self, urls: Sequence[str]) -> None:
        async def resume(url: str) -> None:
            with contextlib.suppress(SourceError, TimeoutError):
                async with asyncio.timeout(CONNECT_SECONDS):
                    await self.endpoints.resume(Server(self._client, url))

        await asyncio.gather(*(resume(url) for url in urls))
