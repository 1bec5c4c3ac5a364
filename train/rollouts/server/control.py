"""Control of one server: weights, adapters, pauses and the label of its weights, by the endpoints of vLLM or SGLang."""

import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from train.rollouts.server.answers import AnswerError, read_models, read_version
from train.rollouts.server.client import Client, RefusedError, acknowledged
from train.rollouts.source import SourceError

READS = 8
"""Times that a label is read, each over its own connection: a balancer in front of servers sends some elsewhere."""
LORA_HINT = "start vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=true"
DEVELOPMENT_HINT = "start vLLM with VLLM_SERVER_DEV_MODE=1"
FOLDER_HINT = "rollout.source.folder has to be a path that trainer and server both see"

_Parsed = TypeVar("_Parsed")


class Server:
    """Requests to one address."""

    def __init__(self, client: Client, url: str) -> None:
        self.client = client
        self.url = url

    async def get(self, path: str, read: Callable[[bytes], _Parsed], **options: Any) -> _Parsed:
        """Returns the answer, read by `read`; options are those of `Client.request`."""
        return await self.client.request("GET", path, None, read, self._address, **options)

    async def post(
        self, path: str, body: Mapping[str, Any], read: Callable[[bytes], Any] = acknowledged, **options: Any
    ) -> Any:
        """Posts a request; options are those of `Client.request`."""
        return await self.client.request("POST", path, body, read, self._address, **options)

    async def read_if_there(self, path: str, read: Callable[[bytes], _Parsed], **options: Any) -> _Parsed | None:
        """Returns an answer over a connection of its own; None if the server has no such path, or answers otherwise."""

        def parsed(content: bytes) -> _Parsed | None:
            try:
                return read(content)
            except (AnswerError, ValueError, KeyError, TypeError):
                return None

        try:
            return await self.get(path, parsed, fresh=True, **options)
        except RefusedError:
            return None

    def _address(self) -> contextlib.AbstractAsyncContextManager[str]:
        return contextlib.nullcontext(self.url)


class Vllm:
    """The endpoints of vLLM; each function takes the server that it asks.

    Weights go through the four phases of an update if it was started with a backend that reads folders, else through a
    reload, `/collective_rpc`. Both need VLLM_SERVER_DEV_MODE=1; adapters need it not.
    """

    name = "vLLM"

    def __init__(self) -> None:
        self._in_phases: dict[str, bool] = {}

    async def _post(self, server: Server, path: str, body: Mapping[str, Any], *read: Any, **options: Any) -> Any:
        """Posts a request; adds a hint to the error if the path is unknown or the folder is not shared."""
        try:
            return await server.post(path, body, *read, **options)
        except SourceError as error:
            hint = ""
            if "Not Found" in str(error):
                hint = f"; {LORA_HINT if 'lora' in path else DEVELOPMENT_HINT}"
            elif "No adapter found" in str(error):
                hint = f"; {FOLDER_HINT}"
            elif path == "/update_weights":
                hint = f"; vLLM needs the backend disk in --weight-transfer-config, or none, and {FOLDER_HINT}"
            if isinstance(error, RefusedError):
                raise RefusedError(f"{error}{hint}", error.status) from error
            raise SourceError(f"{error}{hint}") from error

    async def pause(self, server: Server, *, keep: bool) -> None:
        """Stops sampling until `resume`; requests under way go on then if they are kept, and end before if not.

        Then every answer has to say that the server is paused.
        """
        await self._post(server, f"/pause?mode={'keep' if keep else 'wait'}", {})
        reads = (server.read_if_there("/is_paused", _read_paused) for _ in range(READS))
        if False in await asyncio.gather(*reads):
            raise SourceError(f"rollout.source: {server.url} is not paused after /pause; {balancer_hint(server.url)}")

    async def resume(self, server: Server) -> None:
        """Goes on sampling."""
        await self._post(server, "/resume", {})

    async def load_folder(self, server: Server, folder: Path, version: str) -> None:
        """Reads the weights of a folder in place of its own, and labels them; the server is paused.

        No phase is repeated, as each may be done once.
        """
        if server.url not in self._in_phases:
            self._in_phases[server.url] = await self._initialize(server)
        if self._in_phases[server.url]:
            await self._post(server, "/start_weight_update", {}, attempts=1)
            await self._post(server, "/update_weights", {"update_info": {"path": str(folder)}}, attempts=1)
            await self._post(server, "/finish_weight_update", {"weight_version": version}, attempts=1)
        else:
            reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
            await self._post(server, "/collective_rpc", reload)
            await self.set_version(server, version)

    async def forget_cache(self, server: Server, *, keep: bool) -> None:
        """Resets the prefix cache; requests that are kept use its blocks, and run their tokens again."""
        await self._post(server, f"/reset_prefix_cache{'?reset_running_requests=true' if keep else ''}", {})

    async def _initialize(self, server: Server) -> bool:
        """Begins the first phase; False if the server has no phases, or no backend that needs nothing else."""
        try:
            answer = await self._post(server, "/init_weight_transfer_engine", {"init_info": {}}, bytes, attempts=1)
        except SourceError:
            return False
        # A proxy may answer anything.
        return b'"message"' in answer

    async def set_version(self, server: Server, version: str) -> None:
        """Labels the weights, where the server has labels."""
        if await self.version(server) is not None:
            await self._post(server, "/update_weight_version", {"new_version": version})

    async def version(self, server: Server) -> str | None:
        """Returns the label of the weights; None if the server has none."""
        return await server.read_if_there("/weight_info", read_version)

    async def load_adapter(self, server: Server, name: str, folder: Path) -> None:
        """Reads an adapter, for requests that name it.

        Needs `--enable-lora`, `--max-lora-rank` and VLLM_ALLOW_RUNTIME_LORA_UPDATING=true.
        """
        await self._post(server, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})

    async def unload_adapter(self, server: Server, name: str) -> None:
        """Forgets an adapter; a refusal means that the server restarted without it."""
        with contextlib.suppress(RefusedError):
            await self._post(server, "/v1/unload_lora_adapter", {"lora_name": name})

    async def has_adapter(self, server: Server, name: str) -> bool | None:
        """Whether the list of models has it; None if the server does not tell."""
        models = await server.read_if_there("/v1/models", read_models)
        return None if models is None else name in models

    def model_of(self, base: str, adapter: str) -> str:
        """Returns the model of requests for an adapter, its name."""
        return adapter


