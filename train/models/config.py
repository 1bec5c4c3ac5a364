"""What a decoder looks like, whatever family it belongs to: everything that `config.json` decides."""

import dataclasses
from typing import Literal, TypeAlias, get_args

from train.models.lora import LoraConfig

LayerKind: TypeAlias = Literal["full", "sliding"]
Activation: TypeAlias = Literal["silu", "gelu_tanh"]
DType: TypeAlias = Literal["float32", "bfloat16"]
Kernels: TypeAlias = Literal["auto", "xla"]
Remat: TypeAlias = Literal["full", "dots"]
Quantization: TypeAlias = Literal["int8"]


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Every frequency divided by `factor`."""

    factor: float

    def __post_init__(self) -> None:
        _check_factor(self.factor)


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Long wavelengths divided by `factor`, short ones kept, those between on a line; lengths in tokens.

    A wavelength is long above `original_length / low_frequency_factor`, short below
    `original_length / high_frequency_factor`.
    """

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_length: int

    def __post_init__(self) -> None:
        _check_factor(self.factor)
        if not 0 < self.low_frequency_factor < self.high_frequency_factor:
            raise ValueError(
                f"rope: got low_freq_factor {self.low_frequency_factor} and high_freq_factor "
                f"{self.high_frequency_factor}, expected 0 < low < high"
            )
        if self.original_length < 1:
            raise ValueError(f"rope: got original length {self.original_length}, expected at least 1")


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """Pairs that turn less than `beta_slow` times in `original_length` tokens divided by `factor`, those that turn more
    than `beta_fast` times kept, those between on a line; queries and keys grow by `attention_factor`.

    `truncate`: the ends of the line are whole numbers of pairs.
    """

    factor: float
    original_length: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        _check_factor(self.factor)
        if not 0 < self.beta_slow <= self.beta_fast:
            raise ValueError(
                f"rope: got beta_slow {self.beta_slow} and beta_fast {self.beta_fast}, expected 0 < slow <= fast"
            )
        if not self.attention_factor > 0:
            raise ValueError(f"rope: got attention_factor {self.attention_factor}, expected a number > 0")


RopeScaling: TypeAlias = LinearScaling | Llama3Scaling | YarnScaling


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary embedding: frequencies `theta ** (-2 i / head_dim)`, scaled for contexts longer than those trained on."""

    theta: float = 10000.0
    scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        if not self.theta > 0:
            raise ValueError(f"rope_theta: got {self.theta}, expected a number > 0")


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Shape of the decoder; `lora` says where an adapter may be attached, not that one is.

    Attributes:
      rope: positions of full layers, and of sliding ones unless `local_rope` says otherwise.
      sliding_window: tokens that a sliding layer sees, the query's own included.
      layer_kinds: one per layer; None: all sliding if there is a window, else all full.
      qkv_bias, output_bias, mlp_bias: biases of q/k/v_proj, of o_proj, of the three projections of the MLP.
      qk_norm: RMSNorm on every head's query and key.
      norm_offset: norms multiply by `1 + scale` (Gemma) instead of `scale`.
      post_norms: norms also after attention and MLP, before they are added (Gemma).
      embed_scale: what embeddings are multiplied by; None: nothing.
      attention_scale: what scores are multiplied by; None: `head_dim ** -0.5`.
      attention_softcap, final_softcap: scores, logits z become `cap * tanh(z / cap)`; None: they stay.
      dtype: what is computed in; float32 keeps float64 parameters at float64. Norms and softmax are float32 at least.
      param_dtype: what parameters are drawn and stored in.
      attention: "auto" takes the kernel that the devices have for whole sequences, "xla" none.
      remat: what the backward pass computes again: "full": all of a layer; "dots": all but the outputs of projections.
      quantization: what the kernels of the layers are held in instead, for a base that is not trained.
    """

    vocab_size: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    rope: Rope = Rope()
    local_rope: Rope | None = None
    sliding_window: int | None = None
    layer_kinds: tuple[LayerKind, ...] | None = None
    activation: Activation = "silu"
    norm_eps: float = 1e-6
    norm_offset: bool = False
    post_norms: bool = False
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    embed_scale: float | None = None
    attention_scale: float | None = None
    attention_softcap: float | None = None
    final_softcap: float | None = None
    dtype: DType = "float32"
    param_dtype: DType = "float32"
    attention: Kernels = "auto"
    remat: Remat = "full"
    quantization: Quantization | None = None
    lora: LoraConfig | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "layers", "width", "heads", "kv_heads", "head_dim", "mlp_width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, expected at least 1")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads: got {self.kv_heads}, expected a divisor of heads = {self.heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim: got {self.head_dim}, expected an even number (rotary pairs)")
        for name, choices in (
            ("activation", Activation),
            ("dtype", DType),
            ("param_dtype", DType),
            ("attention", Kernels),
            ("remat", Remat),
        ):
            if getattr(self, name) not in get_args(choices):
                raise ValueError(f"{name}: got {getattr(self, name)!r}, expected one of {', '.join(get_args(choices))}")
        if self.quantization not in (None, *get_args(Quantization)):
            raise ValueError(f"quantization: got {self.quantization!r}, expected {get_args(Quantization)[0]} or None")
        for name in ("embed_scale", "attention_scale", "attention_softcap", "final_softcap"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}: got {value}, expected a number > 0 or None")
        self._check_layers()

    def _check_layers(self) -> None:
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window: got {self.sliding_window}, expected at least 1 or None")
        if self.layer_kinds is None:
            return
        unknown = sorted(set(self.layer_kinds) - set(get_args(LayerKind)))
        if unknown:
            raise ValueError(f"layer_kinds: got {unknown}, expected {' and '.join(get_args(LayerKind))}")
        if len(self.layer_kinds) != self.layers:
            raise ValueError(f"layer_kinds: got {len(self.layer_kinds)}, expected one for each of {self.layers} layers")
        if "sliding" in self.layer_kinds and self.sliding_window is None:
            raise ValueError("sliding_window: got None, expected a number, as layer_kinds has sliding layers")

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kind of every layer."""
        if self.layer_kinds is not None:
            return self.layer_kinds
        return ("full" if self.sliding_window is None else "sliding",) * self.layers

    @property
    def window(self) -> int | None:
        """Tokens that a sliding layer sees; None where there is no such layer."""
        return self.sliding_window if "sliding" in self.kinds else None


def _check_factor(factor: float) -> None:
    if not factor >= 1:
        raise ValueError(f"rope: got factor {factor}, expected at least 1")
