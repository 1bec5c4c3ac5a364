"""The decoder and its LoRA adapter."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from train.config.types import CommitHash, EvenSize, LoraTargets, Positive, RematSetting, Section, Size, StoredPath

DType = Literal["float32", "bfloat16"]
Quantization = Annotated[
    Literal["int8"] | None, "int8 or null (nf4 is not there: its logits moved too far, and XLA unpacks it to bytes)"
]

# `model=tiny` in place of the section: a random Qwen 3 small enough for a laptop, to try any recipe.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "tiny": {
        "layers": 2,
        "width": 64,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "mlp_width": 128,
        "rope_theta": 1_000_000.0,
        "tie_embeddings": True,
        "qk_norm": True,
    }
}
BYTE_VOCABULARY = 264
"""Tokens of the byte-level tokenizer: 256 bytes, 3 special tokens, rounded up so that 8 divides it."""
MODEL_EXPECTED = f"a mapping with path, dtype, layers, width and so on, or one of {', '.join(PRESETS)}"


MOST_EXPERTS = 4096
"""Far above the 512 of the models that are known; memory and time grow with tokens times experts."""


class Experts(Section):
    count: Annotated[int, Field(ge=1, le=MOST_EXPERTS)]
    """Experts of a layer."""
    active: Size = 2
    """Experts that compute a token; at most count."""
    width: Size
    """Hidden size of an expert."""
    normalize: bool = True
    """Divide the gates of a token by their sum."""
    shared_width: Size | None = None
    """Hidden size of an expert that computes every token, times a sigmoid; null: none."""


class Model(Section):
    path: StoredPath | None = None
    """Hugging Face folder, GGUF file or, with revision, org/name on the Hub to start from; sets the shape."""
    revision: CommitHash | None = None
    """Full hash of the commit of path on the Hugging Face Hub; null: path is on this machine."""
    dtype: DType = "float32"
    """Dtype of the decoder's computation; norms, softmax, log-probs and the optimizer use float32."""
    param_dtype: DType = "float32"
    """Dtype of the stored base weights; bfloat16 only if they are frozen (lora)."""
    quantization: Quantization = None
    """Store the layers' kernels in int8 with a scale per output channel, only with lora; null: in param_dtype."""
    attention: Literal["auto", "xla"] = "auto"
    """auto: kernels for attention on TPUs, on NVIDIA GPUs in bfloat16 for more than that; xla: always XLA."""
    remat: RematSetting = "auto"
    """Recomputed in the backward pass: full: all of a layer; dots: all but projections; auto: what memory asks for."""
    allow_nonfinite: bool = False
    """Load weights of folders that have NaN or infinity; false: refuse them."""
    freeze_pad_embedding: bool | None = None
    """Train no embedding of the pad_token_id of config.json through the inputs; null: do, with a warning."""
    layers: Size = 2
    """Decoder layers."""
    width: Size = 128
    """Model width, the size of the residual stream."""
    heads: Size = 4
    """Query heads."""
    kv_heads: Size = 2
    """Key and value heads; a divisor of heads."""
    head_dim: EvenSize = 32
    """Width of a head."""
    mlp_width: Size = 384
    """Hidden size of the gated MLP."""
    rope_theta: Positive = 10000.0
    """Base of the rotary frequencies."""
    norm_eps: Positive = 1e-6
    """Epsilon of RMSNorm."""
    tie_embeddings: bool = True
    """Use the embedding table as the output head."""
    qkv_bias: bool = False
    """Biases in the query, key and value projections (Qwen 2)."""
    qk_norm: bool = False
    """RMSNorm on queries and keys (Qwen 3)."""
    experts: Experts | None = None
    """A mixture of experts in place of the MLP of every layer; null: dense layers."""

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, raw: Any) -> Any:
        return expand_preset(raw)

    @model_serializer(mode="wrap")
    def _without_shape(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leaves the shape out if a folder sets it, so that the written config loads again."""
        fields: dict[str, Any] = dump(self)
        return fields if self.path is None else {key: value for key, value in fields.items() if key in NOT_SHAPE}

    def shape(self) -> dict[str, Any]:
        """Returns the shape fields, which `config.json` sets if there is a folder."""
        return {key: getattr(self, key) for key in type(self).model_fields if key not in NOT_SHAPE}


NOT_SHAPE = (
    "path",
    "revision",
    "dtype",
    "param_dtype",
    "quantization",
    "attention",
    "remat",
    "allow_nonfinite",
    "freeze_pad_embedding",
)


def expand_preset(raw: Any) -> Any:
    """Returns the fields of a named preset; any other value unchanged."""
    return dict(PRESETS[raw]) if isinstance(raw, str) and raw in PRESETS else raw


def without_warm_start(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Turns the warm start off by default in a raw config that starts from a folder or a preset."""
    model = expand_preset(raw.get("model"))
    section = raw.get("warm_start", {})
    if not isinstance(model, dict) or not isinstance(section, dict):
        return dict(raw)
    preset = any(model.items() >= fields.items() for fields in PRESETS.values())
    return {**raw, "warm_start": {"steps": 0, **section}} if preset or model.get("path") is not None else dict(raw)


class Lora(Section):
    rank: Size = 8
    """Rank of the adapter matrices."""
    alpha: Positive = 16.0
    """Scale: the adapter's output is multiplied by alpha / rank."""
    rslora: bool = False
    """Rank-stabilised LoRA: multiply by alpha / sqrt(rank) instead."""
    targets: LoraTargets = ("q_proj", "k_proj", "v_proj", "o_proj")
    """Modules with an adapter."""
    path: StoredPath | None = None
    """Start from this PEFT folder; rank, alpha, rslora and targets are its own unless given. null: a new adapter."""
