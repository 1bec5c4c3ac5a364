"""Single modules of TRL, verl and Liger, imported without what their packages depend on. Runs in PyTorch's process."""

import contextlib
import importlib
import importlib.util
import pathlib
import sys
import types
from typing import Any


def load(releases: pathlib.Path) -> dict[str, Any]:
    """The three operations by the name of their release."""
    # verl looks for Liger's kernels, which its default does not use, so Liger must not be there yet.
    _bare(releases / "verl", "verl.utils.experimental")
    verl = importlib.import_module("verl.utils.experimental.torch_functional")
    _bare(releases / "trl", "trl.kernels")
    _bare(releases / "trl", "trl.trainer")
    has_triton = importlib.util.find_spec("triton") is not None
    _stub("transformers", utils=_stub("transformers.utils", is_triton_available=lambda: has_triton))
    # Gathers a head that DeepSpeed has sharded; there is none here.
    _stub("trl.trainer.utils", maybe_gather_lm_head_ctx=lambda *_: contextlib.nullcontext())
    trl = importlib.import_module("trl.kernels.chunked_logprob")
    _bare(releases / "liger_kernel", "liger_kernel.chunked_loss")
    liger = importlib.import_module("liger_kernel.chunked_loss.grpo_loss")
    return {
        "trl": trl.ChunkedLogProbFunction,
        "verl": verl,
        "liger": liger.LigerFusedLinearGRPOLoss,
    }


def _stub(name: str, **attributes: Any) -> types.ModuleType:
    """Registers a module that holds just these names."""
    module = types.ModuleType(name)
    vars(module).update(attributes)
    sys.modules[name] = module
    return module


def _bare(root: pathlib.Path, name: str) -> None:
    """Registers a package and those above it without running their `__init__`."""
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        package = ".".join(parts[:depth])
        if package not in sys.modules:
            path = root.joinpath(*parts[:depth])
            if not path.is_dir():
                raise FileNotFoundError(f"{path} is not in the release")
            _stub(package, __path__=[str(path)])
