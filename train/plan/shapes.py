"""The decoder and the token ids of a config whose Hugging Face folder is elsewhere."""

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from train.config.errors import UserError, field_errors
from train.config.json_text import parse_json
from train.config.schema import Config
from train.data.tokenizers import Tokenizer, load_tokenizer
from train.models import Decoder
from train.storage.paths import as_path
from train.weights.huggingface.config import text_part
from train.weights.model import make_policy_model

if TYPE_CHECKING:
    from train.data.tasks import Example


def _qwen3(layers: int, width: int, heads: int, mlp_width: int, *, tied: bool = False) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 151_936,
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": mlp_width,
        "rope_theta": 1_000_000,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": 40_960,
        "tie_word_embeddings": tied,
        "eos_token_id": 151_645,
    }


def _llama3(
    layers: int, width: int, heads: int, mlp_width: int, *, head_dim: int = 128, factor: float = 8.0, tied: bool = False
) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128_256,
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": head_dim,
        "intermediate_size": mlp_width,
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "factor": factor,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": tied,
        "eos_token_id": [128_001, 128_008, 128_009],
    }


QWEN3_30B_EXPERTS: Mapping[str, Any] = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}
# From the public config.json of each model; names of folders, without `-Instruct` and `-Base`.
PUBLISHED: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "Qwen3-0.6B": _qwen3(28, 1024, 16, 3072, tied=True),
        "Qwen3-1.7B": _qwen3(28, 2048, 16, 6144, tied=True),
        "Qwen3-4B": _qwen3(36, 2560, 32, 9728, tied=True),
        "Qwen3-8B": _qwen3(36, 4096, 32, 12_288),
        "Qwen3-14B": _qwen3(40, 5120, 40, 17_408),
        "Qwen3-32B": _qwen3(64, 5120, 64, 25_600),
        "Qwen3-30B-A3B": {**_qwen3(48, 2048, 32, 6144), **QWEN3_30B_EXPERTS},
        "Llama-3.1-8B": _llama3(32, 4096, 32, 14_336),
        "Llama-3.1-70B": _llama3(80, 8192, 64, 28_672),
        "Llama-3.2-1B": _llama3(16, 2048, 32, 8192, head_dim=64, factor=32.0, tied=True),
        "Llama-3.2-3B": _llama3(28, 3072, 24, 8192, factor=32.0, tied=True),
    }
)


@dataclasses.dataclass(frozen=True)
class TokenIds:
    """The ids of a tokenizer whose files are elsewhere; it encodes and decodes nothing."""

    vocab_size: int
    eos_ids: tuple[int, ...]
    pad_id: int = 0
    bos_id: int | None = None

    def token_bytes(self) -> list[bytes]:
        """Returns one byte for each id: the table of stop strings has its size."""
        return [b"\0"] * self.vocab_size

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def decode(self, ids: Iterable[int]) -> str:
        raise NotImplementedError

    def decode_all(self, ids: Iterable[int]) -> str:
        raise NotImplementedError

    def prompt_ids(self, example: "Example") -> list[int]:
        raise NotImplementedError

    def solution_ids(self, example: "Example") -> list[int]:
        raise NotImplementedError


def planned_model(config: Config) -> tuple[Decoder, Tokenizer]:
    """Builds the decoder of a config, and the ids of its tokenizer, from a `config.json` or a published shape.

    Raises:
      UserError: the folder is not here, and no published shape has its name; or its `config.json` does not fit.
    """
    path = config.model.path
    if path is None:
        tokenizer = load_tokenizer(config)
        return make_policy_model(config, tokenizer), tokenizer
    raw = folder_config(path, "model.path")
    text = text_part(raw)
    ends = text.get("eos_token_id", raw.get("eos_token_id"))
    eos_ids = ends if isinstance(ends, list) else [ends or 0]
    ids = TokenIds(int(text.get("vocab_size", 1)), tuple(eos_ids))
    return make_policy_model(config, ids, folder_config=raw), ids


def folder_config(path: str | Path, field: str) -> Mapping[str, Any]:
    """Returns the `config.json` of a folder, or the published one of a model of its name.

    Args:
      path: the folder, of this machine or in an object store.
      field: the field of the config that names it.

    Raises:
      UserError: there is neither.
    """
    file = as_path(path) / "config.json"
    if file.is_file():
        with field_errors(field):
            raw = parse_json(file.read_bytes())
            if not isinstance(raw, dict):
                raise ValueError(f"{file}: got {type(raw).__name__}, expected a mapping")
        return raw
    name = Path(path).name
    known = {key.casefold(): value for key, value in PUBLISHED.items()}
    for suffix in ("", "-Instruct", "-Base"):
        if name.casefold().removesuffix(suffix.casefold()) in known:
            return known[name.casefold().removesuffix(suffix.casefold())]
    raise UserError(
        f"{field}: there is no {file}, and no shape is published here for {name!r}; copy config.json of the model "
        f"there (no other file is needed), or use a folder named as one of {', '.join(PUBLISHED)}"
    )
