"""Forms of the head in PyTorch: releases of TRL, verl and Liger, and compiled chunks. Runs in PyTorch's process.

Single modules of the releases are imported, without the dependencies of their packages.
"""

import contextlib
import functools
import importlib
import importlib.util
import pathlib
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.suites.head.forms import CLIP, ENTROPY_COEF, FormsContender, HeadOptions, Inputs, loader

TRL_CHUNK = 32_768  # `_CHUNKED_LOGPROB_CHUNK_SIZE` of its trainers
TOKEN_CHUNK = 1024


def ppo_loss(log_probs: Tensor, entropies: Tensor, old_log_probs: Tensor, advantages: Tensor) -> Tensor:
    """Returns the loss of `jax_forms.loss`, without a mask."""
    ratio = torch.exp(log_probs - old_log_probs)
    clipped = torch.clamp(ratio, 1 - CLIP, 1 + CLIP)
    return (-torch.minimum(ratio * advantages, clipped * advantages) - ENTROPY_COEF * entropies).mean()


def chunk_stats(hidden: Tensor, head: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns log-probs and entropies of a chunk of tokens; `torch.compile` gets this function."""
    log_probs = torch.log_softmax((hidden @ head.t()).float(), dim=-1)
    return log_probs.gather(-1, targets[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)


def load_releases(releases: pathlib.Path) -> dict[str, Any]:
    """Imports the operations, by the name of their release."""
    # verl looks for Liger's kernels, which its default does not use: Liger is imported after it.
    _bare(releases / "verl", "verl.utils.experimental")
    verl = importlib.import_module("verl.utils.experimental.torch_functional")
    _bare(releases / "trl", "trl.kernels")
    _bare(releases / "trl", "trl.trainer")
    has_triton = importlib.util.find_spec("triton") is not None
    _stub("transformers", utils=_stub("transformers.utils", is_triton_available=lambda: has_triton))
    # It gathers a head that DeepSpeed has sharded; this one is whole.
    _stub("trl.trainer.utils", maybe_gather_lm_head_ctx=lambda *_: contextlib.nullcontext())
    trl = importlib.import_module("trl.kernels.chunked_logprob")
    _bare(releases / "liger_kernel", "liger_kernel.chunked_loss")
    liger = importlib.import_module("liger_kernel.chunked_loss.grpo_loss")
    return {"trl": trl.ChunkedLogProbFunction, "verl": verl, "liger": liger.LigerFusedLinearGRPOLoss}


def load_installed() -> dict[str, Any]:
    """Imports Liger's operation if this environment has it, as on a machine without network."""
    spec = importlib.util.find_spec("liger_kernel")
    if spec is None or not spec.submodule_search_locations:
        return {}
    _bare(pathlib.Path(spec.submodule_search_locations[0]).parent, "liger_kernel.chunked_loss")
    module = importlib.import_module("liger_kernel.chunked_loss.grpo_loss")
    return {"liger": module.LigerFusedLinearGRPOLoss}


def _stub(name: str, **attributes: Any) -> types.ModuleType:
    """Registers a module with these names alone."""
    module = types.ModuleType(name)
    vars(module).update(attributes)
    sys.modules[name] = module
    return module


def _bare(root: pathlib.Path, name: str) -> None:
    """Registers a package and its parents without running their `__init__`."""
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        package = ".".join(parts[:depth])
        if package not in sys.modules:
            path = root.joinpath(*parts[:depth])
            if not path.is_dir():
                raise FileNotFoundError(f"{path} is not in the release")
            _stub(package, __path__=[str(path)])


class TorchForms(FormsContender):
    """The forms of PyTorch on a device."""

    def __init__(self, inputs: Inputs, options: HeadOptions, releases: pathlib.Path | None = None) -> None:
        super().__init__(inputs, options, releases)
        self.device = torch.device("cuda" if options.device == "gpu" else "cpu")
        if options.threads and options.device == "cpu":
            torch.set_num_threads(options.threads)
        self.dtype = torch.bfloat16 if options.dtype == "bf16" else torch.float32
        self._put(inputs.hidden, inputs.head, inputs.targets, inputs.advantages, inputs.old_log_probs)
        self.libraries = load_installed() if releases is None else load_releases(releases)
        self._compiled = options.device == "gpu"
        self._chunk_stats = torch.compile(chunk_stats) if self._compiled else chunk_stats
        if self._compiled and "verl" in self.libraries:
            verl = self.libraries["verl"]
            for name in ("_fused_linear_for_ppo_fwd", "_fused_linear_for_ppo_bwd"):
                if not hasattr(getattr(verl, name), "_torchdynamo_orig_callable"):
                    setattr(verl, name, torch.compile(getattr(verl, name)))

    def _put(self, hidden: Any, head: Any, targets: Any, advantages: Any, old_log_probs: Any) -> None:
        def put(array: Any, dtype: Any = None) -> Tensor:
            return torch.as_tensor(array).to(self.device, dtype).contiguous()

        # A head is `[V, D]` in PyTorch.
        self.hidden = put(hidden, self.dtype).requires_grad_()
        self.head = put(head.T, self.dtype).requires_grad_()
        self.targets = put(targets, torch.int64)
        self.old_log_probs, self.advantages = put(old_log_probs), put(advantages)

    def redraw(self, tokens: int, width: int, vocab: int) -> None:
        del self.hidden, self.head
        torch.manual_seed(0)
        options = {"device": self.device, "dtype": self.dtype}
        hidden = torch.randn(tokens, width, **options)
        head = torch.randn(vocab, width, **options) * 2 / width**0.5
        targets = torch.randint(vocab, (tokens,), device=self.device)
        rows = zip(hidden.split(TOKEN_CHUNK), targets.split(TOKEN_CHUNK), strict=True)
        with torch.no_grad():
            log_probs = torch.cat([chunk_stats(states, head, ids)[0] for states, ids in rows])
        advantages, noise = (torch.randn(tokens, device=self.device) for _ in range(2))
        self._put(hidden, head.T, targets, advantages, log_probs + 0.05 * noise)

    def versions(self) -> dict[str, str]:
        cuda = {"cuda": str(torch.version.cuda)} if self.options.device == "gpu" else {}
        return {"torch": torch.__version__, **cuda}

    def outputs(self, name: str) -> Sequence[Tensor]:
        losses: dict[str, Callable[[], Tensor]] = {
            "trl": functools.partial(self._trl, TRL_CHUNK),
            "trl_4096": functools.partial(self._trl, 4096),
            "verl": self._verl,
            "liger": self._liger,
            "torch_chunk": self._torch_chunk,
        }
        loss = losses[name]()
        gradients = torch.autograd.grad(loss, (self.hidden, self.head))
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return loss.detach(), *gradients

    def arrays(self, outputs: Sequence[Tensor]) -> list[np.ndarray]:
        loss, hidden, head = (output.float().cpu().numpy() for output in outputs)
        return [loss, hidden, head.T]

    def device_peak(self, name: str) -> int | None:
        self.outputs(name)  # compiles and chooses kernels
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        outputs = self.outputs(name)
        return int(torch.cuda.max_memory_allocated() - before - sum(output.nbytes for output in outputs))

    def _trl(self, chunk: int) -> Tensor:
        log_probs, entropies, *_ = self._library("trl").apply(
            self.hidden, self.head, None, self.targets, 1.0, chunk, None, 1.0, ("entropy",)
        )
        return ppo_loss(log_probs, entropies, self.old_log_probs, self.advantages)

    def _verl(self) -> Tensor:
        log_probs, entropies = self._library("verl").FusedLinearForPPO()(self.hidden, self.head, self.targets)
        return ppo_loss(log_probs, entropies, self.old_log_probs, self.advantages)

    def _library(self, name: str) -> Any:
        if name not in self.libraries:
            raise ModuleNotFoundError(f"{name} is not installed here")
        return self.libraries[name]

    def _liger(self) -> Tensor:
        # Its advantages are per sequence, so every token is a sequence here. All are one chunk, because each chunk adds
        # a gradient of the whole head.
        tokens = len(self.targets)
        operation = self._library("liger")(
            beta=0.0, use_ref_model=False, chunk_size=tokens, compiled=self._compiled,
            epsilon_low=CLIP, epsilon_high=CLIP,
        )  # fmt: skip
        loss, _ = operation(
            self.hidden[:, None],
            self.head,
            self.targets[:, None],
            torch.ones_like(self.targets[:, None], dtype=torch.float32),
            self.advantages,
            old_per_token_logps=self.old_log_probs[:, None],
        )
        return loss

    def _torch_chunk(self) -> Tensor:
        pieces = [
            checkpoint(self._chunk_stats, hidden, self.head, targets, use_reentrant=False)
            for hidden, targets in zip(self.hidden.split(TOKEN_CHUNK), self.targets.split(TOKEN_CHUNK), strict=True)
        ]
        log_probs, entropies = (torch.cat(parts) for parts in zip(*pieces, strict=True))
        return ppo_loss(log_probs, entropies, self.old_log_probs, self.advantages)


load = loader(TorchForms)
