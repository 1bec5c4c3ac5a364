"""The decoder and its adapters."""

from train.models.cache import DecoderState, GroupCache, KeyValues, LayerCache, LayerState, PromptState, SlotCache
from train.models.config import (
    DecoderConfig,
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
    "Decoder",
    "DecoderConfig",
    "DecoderState",
    "GroupCache",
    "KeyValues",
    "LayerCache",
    "LayerKind",
    "LayerState",
    "LinearScaling",
    "Llama3Scaling",
    "LoraConfig",
    "PromptState",
    "Rope",
    "RopeTables",
    "SlotCache",
    "Transformer",
    "ValueHead",
    "YarnScaling",
    "rope_tables",
]
