"""Conversion between `config.json` of Hugging Face and `DecoderConfig`. An unknown key is an error."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from train.config.json_text import parse_json
from train.config.regular_file import read_regular
from train.models.config import (
    AttentionKind,
    ClampedSwiglu,
    DecoderConfig,
    DType,
    ExpertsConfig,
    Kernels,
    LayerKind,
    LoraConfig,
    MlpKind,
    Quantization,
    Remat,
    Rope,
    YarnScaling,
)
from train.weights.huggingface.families import (
    ACTIVATIONS,
    ALLOWED_VALUES,
    COMMON,
    FAMILIES,
    KINDS,
    NESTED,
    REQUIRED,
    VISION_KEYS,
    Family,
    ignored_keys,
)
from train.weights.huggingface.rope import read_rope, write_rope

# Servers use it as their maximum sequence length. A `DecoderConfig` has no such limit.
MAX_POSITIONS = 32768
# Families whose layers all slide where there is a window.
_ALL_SLIDING = ("mistral", "mixtral", "qwen3_moe")
# The key that says how experts are stored, which a folder of floats lacks.
QUANTIZATION = "quantization_config"


def decoder_config(
    source: str | Path | Mapping[str, Any],
    *,
    lora: LoraConfig | None = None,
    dtype: DType = "float32",
    param_dtype: DType = "float32",
    attention: Kernels = "auto",
    remat: Remat = "full",
    quantization: Quantization | None = None,
) -> DecoderConfig:
    """Reads the decoder of a `config.json`, as transformers would build it.

    For a multimodal model (`gemma3`), this is the text part.

    Args:
      source: a folder with a `config.json`, the file, or its mapping.
      lora: LoRA section of the decoder.
      dtype: compute dtype; `dtype` and `torch_dtype` of the file describe its weights and are ignored.
      param_dtype: dtype of the parameters.
      attention, remat, quantization: as in `DecoderConfig`.

    Raises:
      FileNotFoundError: the file does not exist.
      ValueError: the file is no JSON, the model is not supported, or a key or value is unknown; names the key.
    """
    raw = text_part(_read(source))
    family = family_of(raw)
    values = _check_keys(raw, family)
    ropes = _ropes(values, family)
    kinds, window = _layers(values, raw["model_type"])
    experts, mlps = _experts(values, family)
    _check_repeated(values, ropes[0])
    _check_quantization(values.get(QUANTIZATION))
    heads = _count(values, "num_attention_heads")
    head_dim = _head_dim(values)
    biases = {"qkv_bias": True, "output_bias": True} if _flag(values, "attention_bias") else {}
    biases |= {"qkv_bias": True} if _flag(values, "qkv_bias") else {}
    scalar = values.get("query_pre_attn_scalar")
    fields = {**biases, **family.implied}
    return DecoderConfig(
        vocab_size=_count(values, "vocab_size"),
        layers=_count(values, "num_hidden_layers"),
        width=_count(values, "hidden_size"),
        heads=heads,
        kv_heads=heads if values["num_key_value_heads"] is None else _count(values, "num_key_value_heads"),
        head_dim=head_dim,
        mlp_width=_count(values, "intermediate_size"),
        rope=ropes[0],
        local_rope=ropes[1] if "sliding" in kinds and ropes[0] != ropes[1] else None,
        sliding_window=window if "sliding" in kinds else None,
        pattern=tuple(map(LayerKind, kinds, mlps)),
        activation=_choice(values, family.activation, ACTIVATIONS),
        norm_eps=_number(values, "rms_norm_eps"),
        tie_embeddings=_flag(values, "tie_word_embeddings"),
        mlp_bias=_flag(values, "mlp_bias"),
        embed_scale=_count(values, "hidden_size") ** 0.5 if family.implied.get("norm_offset") else None,
        attention_scale=None if scalar in (None, head_dim) else _number(values, "query_pre_attn_scalar") ** -0.5,
        attention_softcap=_optional(values, "attn_logit_softcapping"),
        final_softcap=_optional(values, "final_logit_softcapping"),
        qkv_clip=_optional(values, "clip_qkv"),
        experts=experts,
        dtype=dtype,
        param_dtype=param_dtype,
        attention=attention,
        remat=remat,
        quantization=quantization,
        lora=lora,
        **fields,
    )


def hf_config(config: DecoderConfig, *, like: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Writes the `config.json` of a decoder; `decoder_config` reads back a decoder of the same shape.

    Args:
      config: the decoder.
      like: original mapping, whose family and keys without effect on the shape are kept; for a multimodal model, the
        text part is written. None means the first family with this shape.

    Raises:
      ValueError: no model of the family, or of any family, has this shape.
    """
    shape = _shape_of_file(config)
    if like is not None:
        text = text_part(like)
        family_of(text)
        if decoder_config(text) == shape:
            text = {key: value for key, value in text.items() if key != QUANTIZATION}
            return {**text, "architectures": [FAMILIES[text["model_type"]].architecture]}
        candidates = [text["model_type"]]
        ignored = {key: value for key, value in text.items() if key in ignored_keys()}
    else:
        candidates = list(FAMILIES)
        ignored = {}
    for name in candidates:
        mapping = ignored | _hf_keys(shape, name)
        if _describes(mapping, shape):
            return mapping
    raise ValueError(f"no model of {', '.join(candidates)} in transformers has this shape: {shape}")


