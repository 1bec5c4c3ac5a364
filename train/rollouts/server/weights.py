"""Weight transfer to servers: an adapter beside its base, or all weights in place.

Each version is written to a new folder that servers and trainer share, and removed once the next version is in use. Its
label is the name of the folder, which every server tells again before the first request.
"""

import contextlib
import shutil
import tempfile
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import jax.numpy as jnp
from safetensors import SafetensorError

import kljax
from train.config.errors import UserError
from train.config.user_functions import make_with, user_code
from train.context import RunContext
from train.distributed.exchange import of_leader, on_leader, run_together
from train.distributed.peers import is_leader
from train.process.waiting import waiting_for
from train.rollouts.server.engines import Engines
from train.rollouts.source import SourceError
from train.weights.files import usable_directory
from train.weights.peft_experts import stacked_targets


class Transfer(Protocol):
    """A transfer of the user, which `rollout.source.sync` makes in every process, from the run context.

    The trainer pauses every server before a transfer, labels the weights and reads the label back after it, and then
    resumes the servers.
    """

    def send(self, policy: kljax.Policy, version: str, urls: Sequence[str]) -> None:
        """Brings the weights of a policy to the servers at these addresses; called in every process."""

    def close(self) -> None:
        """Frees the resources of the transfer."""


class NoSync:
    """A no-op: the server keeps its weights."""

    in_place = False

    def __init__(self, model: str) -> None:
        self._model = model

    def load(self, policy: kljax.Policy, step: int) -> str:
        """Returns the name of the base model."""
        return self._model

    def close(self) -> None:
        """No-op."""


class _FolderSync:
    """Writes each version to a folder of its own.

    With several processes all of them gather the weights, and the leader writes them and speaks to the servers.
    """

    def __init__(self, engines: Engines, context: RunContext, *, model: str, folder: str | None) -> None:
        """Creates the root folder; raises `UserError` if it is not writable."""
        self._engines = engines
        self._context = context
        self._model = model
        self._written: list[Path] = []
        self._temporary: str | None = None
        try:
            if not folder and is_leader():
                self._temporary = tempfile.mkdtemp(prefix="kljax-served-")
            self._root = Path(folder or self._temporary or "").absolute()
            if is_leader():
                usable_directory(self._root)
        except OSError as error:
            root = folder or tempfile.gettempdir()
            raise UserError(f"rollout.source.folder: cannot write to {root}: {error.strerror}") from error

    def _write(self, step: int, save: Callable[[Path], object]) -> Path:
        """Writes a unique folder: a server may still have weights of an earlier run with the same name and step.

        Raises:
          SourceError: writing fails, for example on a full disk.
        """

        def write() -> Path:
            path = self._root / f"{self._context.config.name}-{step}-{uuid.uuid4().hex[:8]}"
            try:
                if is_leader():
                    self._root.mkdir(parents=True, exist_ok=True)
                save(path)
            except (OSError, SafetensorError) as error:
                raise SourceError(f"rollout.source.folder: cannot write {path}: {error}") from error
            return path

        return run_together("weights for the server", write)

    def close(self) -> None:
        """Removes the root folder, if it is a temporary one."""
        if self._temporary:
            shutil.rmtree(self._temporary, ignore_errors=True)


