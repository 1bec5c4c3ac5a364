"""Weights for a server: an adapter that it loads beside its base, or all weights that it loads in place.

Each version lies in a folder of its own, below one that server and trainer both see, and is removed once the next one
is in use.
"""

import contextlib
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

from safetensors import SafetensorError

import kljax
from train.config.errors import UserError
from train.rollouts.context import RunContext
from train.rollouts.server.client import Client
from train.rollouts.source import SourceError
from train.weights.files import usable_directory


class Sync(Protocol):
    """Gives a server the weights of a policy."""

    def load(self, policy: kljax.Policy, step: int) -> str:
        """Returns the name of the model to ask for, once the server has the weights; raises `SourceError`."""

    def close(self) -> None:
        """Removes what was written, and what the server holds because of it."""


class NoSync:
    """The server keeps the weights that it has."""

    def __init__(self, model: str) -> None:
        self._model = model

    def load(self, policy: kljax.Policy, step: int) -> str:
        """The name of the base model."""
        return self._model

    def close(self) -> None:
        """Nothing was written."""


class _Folders:
    """Where versions are written."""

    def __init__(self, folder: str | None, name: str) -> None:
        """Raises `UserError` unless something can be written there."""
        try:
            self._made = None if folder else tempfile.mkdtemp(prefix="kljax-served-")
            self._root, self._name = Path(folder or self._made or "").absolute(), name
            usable_directory(self._root)
        except OSError as error:
            where = folder or tempfile.gettempdir()
            raise UserError(f"rollout.source.folder: cannot write to {where}: {error.strerror}") from error

    @contextlib.contextmanager
    def new(self, step: int) -> Iterator[Path]:
        """A path to write to that nothing has: a server may hold what an earlier run of this name gave it at this step.

        Raises:
          SourceError: writing fails, as on a disk that is full.
        """
        path = self._root / f"{self._name}-{step}-{uuid.uuid4().hex[:8]}"
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            yield path
        except (OSError, SafetensorError) as error:
            raise SourceError(f"rollout.source.folder: cannot write {path}: {error}") from error

    def close(self) -> None:
        """Removes the temporary folder."""
        if self._made:
            shutil.rmtree(self._made, ignore_errors=True)


class _Written:
    """What a server is given by way of folders: where they are, and the one that it has now."""

    def __init__(self, client: Client, context: RunContext, *, model: str, folder: str | None) -> None:
        self._client, self._context, self._model = client, context, model
        self._folders = _Folders(folder, context.config.name)
        self._current: Path | None = None


class LoraSync(_Written):
    """Loads each adapter under a new name before the old one is unloaded; requests name the adapter as their model.

    vLLM: `--enable-lora`, `--max-lora-rank` at least that of the adapter, and VLLM_ALLOW_RUNTIME_LORA_UPDATING=true.
    """

    def load(self, policy: kljax.Policy, step: int) -> str:
        """The name of the adapter."""
        from train.weights.peft import save_adapter

        source = self._context.config.model.path
        with self._folders.new(step) as path:
            save_adapter(path, self._context.model, policy.adapter, base_name=self._model, source=source)
        _accepted(self._client, "/v1/load_lora_adapter", {"lora_name": path.name, "lora_path": str(path)})
        old, self._current = self._current, path
        self._unload(old)
        return path.name

    def _unload(self, path: Path | None) -> None:
        if path is not None:
            _accepted(self._client, "/v1/unload_lora_adapter", {"lora_name": path.name})
            shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Unloads the last adapter, if the server is still there."""
        with contextlib.suppress(SourceError):
            self._unload(self._current)
        self._folders.close()


class WeightSync(_Written):
    """Writes all weights, merged with the adapter if there is one, and has the server load them in place.

    vLLM: VLLM_SERVER_DEV_MODE=1, which opens `/collective_rpc`, and no `--enable-lora`. The server is paused meanwhile,
    and forgets what it cached of prompts: it belongs to the old weights.
    """

    def load(self, policy: kljax.Policy, step: int) -> str:
        """The name of the base model, whose weights these are now."""
        from train.weights.huggingface import save_folder

        source = self._context.config.model.path
        with self._folders.new(step) as path:
            save_folder(path, self._context.model, policy, source=source)
        _accepted(self._client, "/pause", {})
        try:
            reload = {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
            _accepted(self._client, "/collective_rpc", reload)
            _accepted(self._client, "/reset_prefix_cache", {})
        finally:
            _accepted(self._client, "/resume", {})
        self._remove()
        self._current = path
        return self._model

    def _remove(self) -> None:
        if self._current is not None:
            shutil.rmtree(self._current, ignore_errors=True)

    def close(self) -> None:
        """Removes what was written; the server has read it."""
        self._remove()
        self._folders.close()


LORA_HINT = "start vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=true"
DEVELOPMENT_HINT = "start vLLM with VLLM_SERVER_DEV_MODE=1"
FOLDER_HINT = "rollout.source.folder has to be a path that trainer and server both see"


def _accepted(client: Client, path: str, body: Mapping[str, object]) -> None:
    """Posts; of a server that does not know the path, or does not see the folder, the error says what to do."""
    try:
        client.post(path, body)
    except SourceError as error:
        hint = ""
        if "Not Found" in str(error):
            hint = f"; {LORA_HINT if 'lora' in path else DEVELOPMENT_HINT}"
        elif "No adapter found" in str(error):
            hint = f"; {FOLDER_HINT}"
        raise SourceError(f"{error}{hint}") from error


def make_sync(client: Client, context: RunContext) -> Sync:
    """What `rollout.source.sync` of the config asks for; raises `UserError` if it cannot be done."""
    section = context.config.rollout.source
    if section.type != "openai":
        raise ValueError(f"rollout.source.type: got {section.type!r}, expected openai")
    kind = section.sync or ("lora" if context.config.lora is not None else "weights")
    if kind == "weights" and context.model.config.tie_embeddings:
        # Measured with vLLM 0.32: it warns "ParallelLMHead: Failed to load weights" and goes on with the old head.
        raise UserError(
            "rollout.source.sync: got weights, but the model ties its LM head to the embeddings, which vLLM does not "
            "load again; train an adapter (sync=lora), or a model whose head is its own"
        )
    if kind == "none":
        return NoSync(section.model)
    made = LoraSync if kind == "lora" else WeightSync
    return made(client, context, model=section.model, folder=section.folder)