def _shape_of_file(config: DecoderConfig) -> DecoderConfig:
    """Returns the decoder with the defaults of what no `config.json` says: how it computes, and how it is trained."""
    plain: Any = {"dtype": "float32", "param_dtype": "float32", "attention": "auto", "remat": "full"}
    trained: Any = {"lora": None, "quantization": None, "constant_embedding": None, "replay_threshold": 0.0}
    experts = None if config.experts is None else dataclasses.replace(config.experts, choice_bias=False)
    return dataclasses.replace(config, experts=experts, **plain, **trained)


def text_part(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the mapping of the language model: the text part of a multimodal model, else the mapping itself.

    Raises:
      ValueError: a multimodal model has no text part.
    """
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in NESTED:
        return raw
    text = raw.get("text_config")
    if not isinstance(text, Mapping):
        raise ValueError(f"text_config: got {text!r}, expected a mapping, as model_type is {kind!r}")
    outer = {key: value for key, value in raw.items() if key not in {*VISION_KEYS, "text_config", "architectures"}}
    return {**text, **outer, "model_type": NESTED[kind]}


def pad_id(source: str | Path | Mapping[str, Any]) -> int | None:
    """Returns `pad_token_id`, whose embedding transformers does not train through the inputs.

    Args:
      source: a folder with a `config.json`, the file, or its mapping.

    Returns:
      The id, or None where the file has none.
    """
    raw = _read(source)
    value = text_part(raw).get("pad_token_id", raw.get("pad_token_id"))
    return value if isinstance(value, int) and value >= 0 else None


def family_of(raw: Mapping[str, Any]) -> Family:
    """Looks up the family of a mapping; raises ValueError listing the supported families for any other model."""
    kind = raw.get("model_type")
    architectures = raw.get("architectures")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ValueError(f"model_type: got {kind!r}, expected one of {', '.join([*FAMILIES, *NESTED])}")
    family = FAMILIES[kind]
    if architectures and (not isinstance(architectures, list | tuple) or family.architecture not in architectures):
        expected = f"expected [{family.architecture!r}] as model_type is {kind!r}"
        raise ValueError(f"architectures: got {architectures!r}, {expected}")
    return family


def _read(source: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(source, Mapping):
        return source
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    try:
        raw = parse_json(read_regular(path))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: got {type(raw).__name__}, expected a mapping")
    return raw


def _check_keys(raw: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Adds the defaults of the family, and raises for keys that the family does not have."""
    known = {**COMMON, **family.defaults}
    unknown = sorted(raw.keys() - known.keys() - set(REQUIRED) - ALLOWED_VALUES.keys() - ignored_keys())
    kind = raw["model_type"]
    if unknown:
        raise ValueError(
            f"{', '.join(unknown)}: not understood in a config of {kind}; "
            "an unknown key may change the model, so it is not ignored"
        )
    for key, allowed in ALLOWED_VALUES.items():
        if key in raw and key not in {QUANTIZATION} & family.defaults.keys() and raw[key] not in allowed:
            raise ValueError(f"{key}: got {raw[key]!r}, expected {' or '.join(map(repr, allowed))}: not supported")
    missing = [key for key in REQUIRED if raw.get(key) is None and key not in known]
    if missing:
        raise ValueError(f"{', '.join(missing)}: missing in a config of {kind}")
    if raw.get("rope_scaling") is not None or raw.get("rope_parameters") is not None:
        known["rope_parameters"] = None
    # A null has the default of the family, as in transformers.
    set_keys = {key: value for key, value in raw.items() if value is not None or key != "rope_parameters"}
    return {**known, **set_keys}


def _check_repeated(values: Mapping[str, Any], rope: Rope) -> None:
    """Raises ValueError where a published file of GPT-OSS contradicts itself."""
    count = values.get("experts_per_token")
    length = values.get("initial_context_length")
    scaling = rope.scaling
    if count is not None and count != values["num_experts_per_tok"]:
        raise ValueError(
            f"experts_per_token: got {count!r}, but num_experts_per_tok = {values['num_experts_per_tok']!r}; remove it"
        )
    if length is not None and not (isinstance(scaling, YarnScaling) and scaling.original_length == length):
        raise ValueError(
            f"initial_context_length: got {length!r}, expected original_max_position_embeddings of a rope of yarn; "
            "remove it"
        )


def _check_quantization(stored: Any) -> None:
    """Raises ValueError unless experts are floats, or in mxfp4."""
    if stored is None:
        return
    if not isinstance(stored, Mapping) or stored.get("quant_method") != "mxfp4":
        raise ValueError(f"{QUANTIZATION}: got {stored!r}, expected null or quant_method 'mxfp4': not supported")
    unknown = sorted(stored.keys() - {"quant_method", "modules_to_not_convert", "dequantize"})
    if unknown:
        raise ValueError(f"{QUANTIZATION}: {', '.join(unknown)}: not understood")


def _ropes(values: Mapping[str, Any], family: Family) -> tuple[Rope, Rope]:
    """Reads the ropes of full and sliding layers from either form of the keys; both forms must agree."""
    new = values["rope_parameters"]
    length = values["max_position_embeddings"]
    old = values["rope_scaling"]
    theta = family.theta if values["rope_theta"] is None else _number(values, "rope_theta")
    if old is not None and not isinstance(old, Mapping):
        raise ValueError(f"rope_scaling: got {old!r}, expected a mapping or null")
    full = read_rope(old or {}, where="rope_scaling", theta=theta, length=length)
    local = Rope(_number(values, "rope_local_base_freq")) if family.nested_rope else full
    if new is None:
        return full, local
    if not isinstance(new, Mapping):
        raise ValueError(f"rope_parameters: got {new!r}, expected a mapping")
    if family.nested_rope:
        if set(new) != set(KINDS):
            raise ValueError(f"rope_parameters: got {', '.join(new)}, expected {' and '.join(KINDS)}")
        parts = [new[kind] or {} for kind in KINDS]
        names = [f"rope_parameters.{kind}" for kind in KINDS]
    else:
        parts = [new, new]
        names = ["rope_parameters"] * 2
    ropes = tuple(
        read_rope(part, where=name, theta=rope.theta, length=length)
        for part, name, rope in zip(parts, names, (full, local), strict=True)
    )
    if old is not None and ropes[0] != full:
        raise ValueError(f"rope_scaling: got {old!r}, which differs from rope_parameters; set only one of them")
    return ropes[0], ropes[1]


def _layers(values: Mapping[str, Any], kind: str) -> tuple[tuple[AttentionKind, ...], int | None]:
    """Reads the attention of every layer, and the window of the sliding layers."""
    count = _count(values, "num_hidden_layers")
    # A window that is switched off may have any value: transformers writes 0 for Qwen 2 MoE.
    off = values.get("sliding_window") is None or not _flag(values, "use_sliding_window", default=True)
    window = None if off else _count(values, "sliding_window")
    first = _integer(values, "max_window_layers", least=0) if "max_window_layers" in values else count
    named = values.get("layer_types")
    kinds = ["full"] * count
    if named is not None:
        known = isinstance(named, list | tuple) and all(isinstance(name, str) and name in KINDS for name in named)
        if not known or len(named) != count:
            raise ValueError(f"layer_types: got {named!r}, expected {count} of {', '.join(KINDS)}")
        kinds = [KINDS[name] for name in named]
    elif "sliding_window_pattern" in values:
        # As in transformers: Gemma 2 alternates whatever the key says, and `_sliding_window_pattern`, which is written
        # beside `layer_types`, is never read.
        pattern = 2 if kind == "gemma2" else _count(values, "sliding_window_pattern")
        kinds = ["sliding" if (layer + 1) % pattern else "full" for layer in range(count)]
    elif kind == "gpt_oss":
        kinds = ["full" if layer % 2 else "sliding" for layer in range(count)]
    elif kind == "qwen2_moe" and window is not None:
        kinds = ["full" if layer % 2 or layer >= first else "sliding" for layer in range(count)]
    elif kind in _ALL_SLIDING and window is not None:
        kinds = ["sliding"] * count
    elif "max_window_layers" in values and window is not None:
        kinds = ["sliding" if layer >= first else "full" for layer in range(count)]
    if "sliding" in kinds and window is None:
        raise ValueError("sliding_window: got null, or use_sliding_window is off, but layer_types has sliding layers")
    return tuple(kinds), window  # type: ignore[arg-type]


def _experts(values: Mapping[str, Any], family: Family) -> tuple[ExpertsConfig | None, tuple[MlpKind, ...]]:
    """Reads the mixture of experts, and the MLP of every layer."""
    layers = _count(values, "num_hidden_layers")
    keys = family.mixture
    mlps: list[MlpKind] = ["dense"] * layers
    if keys is None:
        return None, tuple(mlps)
    names = [name for name in ("num_experts", "num_local_experts") if values[name] is not None]
    if len({values[name] for name in names}) > 1:
        both = " and ".join(f"{name} = {values[name]!r}" for name in names)
        raise ValueError(f"num_experts: got {both}, expected one number; remove one of the keys")
    step = _count(values, "decoder_sparse_step") if "decoder_sparse_step" in values else 1
    dense = values.get("mlp_only_layers") or []
    if not isinstance(dense, list | tuple) or not all(type(layer) is int for layer in dense):
        raise ValueError(f"mlp_only_layers: got {dense!r}, expected a list of numbers of layers, or null")
    mlps = ["dense" if n in dense or (n + 1) % step else "experts" for n in range(layers)]
    if "experts" not in mlps:
        return None, tuple(mlps)
    shared = "shared_expert_intermediate_size"
    experts = ExpertsConfig(
        count=_count(values, names[0]) if names else keys.count,
        active=_count(values, "num_experts_per_tok"),
        width=_count(values, keys.width),
        normalize=_flag(values, "norm_topk_prob") if keys.normalize is None else keys.normalize,
        wide_gates=keys.wide_gates,
        shared_width=_count(values, shared) if shared in values else None,
        bias=keys.bias,
        swiglu=_swiglu(values),
    )
    return experts, tuple(mlps)


def _swiglu(values: Mapping[str, Any]) -> ClampedSwiglu | None:
    if "swiglu_limit" not in values:
        return None
    return ClampedSwiglu(_number(values, "swiglu_alpha"), _number(values, "swiglu_limit"))


def _head_dim(values: Mapping[str, Any]) -> int:
    if values["head_dim"] is not None:
        return _count(values, "head_dim")
    width = _count(values, "hidden_size")
    heads = _count(values, "num_attention_heads")
    if width % heads:
        raise ValueError(f"head_dim: missing, and hidden_size {width} is no multiple of num_attention_heads {heads}")
    return width // heads


def _hf_keys(config: DecoderConfig, name: str) -> dict[str, Any]:
    """Writes the keys of a family for this decoder, with the ropes in both forms; they may not describe it fully."""
    family = FAMILIES[name]
    known = {**COMMON, **family.defaults}
    scalar = config.head_dim if config.attention_scale is None else config.attention_scale**-2
    to_hub = {kind: hub_kind for hub_kind, kind in KINDS.items()}
    full = write_rope(config.rope)
    local = write_rope(config.local_rope or config.rope)
    scaling = {key: value for key, value in full.items() if key != "rope_theta"}
    optional: dict[str, Any] = {
        "attention_bias": config.output_bias,
        "mlp_bias": config.mlp_bias,
        "query_pre_attn_scalar": int(scalar) if float(scalar).is_integer() else scalar,
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.final_softcap,
        "sliding_window": config.sliding_window,
        "use_sliding_window": config.sliding_window is not None,
        "layer_types": [to_hub[kind.attention] for kind in config.kinds],
        "max_window_layers": sum(kind.attention == "full" for kind in config.kinds),
        "rope_local_base_freq": (config.local_rope or config.rope).theta,
        "qkv_bias": config.qkv_bias,
        "clip_qkv": config.qkv_clip,
    }
    if family.mixture is not None and config.experts is not None:
        optional |= {
            family.mixture.count_key: config.experts.count,
            "num_experts_per_tok": config.experts.active,
            family.mixture.width: config.experts.width,
            "norm_topk_prob": config.experts.normalize,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [n for n, kind in enumerate(config.kinds) if kind.mlp == "dense"],
            "shared_expert_intermediate_size": config.experts.shared_width,
        }
        swiglu = config.experts.swiglu
        optional |= {} if swiglu is None else {"swiglu_alpha": swiglu.alpha, "swiglu_limit": swiglu.limit}
    return {
        "architectures": [family.architecture],
        "model_type": name,
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        family.activation: {name: hub_name for hub_name, name in ACTIVATIONS.items()}[config.activation],
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_theta": config.rope.theta,
        "rope_scaling": None if config.rope.scaling is None else scaling,
        "rope_parameters": dict(zip(KINDS, (full, local), strict=True)) if family.nested_rope else full,
        **{key: value for key, value in optional.items() if key in known or key in REQUIRED},
    }


def _describes(mapping: Mapping[str, Any], shape: DecoderConfig) -> bool:
    try:
        return decoder_config(mapping) == shape
    except ValueError:
        return False


def _integer(values: Mapping[str, Any], key: str, *, least: int) -> int:
    value = values[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{key}: got {value!r}, expected an integer >= {least}")
    return value


def _count(values: Mapping[str, Any], key: str) -> int:
    return _integer(values, key, least=1)


def _number(values: Mapping[str, Any], key: str) -> float:
    value = values[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"{key}: got {value!r}, expected a number > 0")
    return float(value)


def _optional(values: Mapping[str, Any], key: str) -> float | None:
    return None if values.get(key) is None else _number(values, key)


def _flag(values: Mapping[str, Any], key: str, *, default: bool = False) -> bool:
    """Reads a key; a null is false, as for transformers."""
    value = values.get(key, default)
    if not isinstance(value, bool | None):
        raise ValueError(f"{key}: got {value!r}, expected true or false")
    return bool(value)


def _choice(values: Mapping[str, Any], key: str, choices: Mapping[str, str]) -> Any:
    # Unhashable values are no keys of a mapping.
    if not isinstance(values[key], str) or values[key] not in choices:
        raise ValueError(f"{key}: got {values[key]!r}, expected one of {', '.join(choices)}")
    return choices[values[key]]
