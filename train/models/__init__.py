"""The decoder and its adapters."""

from train.models.cache import KeyValues, SlotCache
from train.models.config import DecoderConfig, LinearScaling, Llama3Scaling, Rope, YarnScaling
from train.models.decoder import Decoder, layer_variables
from train.models.lora import LoraConfig

__all__ = [
    "Decoder",
    "DecoderConfig",
    "KeyValues",
    "LinearScaling",
    "Llama3Scaling",
    "LoraConfig",
    "Rope",
    "SlotCache",
    "YarnScaling",
    "layer_variables",
]
