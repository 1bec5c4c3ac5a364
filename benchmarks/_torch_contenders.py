"""The contenders in PyTorch, as their releases have them, and one that is compiled. Runs in PyTorch's process."""

import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks import _releases
from benchmarks._inputs import CLIP, ENTROPY_COEF, Inputs, Options

TRL_CHUNK = 32_768  # `_CHUNKED_LOGPROB_CHUNK_SIZE` of its trainers
TOKEN_CHUNK = 1024


def ppo_loss(log_probs: Tensor, entropies: Tensor, old_log_probs: Tensor, advantages: Tensor) -> Tensor:
    """As `loss` of the contenders in JAX, without a mask."""
    ratio = torch.exp(log_probs - old_log_probs)
    clipped = torch.clamp(ratio, 1 - CLIP, 1 + CLIP)
    return (-torch.minimum(ratio * advantages, clipped * advantages) - ENTROPY_COEF * entropies).mean()


def chunk_stats(hidden: Tensor, head: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of a chunk of tokens, from its logits; what `torch.compile` is given."""
    log_probs = torch.log_softmax((hidden @ head.t()).float(), dim=-1)
    return log_probs.gather(-1, targets[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)


class Contenders:
    """The rows that this process can run."""

    def __init__(self, inputs: Inputs, options: Options, releases: pathlib.Path) -> None:
        self.options = options
        self.device = torch.device("cuda" if options.device == "gpu" else "cpu")
        if options.threads and options.device == "cpu":
            torch.set_num_threads(options.threads)
        dtype = torch.bfloat16 if options.dtype == "bf16" else torch.float32

        def put(array: np.ndarray, dtype: Any = None) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(self.device, dtype)

        # A head is `[V, D]` in PyTorch.
        self.hidden = put(inputs.hidden, dtype).requires_grad_()
        self.head = put(inputs.head.T, dtype).requires_grad_()
        self.targets = put(inputs.targets, torch.int64)
        self.old_log_probs, self.advantages = put(inputs.old_log_probs), put(inputs.advantages)
        self.libraries = _releases.load(releases)
        self._compiled = options.device == "gpu"
        self._chunk_stats = torch.compile(chunk_stats) if self._compiled else chunk_stats
        if self._compiled:
            verl = self.libraries["verl"]
            for name in ("_fused_linear_for_ppo_fwd", "_fused_linear_for_ppo_bwd"):
                if not hasattr(getattr(verl, name), "_torchdynamo_orig_callable"):
                    setattr(verl, name, torch.compile(getattr(verl, name)))

    def versions(self) -> dict[str, str]:
        found = {"torch": torch.__version__}
        if self.options.device == "gpu":
            found["cuda"] = str(torch.version.cuda)
        return found

    def prepare(self, name: str) -> None:
        """Nothing: what is compiled here is compiled at the first run."""

    def run(self, name: str) -> Sequence[Tensor]:
        """The finished outputs of a row: loss, then gradients."""
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

    def nbytes(self, outputs: Sequence[Tensor]) -> int:
        return sum(output.numel() * output.element_size() for output in outputs)

    def device_peak(self, name: str) -> int | None:
        self.run(name)  # compiles and chooses kernels
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        outputs = self.run(name)
        return int(torch.cuda.max_memory_allocated() - before - self.nbytes(outputs))

    def _trl(self, chunk: int) -> Tensor:
        log_probs, entropies, *_ = self.libraries["trl"].apply(
            self.hidden, self.head, None, self.targets, 1.0, chunk, None, 1.0, ("entropy",)
        )
        return ppo_loss(log_probs, entropies, self.old_log_probs, self.advantages)

    def _verl(self) -> Tensor:
        log_probs, entropies = self.libraries["verl"].FusedLinearForPPO()(self.hidden, self.head, self.targets)
        return ppo_loss(log_probs, entropies, self.old_log_probs, self.advantages)

    def _liger(self) -> Tensor:
        # It takes one advantage for each sequence, so every token is a sequence here; and all are one chunk, because
        # each chunk adds a gradient of the whole head.
        tokens = len(self.targets)
        operation = self.libraries["liger"](
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
