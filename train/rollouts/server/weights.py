"""Weight transfer to a server: an adapter beside its base, or all weights in place.

Each version is written to a new folder that server and trainer share, and removed once the next version is in use.
"""

import contextlib
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import jax.numpy as jnp
from safetensors import SafetensorError

import kljax
from train.config.errors import UserError
from train.context import RunContext
from train.distributed.exchange import on_leader, run_together
from train.distributed.peers import is_leader
from train.rollouts.server.client import Client, acknowledged
from train.rollouts.source import SourceError
from train.weights.files import usable_directory
from train.weights.peft_experts import stacked_targets


class Sync(Protocol):
    """Transfers the weights of a policy to a server."""

    def load(self, policy: kljax.Policy, step: int) -> str:
        """Sends the weights and returns the model name for requests; raises `SourceError`."""

    def close(self) -> None:
        """Removes the written weights, here and on the server."""


class NoSync:
    """A no-op: the server keeps its weights."""

    def __init__(self, model: str) -> None:
        self._model = model

    def load(self, policy: kljax.Policy, step: int) -> str:
        """Returns the name of the base model."""
        return self._model

    def close(self) -> None:
        """No-op."""


class _VersionFolders:
    """The folders of the written versions."""

    def __init__(self, folder: str | None, name: str) -> None:
        """Creates the root folder; raises `UserError` if it is not writable."""
        self._temporary: str | None = None
        try:
            if not folder and is_leader():
                self._temporary = tempfile.mkdtemp(prefix="kljax-served-")
            self._root = Path(folder or self._temporary or "").absolute()
            self._name = name
            if is_leader():
                usable_directory(self._root)
        except OSError as error:
            root = folder or tempfile.gettempdir()
            raise UserError(f"rollout.source.folder: cannot write to {root}: {error.strerror}") from error

    @contextlib.contextmanager
    def new(self, step: int) -> Iterator[Path]:
        """Yields a unique path: a server may still have weights of an earlier run with the same name and step.

        Raises:
          SourceError: writing fails, for example on a full disk.
        """
        path = self._root / f"{self._name}-{step}-{uuid.uuid4().hex[:8]}"
        try:
            if is_leader():
                self._root.mkdir(parents=True, exist_ok=True)
            yield path
        except (OSError, SafetensorError) as error:
            raise SourceError(f"rollout.source.folder: cannot write {path}: {error}") from error

    def close(self) -> None:
        """Removes the temporary folder."""
        if self._temporary:
            shutil.rmtree(self._temporary, ignore_errors=True)


class _FolderSync:
    """Shared state of the transfers by folder: the folders, and the current version.

    With several processes all of them gather the weights, and the leader writes them and speaks to the server.
    """

    def __init__(self, client: Client, context: RunContext, *, model: str, folder: str | None) -> None:
        self._client, self._context, self._model = client, context, model
        self._folders = _VersionFolders(folder, context.config.name)
        self._current: Path | None = None