class LoraSync(_FolderSync):
    """Loads each adapter under a new name, which later requests use as model; unloads one when no request names it."""

    in_place = False

    def load(self, policy: kljax.Policy, step: int) -> str:
        """Loads the adapter and returns its name."""
        from train.weights.peft import save_adapter

        model = self._context.model
        options = {"base_name": self._model, "source": self._context.config.model.path}
        path = self._write(step, lambda path: save_adapter(path, model, policy.adapter, **options))
        name = on_leader("weights for the server", lambda: self._exchange(path, step))
        self._engines.expect(name, step, adapter=True)
        return self._engines.endpoints.model_of(self._model, name)

    def _exchange(self, path: Path, step: int) -> str:
        endpoints = self._engines.endpoints
        self._engines.everywhere(lambda server: endpoints.load_adapter(server, path.name, path))
        self._engines.confirm(path.name, step, adapter=True)
        older = self._written
        self._written = [path]
        for old in older:
            if old.name in self._engines.labels_in_use:
                self._written.append(old)
            else:
                self._unload(old)
        return path.name

    def _unload(self, path: Path) -> None:
        try:
            self._engines.everywhere(lambda server: self._engines.endpoints.unload_adapter(server, path.name))
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Removes the adapters that are left, also from the servers that are still reachable."""
        for path in self._written:
            with contextlib.suppress(SourceError):
                self._unload(path)
        super().close()


class WeightSync(_FolderSync):
    """Writes all weights, merged with any adapter, and makes the servers load them in place.

    They are rounded to the dtype of the sampler, as a server would round them: bfloat16 is half of the bytes. All
    servers are paused until the last of them has the new weights. They finish the completions that they have begun, or
    keep them, as `in_flight` says; requests that were not sent yet wait for the new weights.
    """

    in_place = True

    def load(self, policy: kljax.Policy, step: int) -> str:
        """Loads the weights and returns the name of the base model."""
        from train.weights.huggingface import save_folder

        model = self._context.model
        source = self._context.config.model.path
        stored = policy.params["embed_tokens"]["embedding"].dtype
        dtype = min(jnp.dtype(self._context.layout.model.config.dtype), stored, key=lambda of: of.itemsize)
        path = self._write(step, lambda path: save_folder(path, model, policy, source=source, dtype=dtype.name))
        # The leader writes the folder; requests of any process may go on before the leader has told of the update.
        self._engines.announce(of_leader("weights for the server", path.name), step)
        self._engines.expect(on_leader("weights for the server", lambda: self._exchange(path, step)), step)
        return self._model

    def _exchange(self, path: Path, step: int) -> str:
        endpoints = self._engines.endpoints
        with self._engines.paused():
            self._engines.everywhere(lambda server: endpoints.load_folder(server, path, path.name))
            self._engines.confirm(path.name, step)
        self._remove()
        self._written = [path]
        return path.name

    def _remove(self) -> None:
        for path in self._written:
            shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Removes the written weights, which the servers have read."""
        self._remove()
        super().close()


class UserSync:
    """Lets a transfer of the user bring the weights, while all servers are paused."""

    in_place = True

    def __init__(self, engines: Engines, context: RunContext, name: str, model: str) -> None:
        self._engines = engines
        self._context = context
        self._model = model
        self._label = f"rollout.source.sync: {name}"
        with waiting_for(self._label):
            self._transfer: Transfer = make_with("rollout.source.sync", name, Transfer, context)

    def load(self, policy: kljax.Policy, step: int) -> str:
        """Sends the weights and returns the name of the base model."""
        label = f"{self._context.config.name}-{step}-{uuid.uuid4().hex[:8]}"
        version = of_leader("weights for the server", label)
        self._engines.announce(version, step)
        pause = self._engines.paused() if is_leader() else contextlib.nullcontext()
        with contextlib.ExitStack() as stack:
            run_together("weights for the server", lambda: stack.enter_context(pause))
            run_together("weights for the server", lambda: self._send(policy, version))
            on_leader("weights for the server", lambda: self._confirm(version, step))
            # An engine that does not resume is an error in every process.
            run_together("weights for the server", stack.close)
        self._engines.expect(version, step)
        return self._model

    def _send(self, policy: kljax.Policy, version: str) -> None:
        label = f"{self._label}: send"
        with waiting_for(label), user_code(label, SourceError):
            self._transfer.send(policy, version, tuple(self._engines.urls))

    def _confirm(self, version: str, step: int) -> None:
        self._engines.everywhere(lambda server: self._engines.endpoints.set_version(server, version))
        self._engines.confirm(version, step)

    def close(self) -> None:
        """Frees the resources of the transfer."""
        with user_code(f"{self._label}: close", SourceError):
            self._transfer.close()


Sync = NoSync | LoraSync | WeightSync | UserSync
"""A transfer of the weights of a policy to every server.

`in_place` tells whether the new weights take the place of the old ones, so that no request may be under way. `load`
sends the weights and returns the model name for requests; `close` removes what was written, here and on the servers.
"""


def make_sync(engines: Engines, context: RunContext) -> Sync:
    """Makes the transfer that `rollout.source.sync` selects; raises `UserError` if it is not possible."""
    section = context.config.rollout.source
    if section.type != "openai":
        raise ValueError(f"rollout.source.type: got {section.type!r}, expected openai")
    kind = section.chosen_sync(adapter=context.config.lora is not None)
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
    if kind not in ("lora", "weights"):
        return UserSync(engines, context, kind, section.model)
    sync_class = LoraSync if kind == "lora" else WeightSync
    return sync_class(engines, context, model=section.model, folder=section.folder)
