"""The decoder and its adapters."""

from train.models.cache import KeyValues, SlotCache
from train.models.config import DecoderConfig, LinearScaling, Llama3Scaling, Rope, YarnScaling
from train.models.decoder import Decoder, Turns, layer_variables, rotations
from train.models.group_cache import GroupCache
from train.models.lora import LoraConfig

__all__ = [
    "Decoder",
    "DecoderConfig",
    "GroupCache",
    "KeyValues",
    "LinearScaling",
    "Llama3Scaling",
    "LoraConfig",
    "Rope",
    "SlotCache",
    "Turns",
    "YarnScaling",
    "layer_variables",
    "rotations",
]
