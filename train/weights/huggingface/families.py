"""The model families of `config.json` as a table: the default of every key, and the implied decoder fields.

The decoder itself knows no families. Defaults are the defaults of the configuration classes of transformers, which old
files rely on; a key without a default is required.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@dataclasses.dataclass(frozen=True)
class Family:
    """One `model_type`.

    Attributes:
      architecture: transformers class of the weights.
      defaults: keys of this family, and defaults that differ from `COMMON`.
      implied: fields of `DecoderConfig` that no key sets.
      activation: key of the activation.
      theta: default base of the rotary frequencies.
      nested_rope: whether full and sliding layers have separate ropes.
      mixture: the keys of its experts, or None for a family without them.
    """

    architecture: str
    defaults: Mapping[str, Any]
    implied: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    activation: str = "hidden_act"
    theta: float = 10000.0
    nested_rope: bool = False
    mixture: "MixtureKeys | None" = None


@dataclasses.dataclass(frozen=True)
class MixtureKeys:
    """The keys of a mixture of experts.

    Attributes:
      count: default number of experts. `num_experts` and `num_local_experts` both name it: transformers writes one of
        them, whatever it has read.
      count_key: the key that transformers writes.
      width: key of the hidden width of an expert.
      normalize: whether gates are normalised; None: `norm_topk_prob` says so.
      wide_gates, bias: as in `ExpertsConfig`.
    """

    count: int
    count_key: str
    width: str
    normalize: bool | None = None
    wide_gates: bool = False
    bias: bool = False


_GEMMA: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    # Gemma 2 also writes this key; `hidden_activation` wins.
    "hidden_act": None,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
    "use_bidirectional_attention": None,
}
_GEMMA_IMPLIED: Mapping[str, Any] = {"norm_offset": True, "post_norms": True}
_QWEN: Mapping[str, Any] = {
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}

_MIXTURE: Mapping[str, Any] = {"num_experts": None, "num_local_experts": None}
_SPARSE: Mapping[str, Any] = {"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": None}

FAMILIES: Mapping[str, Family] = {
    "qwen3": Family("Qwen3ForCausalLM", {**_QWEN, "head_dim": 128, "attention_bias": False}, {"qk_norm": True}),
    "qwen2": Family("Qwen2ForCausalLM", _QWEN, {"qkv_bias": True}),
    "llama": Family("LlamaForCausalLM", {"attention_bias": False, "mlp_bias": False}),
    "mistral": Family("MistralForCausalLM", {"num_key_value_heads": 8, "sliding_window": 4096}),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        {
            # transformers does not read `layer_types` here, so that it stays an unknown key.
            **{key: value for key, value in _QWEN.items() if key != "layer_types"},
            **_MIXTURE,
            **_SPARSE,
            "num_key_value_heads": 4,
            "attention_bias": False,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        {"qk_norm": True},
        mixture=MixtureKeys(128, "num_experts", "moe_intermediate_size"),
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        {
            **_QWEN,
            **_MIXTURE,
            **_SPARSE,
            "num_key_value_heads": 16,
            "qkv_bias": True,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
        mixture=MixtureKeys(60, "num_experts", "moe_intermediate_size"),
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        {
            **_MIXTURE,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "num_experts_per_tok": 2,
        },
        theta=1_000_000.0,
        mixture=MixtureKeys(8, "num_local_experts", "intermediate_size", normalize=True, wide_gates=True),
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        {
            **_MIXTURE,
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
            "clip_qkv": None,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
        },
        {"wide_qk_norm": True},
        mixture=MixtureKeys(64, "num_experts", "intermediate_size"),
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        {
            **_MIXTURE,
            "vocab_size": 201_088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 36,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "sliding_window": 128,
            "layer_types": None,
            "max_position_embeddings": 131_072,
            "attention_bias": True,
            "num_experts_per_tok": 4,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            # Published files repeat two numbers, which transformers does not read, and have experts in mxfp4.
            "experts_per_token": None,
            "initial_context_length": None,
            "quantization_config": None,
        },
        {"sinks": True},
        theta=150_000.0,
        mixture=MixtureKeys(128, "num_local_experts", "intermediate_size", normalize=True, bias=True),
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        {
            **_GEMMA,
            "vocab_size": 262_208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "rope_local_base_freq": 10000.0,
            "sliding_window_pattern": 6,
            "_sliding_window_pattern": None,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
        {**_GEMMA_IMPLIED, "qk_norm": True},
        activation="hidden_activation",
        theta=1_000_000.0,
        nested_rope=True,
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        {**_GEMMA, "sliding_window_pattern": 2, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        _GEMMA_IMPLIED,
        activation="hidden_activation",
    ),
}

# Keys of every family that change the model, with their defaults.
COMMON: Mapping[str, Any] = {
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": None,
    "rope_theta": None,
    "rope_scaling": None,
    "rope_parameters": None,
}

# Keys that do not change the model, by reason.
IGNORED: Mapping[str, frozenset[str]] = {
    "origin of the file": frozenset(
        {
            "architectures",
            "model_type",
            "transformers_version",
            "_name_or_path",
            "_model_name_or_path",
            "torch_dtype",
            "dtype",
            "tokenizer_class",
            "unsloth_fixed",
            "unsloth_version",
            "transformers.js_config",
        }
    ),
    "tokens and sampling, which the tokenizer and the run decide": frozenset(
        {
            "bos_token_id",
            "eos_token_id",
            "pad_token_id",
            "unk_token_id",
            "sep_token_id",
            "decoder_start_token_id",
            "begin_suppress_tokens",
            "suppress_tokens",
            "bad_words_ids",
            "forced_bos_token_id",
            "forced_eos_token_id",
            "max_length",
            "min_length",
            "do_sample",
            "early_stopping",
            "num_beams",
            "num_beam_groups",
            "diversity_penalty",
            "temperature",
            "top_k",
            "top_p",
            "typical_p",
            "repetition_penalty",
            "length_penalty",
            "no_repeat_ngram_size",
            "encoder_no_repeat_ngram_size",
            "num_return_sequences",
            "remove_invalid_values",
            "prefix",
            "exponential_decay_length_penalty",
        }
    ),
    "past training": frozenset(
        {"initializer_range", "attention_dropout", "pretraining_tp", "router_aux_loss_coef", "output_router_logits"}
    ),
    "execution in transformers": frozenset(
        {
            "use_cache",
            "cache_implementation",
            "output_attentions",
            "output_hidden_states",
            "output_scores",
            "return_dict",
            "return_dict_in_generate",
            "torchscript",
            "use_bfloat16",
            "tf_legacy_loss",
            "pruned_heads",
            "chunk_size_feed_forward",
            "attn_implementation",
            "_attn_implementation",
            "_flash_attn_2_enabled",
            "_attn_implementation_autoset",
            "gradient_checkpointing",
        }
    ),
    "heads of other tasks": frozenset(
        {"id2label", "label2id", "problem_type", "num_labels", "finetuning_task", "task_specific_params"}
    ),
}

# Keys that are supported only at these values.
ALLOWED_VALUES: Mapping[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (False,),
    "is_decoder": (False, True),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (False,),
    "use_bidirectional_attention": (None, False),
    "partial_rotary_factor": (None, 1, 1.0),
    "quantization_config": (None,),
    "use_mrope": (False,),
    "rope_interleaved": (False,),
    "is_llama_config": (True,),
    "router_jitter_noise": (0, 0.0),
}

ACTIVATIONS: Mapping[str, str] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
KINDS: Mapping[str, str] = {"full_attention": "full", "sliding_attention": "sliding"}
# Multimodal models whose text part is one of the families, under `text_config`.
NESTED: Mapping[str, str] = {"gemma3": "gemma3_text"}
# Keys of their vision parts.
VISION_KEYS = frozenset(
    {"vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index"}
)


def ignored_keys() -> frozenset[str]:
    """Collects all keys that do not change the model."""
    return frozenset().union(*IGNORED.values())