class Sglang:
    """The endpoints of SGLang, as its documentation describes them; no live server was tried."""

    name = "SGLang"

    async def pause(self, server: Server, *, keep: bool) -> None:
        """Puts requests of others back into the queue; those of this run have ended.

        Raises:
          SourceError: they are to be kept; its answers tell one label, not those of the tokens.
        """
        if keep:
            raise SourceError("rollout.source.in_flight: got keep, which needs vLLM, but the servers are SGLang")
        await server.post("/pause_generation", {"mode": "retract"})

    async def resume(self, server: Server) -> None:
        """Goes on sampling."""
        await server.post("/continue_generation", {})

    async def load_folder(self, server: Server, folder: Path, version: str) -> None:
        """Reads the weights, and flushes the cache."""
        update = {"model_path": str(folder), "flush_cache": True, "weight_version": version}
        await server.post("/update_weights_from_disk", update, attempts=1)

    async def forget_cache(self, server: Server, *, keep: bool) -> None:
        """Flushes the cache; no request is kept."""
        await server.post("/flush_cache", {})

    async def set_version(self, server: Server, version: str) -> None:
        """Labels the weights."""
        await server.post("/update_weight_version", {"new_version": version})

    async def version(self, server: Server) -> str | None:
        """Returns the label; the second path is that of older releases."""
        found = await server.read_if_there("/model_info", read_version)
        return found if found is not None else await server.read_if_there("/get_weight_version", read_version)

    async def load_adapter(self, server: Server, name: str, folder: Path) -> None:
        """Needs `--enable-lora` with `--max-lora-rank` and `--lora-target-modules`."""
        await server.post("/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})

    async def unload_adapter(self, server: Server, name: str) -> None:
        """Forgets an adapter; a refusal means that the server restarted without it."""
        with contextlib.suppress(RefusedError):
            await server.post("/unload_lora_adapter", {"lora_name": name})

    async def has_adapter(self, server: Server, name: str) -> bool | None:
        """Returns None: not every release lists adapters, and requests for a missing one are refused."""
        return None

    def model_of(self, base: str, adapter: str) -> str:
        """Returns the base and the adapter."""
        return f"{base}:{adapter}"


Endpoints = Vllm | Sglang


def endpoints_of(owner: str) -> Endpoints:
    """Returns the endpoints of the program that the list of models names; those of vLLM for others."""
    return Sglang() if owner == "sglang" else Vllm()


def balancer_hint(url: str) -> str:
    """Returns the remedy for an address with several servers behind it."""
    return (
        f"{url} is a router or balancer in front of several servers, and weights have to reach each of them: list the "
        f"addresses of the servers in rollout.source.urls, and set rollout.source.router={url}"
    )


async def check_version(endpoints: Endpoints, server: Server, version: str, *, adapter: bool, reads: int) -> bool:
    """Reads back the label of the weights, or that the adapter is there; returns False if the server tells neither.

    Several reads find a balancer.

    Raises:
      SourceError: it has other weights, or some answers tell of others.
    """

    async def read() -> str | None:
        if not adapter:
            return await endpoints.version(server)
        there = await endpoints.has_adapter(server, version)
        return version if there else None if there is None else "no such adapter"

    found = await asyncio.gather(*(read() for _ in range(reads)))
    versions = list(dict.fromkeys(found))
    if versions == [None]:
        return False
    if versions == [version]:
        return True
    shown = server.client.clean(" and ".join(str(value) for value in versions), 300)
    remedy = balancer_hint(server.url) if len(versions) > 1 else "it restarted, or another program changed its weights"
    raise SourceError(f"rollout.source: {server.url} has the weights {shown}, expected {version}; {remedy}")


def _read_paused(content: bytes) -> bool:
    return bool(json.loads(content)["is_paused"])
