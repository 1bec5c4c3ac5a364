"""The decoder and its adapters."""

from train.models.cache import DecoderState, KeyValues
from train.models.config import (
    ClampedSwiglu,
    DecoderConfig,
    ExpertsConfig,
    LayerKind,
    LinearScaling,
    Llama3Scaling,
    LoraConfig,
    Rope,
    YarnScaling,
)
from train.models.decoder import Decoder
from train.models.layers import ValueHead
from train.models.rope import RopeTables, rope_tables
from train.models.transformer import Transformer

__all__ = [
    "ClampedSwiglu",
    "Decoder",
    "DecoderConfig",
    "DecoderState",
    "ExpertsConfig",
    "KeyValues",
    "LayerKind",
    "LinearScaling",
    "Llama3Scaling",
    "LoraConfig",
    "Rope",
    "RopeTables",
    "Transformer",
    "ValueHead",
    "YarnScaling",
    "rope_tables",
]
