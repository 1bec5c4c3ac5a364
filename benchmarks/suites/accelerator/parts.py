"""The parts of the measurements on an accelerator, and the plans that put them in an order."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.harness.report import Column

FAMILIES = ("kl", "losses", "advantages", "reductions", "rewards", "corrections", "diagnostics")


@dataclasses.dataclass(frozen=True)
class Peer:
    """A contender that runs in an environment without this project.

    Attributes:
      module: the contender.
      load: its arguments, for a smoke test or not.
    """

    module: str
    load: Callable[[bool], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of the measurement: what the contender of a module is asked, on an accelerator or a CPU.

    Attributes:
      minutes: that it takes on a GPU.
      load: arguments of the contender, for a smoke test or not, and for a directory of larger results.
      fresh: whether each request gets a process of its own, which has all of the memory.
      settings: variables of the environment of a request's process.
      peers: contenders of other libraries, by request.
    """

    title: str
    module: str
    requests: Sequence[str]
    tiny: Sequence[str]
    minutes: float
    columns: Mapping[str, Column]
    load: Callable[[bool, pathlib.Path], dict[str, Any]] = lambda tiny, directory: {"tiny": tiny}
    fresh: bool = False
    settings: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)
    peers: Mapping[str, Peer] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """Returns the name on the command line; a race shares its module with the measurement of more models."""
        last = self.module.rpartition(".")[2]
        return "race" if self.peers else {"narrow": "parity"}.get(last, last)


# A table leaves out the columns that no row has.
HEAD_COLUMNS = {
    "of": ("what", ""),
    "ms": ("ms", ".3g"),
    "of_naive": ("of naive", ".2f"),
    "rate": ("TFLOP/s", ".3g"),
    "share": ("of the published rate", ".0%"),
    "bytes": ("temporary MiB", "MiB"),
    "differs": ("gradients differ by", ".0e"),
}
MODEL_COLUMNS = {
    "rollout_s": ("sampling s", ".3g"),
    "rollout_rate": ("tokens/s", ",.0f"),
    "rollout_mfu": ("MFU", ".1%"),
    "rollout_bytes": ("peak MiB", "MiB"),
    "update_s": ("update s", ".3g"),
    "update_rate": ("tokens/s", ",.0f"),
    "update_mfu": ("MFU", ".1%"),
    "update_bytes": ("peak MiB", "MiB"),
}
ALL = (
    Part(
        "Recorded PyTorch results, errors over their bounds",
        "tests.goldens.narrow",
        [f"{family} {dtype}" for dtype in ("float32", "bfloat16") for family in FAMILIES],
        ["kl float32"],
        2.0,
        {"compared": ("compared", "d"), "cases": ("of", "d"), "share": ("largest error / bound", ".2g")},
        load=lambda tiny, directory: {"every": 150 if tiny else 2},
    ),
    Part(
        "The LM head in bfloat16",
        "benchmarks.suites.accelerator.head",
        ["all"],
        ["all"],
        3.5,
        HEAD_COLUMNS,
    ),
    Part(
        "The LM head by tiles and chunks of tokens",
        "benchmarks.suites.accelerator.tiles",
        [
            "naive",
            "tile",
            "tile 4096x2048",
            "tile 2048x16384",
            "tile 8192x8192",
            "fused",
            "fused 2048x2048",
            "fused 8192x2048",
        ],
        ["naive", "tile 16x8", "fused 16x8"],
        2.0,
        HEAD_COLUMNS,
    ),
    Part(
        "Attention with gradients in bfloat16",
        "benchmarks.suites.accelerator.attention",
        [
            "Qwen3-0.6B, 16 x 1,024",
            "Qwen3-8B, 4 x 4,096",
            "Qwen3-8B, 4 x 4,096, window of 1,024",
            "Qwen3-8B, 4 x 8 x 512 packed",
            "Qwen3-8B, 4 x (512 + 8 x 448)",
            "Qwen3-8B, 4 trees of 16 x 1,024",
        ],
        ["tiny"],
        1.5,
        {
            "chosen": ("chosen", ""),
            "ms": ("ms", ".3g"),
            "of_dense": ("over dense", ".2f"),
            "bytes": ("temporary MiB", "MiB"),
            "differs": ("differs by", ".0e"),
        },
    ),
    Part(
        "Experts in bfloat16",
        "benchmarks.suites.accelerator.experts",
        ["Qwen3-30B-A3B, 1,024 rows an expert", "4 layers of its experts, 64 slots"],
        ["tiny product", "tiny sampling"],
        1.5,
        {
            "ms": ("ms", ".3g"),
            "of_equal": ("over equal groups", ".2f"),
            "of_dense": ("over dense", ".2f"),
            "rate": ("TFLOP/s", ".3g"),
            "bytes": ("temporary MiB", "MiB"),
        },
    ),
    Part(
        "Sampling and update of a random model",
        "benchmarks.suites.accelerator.model",
        ["Qwen3-0.6B lora", "Qwen3-0.6B full", "Qwen3-4B lora", "Qwen3-4B full"],
        ["tiny lora"],
        5.0,
        MODEL_COLUMNS,
        load=lambda tiny, directory: {},
        fresh=True,
    ),
)


