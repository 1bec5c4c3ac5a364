"""The decoder and its adapter."""

from train.config.types import Count, EvenCount, LoraTargets, Positive, Section, Text


class Model(Section):
    layers: Count = 2
    """Decoder layers."""
    width: Count = 128
    """Size of the residual stream."""
    heads: Count = 4
    """Query heads."""
    kv_heads: Count = 2
    """Key and value heads; divides heads."""
    head_dim: EvenCount = 32
    """Size of a head."""
    mlp_width: Count = 384
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


class Lora(Section):
    rank: Count = 8
    """Rank of the adapter matrices."""
    alpha: Positive = 16.0
    """Scale: the adapter's output is multiplied by alpha / rank."""
    rslora: bool = False
    """Rank-stabilised: multiplied by alpha / sqrt(rank) instead."""
    targets: LoraTargets = ("q_proj", "k_proj", "v_proj", "o_proj")
    """Modules that get an adapter."""
    path: Text | None = None
    """Start from this PEFT folder, whose rank, alpha and targets are those here; null: from a new adapter."""
