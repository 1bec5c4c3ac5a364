"""The number of parameters of a decoder, by its sizes."""

from train.models.config import DecoderConfig


def parameter_count(config: DecoderConfig) -> int:
    """Counts the base parameters, without adapters; a tied head counts once."""
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    attention = config.width * (2 * queries + 2 * keys)
    attention += config.qkv_bias * (queries + 2 * keys) + config.output_bias * config.width
    attention += config.sinks * config.heads
    attention += config.qk_norm * 2 * config.head_dim + config.wide_qk_norm * (queries + keys)
    mlp = 3 * config.width * config.mlp_width + config.mlp_bias * (2 * config.mlp_width + config.width)
    norms = (4 if config.post_norms else 2) * config.width
    tables = config.vocab_size * config.width * (1 if config.tie_embeddings else 2)
    layers = config.layers * (attention + norms) + (config.layers - len(config.expert_layers)) * mlp
    if config.experts is not None:
        experts, shared = config.experts, config.experts.shared_width
        of_layer = experts.count * (3 * experts.width + 1) + (0 if shared is None else 3 * shared + 1)
        biases = experts.bias * experts.count * (1 + 2 * experts.width + config.width)
        layers += len(config.expert_layers) * (config.width * of_layer + biases)
    return layers + tables + config.width
