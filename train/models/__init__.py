"""The decoder and its adapters."""

from train.models.decoder import Decoder, DecoderConfig, KeyValues
from train.models.lora import LoraConfig

__all__ = ["Decoder", "DecoderConfig", "KeyValues", "LoraConfig"]