class LoraSync(_FolderSync):
    """Loads each adapter under a new name before it unloads the previous adapter; requests use that name as model.

    vLLM: `--enable-lora`, `--max-lora-rank` at least that of the adapter, and VLLM_ALLOW_RUNTIME_LORA_UPDATING=true.
    """

    def load(self, policy: kljax.Policy, step: int) -> str:
        """Loads the adapter and returns its name."""
        from train.weights.peft import save_adapter

        source = self._context.config.model.path

        def write() -> Path:
            with self._folders.new(step) as path:
                save_adapter(path, self._context.model, policy.adapter, base_name=self._model, source=source)
            return path

        path = run_together("weights for the server", write)
        return on_leader("weights for the server", lambda: self._exchange(path))

    def _exchange(self, path: Path) -> str:
        _post(self._client, "/v1/load_lora_adapter", {"lora_name": path.name, "lora_path": str(path)})
        old = self._current
        self._current = path
        self._unload(old)
        return path.name

    def _unload(self, path: Path | None) -> None:
        if path is not None:
            _post(self._client, "/v1/unload_lora_adapter", {"lora_name": path.name})
            shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Unloads the last adapter, if the server is still reachable."""
        with contextlib.suppress(SourceError):
            self._unload(self._current)
        self._folders.close()


class WeightSync(_FolderSync):
    """Writes all weights, merged with any adapter, and makes the server reload them in place.

    They are rounded to the dtype of the sampler, as the server would round them: bfloat16 is half of the bytes.

    vLLM: VLLM_SERVER_DEV_MODE=1, which opens `/collective_rpc`, and no `--enable-lora`. The server is paused
    during the reload, and its prefix cache is reset, as it belongs to the old weights.
    """

    def load(self, policy: kljax.Policy, step: int) -> str:
        """Reloads the weights and returns the name of the base model."""
        from train.weights.huggingface import save_folder

        source = self._context.config.model.path
        stored = policy.params["embed_tokens"]["embedding"].dtype
        dtype = min(jnp.dtype(self._context.layout.model.config.dtype), stored, key=lambda of: of.itemsize)

        def write() -> Path:
            with self._folders.new(step) as path:
                save_folder(path, self._context.model, policy, source=source, dtype=dtype.name)
            return path

        path = run_together("weights for the server", write)
        on_leader("weights for the server", lambda: self._reload(path))
        return self._model

    def _reload(self, path: Path) -> None:
        _post(self._client, "/pause", {})
        try:
            reload = {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
            _post(self._client, "/collective_rpc", reload)
            _post(self._client, "/reset_prefix_cache", {})
        finally:
            _post(self._client, "/resume", {})
        self._remove()
        self._current = path

    def _remove(self) -> None:
        if self._current is not None:
            shutil.rmtree(self._current, ignore_errors=True)

    def close(self) -> None:
        """Removes the written weights, which the server has read."""
        self._remove()
        self._folders.close()


LORA_HINT = "start vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=true"
DEVELOPMENT_HINT = "start vLLM with VLLM_SERVER_DEV_MODE=1"
FOLDER_HINT = "rollout.source.folder has to be a path that trainer and server both see"


def _post(client: Client, path: str, body: Mapping[str, object]) -> None:
    """Posts a request, and adds a hint to the error if the path is unknown or the folder is not shared."""
    try:
        client.post(path, body, acknowledged)
    except SourceError as error:
        hint = ""
        if "Not Found" in str(error):
            hint = f"; {LORA_HINT if 'lora' in path else DEVELOPMENT_HINT}"
        elif "No adapter found" in str(error):
            hint = f"; {FOLDER_HINT}"
        raise SourceError(f"{error}{hint}") from error


def make_sync(client: Client, context: RunContext) -> Sync:
    """Makes the transfer that `rollout.source.sync` selects; raises `UserError` if it is not possible."""
    section = context.config.rollout.source
    if section.type != "openai":
        raise ValueError(f"rollout.source.type: got {section.type!r}, expected openai")
    kind = section.sync or ("lora" if context.config.lora is not None else "weights")
    if kind == "weights" and context.model.config.tie_embeddings:
        # vLLM 0.32 warns "ParallelLMHead: Failed to load weights" and keeps the old head.
        raise UserError(
            "rollout.source.sync: got weights, but the model ties its LM head to the embeddings, which vLLM does not "
            "load again; train an adapter (sync=lora), or a model with an untied head"
        )
    experts = context.model.config.experts
    if kind == "weights" and experts is not None and experts.choice_bias:
        raise UserError(
            "rollout.source.sync: got weights with routing.bias_update_rate > 0, but no server reads the biases, and "
            "would choose other experts; set the rate to 0, or sample in this process (rollout.source=jax)"
        )
    stacked = stacked_targets(context.model.config)
    if kind == "lora" and stacked:
        raise UserError(
            f"rollout.source.sync: got lora with {', '.join(stacked)} of a mixture of experts in lora.targets, which "
            "no server was tried with; set it to weights, which sends merged ones"
        )
    if kind == "none":
        return NoSync(section.model)
    sync_class = LoraSync if kind == "lora" else WeightSync
    return sync_class(client, context, model=section.model, folder=section.folder)