def _part(module: str) -> Part:
    (part,) = (part for part in ALL if part.module.endswith(f".{module}"))
    return part


def _shape(tiny: bool) -> Mapping[str, Any]:
    """Returns the `config.json` of the model of the race, with which an environment without this project makes it."""
    # Imported late: it loads JAX.
    from train.plan.shapes import PUBLISHED

    small = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "eos_token_id": 0,
    }
    return {**PUBLISHED["Qwen3-0.6B"], **(small if tiny else {})}


def _command_buffers(value: str) -> Mapping[str, str]:
    return {"XLA_FLAGS": f"--xla_gpu_enable_command_buffer={value}"}


# XLA adds to its default with + and takes away with -; an empty list launches every kernel by itself.
COMMAND_BUFFERS: Mapping[str, Mapping[str, str]] = {
    "command buffers by default: Qwen3-0.6B lora": {},
    "of loops too: Qwen3-0.6B lora": _command_buffers("+WHILE,+CONDITIONAL"),
    "none: Qwen3-0.6B lora": _command_buffers(""),
}
PEERS = Peer("benchmarks.suites.accelerator.peers", lambda tiny: {"shape": _shape(tiny)})
OURS, TRL, LIGER = (
    f"{title}: Qwen3-0.6B lora" for title in ("kljax", "transformers, PEFT and TRL", "the same with Liger")
)
KERNELS = (
    "norm and residual",
    "heads of rows",
    "heads of groups",
    "heads of a decode step",
    "gradient of a gated product",
    "head and its sums",
    "two layers with an adapter",
)
# For the day on which a card is at hand, the most worth first; what no longer fits is left out.
NEXT = (
    Part(
        "The main job, `make train`",
        "benchmarks.suites.accelerator.quickstart",
        ["quickstart"],
        ["smoke"],
        2.0,
        {
            "seconds": ("seconds", ".0f"),
            "steps": ("steps", "d"),
            "accuracy_before": ("accuracy before", ".0%"),
            "accuracy_after": ("after", ".0%"),
        },
        load=lambda tiny, directory: {},
    ),
    Part(
        "Pallas kernels of a layer against their formulas",
        "benchmarks.suites.accelerator.kernels",
        KERNELS,
        ["norm and residual", "gradient of a gated product", "head and its sums"],
        1.5,
        {"compared": ("arrays", "d"), "differs": ("largest distance", ".0e"), "allowed": ("allowed", ".0e")},
    ),
    Part(
        "Traces of 2 updates and of 50 decode steps",
        "benchmarks.suites.accelerator.trace",
        ["updates Qwen3-0.6B lora", "decode steps Qwen3-0.6B lora"],
        ["updates tiny lora", "decode steps tiny lora"],
        2.5,
        {
            "kernels": ("kernels", ",d"),
            "ms": ("ms", ".3g"),
            "busy": ("busy", ".0%"),
            "longest": ("longest in all", ""),
            "trace": ("trace", ""),
        },
        load=lambda tiny, directory: {"directory": str(directory / "traces")},
        fresh=True,
    ),
    _part("model"),
    Part(
        "Decode steps by command buffers of XLA",
        "benchmarks.suites.accelerator.decode",
        list(COMMAND_BUFFERS),
        ["by default: tiny lora"],
        3.0,
        {"rollout_s": ("sampling s", ".3g"), "step_ms": ("ms a step", ".3g"), "rollout_rate": ("tokens/s", ",.0f")},
        load=lambda tiny, directory: {},
        fresh=True,
        settings=COMMAND_BUFFERS,
    ),
    dataclasses.replace(
        _part("attention"),
        requests=[
            "Qwen3-8B, 4 x 4,096",
            "Qwen3-8B, 4 x 4,096, window of 1,024",
            "Qwen3-8B, 1 x 32,768",
            "Qwen3-8B, 4 x (512 + 8 x 448)",
        ],
    ),
    _part("tiles"),
    _part("experts"),
    Part(
        "A race on this card: LoRA of rank 32, GRPO with a KL",
        "benchmarks.suites.accelerator.model",
        [OURS, TRL, LIGER],
        ["kljax: tiny lora", "transformers, PEFT and TRL: tiny lora"],
        4.0,
        MODEL_COLUMNS,
        load=lambda tiny, directory: {},
        fresh=True,
        peers=dict.fromkeys((TRL, LIGER, "transformers, PEFT and TRL: tiny lora"), PEERS),
    ),
)
PLANS: Mapping[str, Sequence[Part]] = {"all": ALL, "next": NEXT}
