"""The shape of a decoder of any family, everything that `config.json` decides, and of its adapter."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, get_args

from train.config.types import LoraTarget

AttentionKind: TypeAlias = Literal["full", "sliding"]
MlpKind: TypeAlias = Literal["dense", "experts"]
Activation: TypeAlias = Literal["silu", "gelu_tanh"]
DType: TypeAlias = Literal["float32", "bfloat16"]
Kernels: TypeAlias = Literal["auto", "xla"]
Remat: TypeAlias = Literal["full", "dots"]
Quantization: TypeAlias = Literal["int8"]
ROUTER = "gate"
"""The router of a mixture of experts, as a target of an adapter."""
PROJECTIONS: tuple[str, ...] = tuple(name for name in get_args(LoraTarget) if name != ROUTER)


def shortest_period(values: Sequence[Any]) -> int:
    """Returns the least number of values whose repeats are all values; the last repeat may be cut short."""
    return next(period for period in range(1, len(values) + 1) if values[period:] == values[:-period])


def _check_choice(name: str, value: str, choices: Any) -> None:
    if value not in get_args(choices):
        raise ValueError(f"{name}: got {value!r}, expected one of {', '.join(get_args(choices))}")


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Divides every frequency by `factor`."""

    factor: float

    def __post_init__(self) -> None:
        _check_factor(self.factor)


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Divides the frequency of long wavelengths by `factor`, keeps short ones, and interpolates between; in tokens.

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
    """Divides frequencies by `factor` by their rotations in `original_length` tokens; scales queries and keys.

    Attributes:
      factor: divides pairs that rotate less than `beta_slow` times.
      original_length: tokens of the original context.
      attention_factor: factor of queries and keys.
      beta_fast: pairs that rotate more often than this are unchanged; pairs in between are interpolated.
      beta_slow: see `factor`.
      truncate: interpolates between whole pair indices.
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
    """Rotary embedding: frequencies `theta ** (-2 i / head_dim)`, scaled for contexts longer than in training."""

    theta: float = 10000.0
    scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        if not self.theta > 0:
            raise ValueError(f"rope_theta: got {self.theta}, expected a number > 0")


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """The shape of an adapter.

    Attributes:
      rank: inner size of `A B`.
      alpha: numerator of the scale.
      targets: projections that get an adapter.
      rslora: divide by sqrt(rank) in place of rank (rank-stabilised LoRA, `use_rslora` of PEFT).

    Raises:
      ValueError: rank below 1, no target, or a target that is not a projection of the decoder.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    rslora: bool = False

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"lora.rank: got {self.rank}, expected at least 1")
        unknown = sorted(set(self.targets) - {*PROJECTIONS, ROUTER})
        if unknown or not self.targets:
            raise ValueError(
                f"lora.targets: got {unknown or 'none'}, expected some of {', '.join((*PROJECTIONS, ROUTER))}"
            )

    @property
    def scale(self) -> float:
        """The factor of `A B`."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


@dataclasses.dataclass(frozen=True)
class ClampedSwiglu:
    """The activation of GPT-OSS: `(clip(up, -limit, limit) + 1) * g * sigmoid(alpha * g)`, g = min(gate, limit)."""

    alpha: float
    limit: float

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if not value > 0:
                raise ValueError(f"swiglu.{name}: got {value}, expected a number > 0")


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """The shape of a mixture of experts.

    Attributes:
      count: experts of a layer.
      active: experts that compute a token, the most probable ones of the router.
      width: hidden width of an expert.
      normalize: divides the gates of a token by their sum.
      wide_gates: gates stay float32 in a bfloat16 model (Mixtral); otherwise they are rounded to its compute type.
      shared_width: hidden width of an expert that computes every token, times a sigmoid; None: there is none.
      choice_bias: whether a bias of each expert, which has no gradient, is added to the probabilities for the choice of
        the experts alone.
      bias: whether the router and the projections of the experts have biases (GPT-OSS).
      swiglu: activation of the experts in place of the decoder's; None: `act(gate) * up`.

    Raises:
      ValueError: a number below 1, or more active experts than there are.
    """

    count: int
    active: int
    width: int
    normalize: bool = True
    wide_gates: bool = False
    shared_width: int | None = None
    choice_bias: bool = False
    bias: bool = False
    swiglu: ClampedSwiglu | None = None

    def __post_init__(self) -> None:
        for name in ("count", "active", "width", "shared_width"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"experts.{name}: got {value}, expected at least 1")
        if self.active > self.count:
            raise ValueError(f"experts.active: got {self.active}, expected at most experts.count = {self.count}")


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """The kind of a layer.

    Attributes:
      attention: a "full" layer attends to all tokens before, a "sliding" one to the last of them.
      mlp: a row of `train.models.blocks.MLPS`.
    """

    attention: AttentionKind = "full"
    mlp: MlpKind = "dense"

    def __post_init__(self) -> None:
        _check_choice("attention", self.attention, AttentionKind)
        _check_choice("mlp", self.mlp, MlpKind)


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """The shape of the decoder; `lora` names the projections of an adapter, which may be absent.

    Attributes:
      rope: rope of full layers, and of sliding ones if `local_rope` is None.
      local_rope: rope of sliding layers.
      sliding_window: tokens that a sliding layer attends to, the query included.
      pattern: the kinds of the first layers, repeated over all of them; the last repeat may be cut short. It is stored
        as the shortest one with these layers.
      qkv_bias, output_bias, mlp_bias: biases of q/k/v_proj, of o_proj, of the three projections of the MLP.
      qk_norm: RMSNorm on every head's query and key.
      wide_qk_norm: RMSNorm on the queries, and on the keys, of all heads together (OLMoE).
      sinks: each head has a learned score of no value, which takes its share of every softmax (GPT-OSS).
      qkv_clip: queries, keys and values are clipped to `[-clip, clip]`; None: unchanged.
      experts: the mixture of the layers whose MLP kind is "experts"; None: there are none.
      replay_threshold: a replayed expert is used if its probability is at least this share of the least probable expert
        that the router chooses; 0 uses all.
      norm_offset: norms multiply by `1 + scale` (Gemma) instead of `scale`.
      post_norms: norms also after attention and MLP, before the residual is added (Gemma).
      embed_scale: factor of the embeddings; None: 1.
      constant_embedding: token whose embedding gets no gradient from the inputs, as `padding_idx` in torch; None: none.
      attention_scale: factor of the scores; None: `head_dim ** -0.5`.
      attention_softcap: scores z become `cap * tanh(z / cap)`; None: unchanged.
      final_softcap: the same of logits.
      dtype: compute type; float32 keeps float64 parameters at float64. Norms and softmax are float32 at least.
      param_dtype: type of the parameters.
      attention: "auto" takes the devices' kernels for whole sequences, and those of `fused`; "xla" takes none.
      remat: recomputed in the backward pass: "full": all of a layer; "dots": all but the outputs of projections
        and of attention, but for cuDNN's.
      quantization: type of the kernels of the layers instead, for a base that is not trained.
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
    pattern: tuple[LayerKind, ...] = (LayerKind(),)
    activation: Activation = "silu"
    norm_eps: float = 1e-6
    norm_offset: bool = False
    post_norms: bool = False
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    wide_qk_norm: bool = False
    sinks: bool = False
    qkv_clip: float | None = None
    experts: ExpertsConfig | None = None
    replay_threshold: float = 0.0
    embed_scale: float | None = None
    constant_embedding: int | None = None
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
        _check_choice("activation", self.activation, Activation)
        _check_choice("dtype", self.dtype, DType)
        _check_choice("param_dtype", self.param_dtype, DType)
        _check_choice("attention", self.attention, Kernels)
        _check_choice("remat", self.remat, Remat)
        if self.quantization not in (None, *get_args(Quantization)):
            raise ValueError(f"quantization: got {self.quantization!r}, expected {get_args(Quantization)[0]} or None")
        for name in ("embed_scale", "attention_scale", "attention_softcap", "final_softcap", "qkv_clip"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}: got {value}, expected a number > 0 or None")
        if self.qk_norm and self.wide_qk_norm:
            raise ValueError("wide_qk_norm: got true beside qk_norm; set only one of them")
        self._check_pattern()

    def _check_pattern(self) -> None:
        if not self.pattern:
            raise ValueError("pattern: got no layer, expected at least one")
        kinds = self.kinds
        object.__setattr__(self, "pattern", kinds[: shortest_period(kinds)])
        sliding = any(kind.attention == "sliding" for kind in kinds)
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window: got {self.sliding_window}, expected at least 1 or None")
        if sliding and self.sliding_window is None:
            raise ValueError("sliding_window: got None, expected a number, as pattern has sliding layers")
        if not sliding and self.sliding_window is not None:
            raise ValueError(
                f"sliding_window: got {self.sliding_window}, expected None, as pattern has no sliding layer"
            )
        if bool(self.expert_layers) != (self.experts is not None):
            expected = "a mixture, as pattern has some" if self.experts is None else "None, as pattern has none"
            raise ValueError(f"experts: got {self.experts}, expected {expected}")
        if self.lora is not None and ROUTER in self.lora.targets and self.experts is None:
            raise ValueError(f"lora.targets: got {ROUTER}, but the model has no router; leave it out")

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kind of every layer."""
        return (self.pattern * -(-self.layers // len(self.pattern)))[: self.layers]

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """The numbers of the layers with experts."""
        return tuple(number for number, kind in enumerate(self.kinds) if kind.mlp == "experts")

    @property
    def route_shape(self) -> tuple[int, int]:
        """Layers with experts, and experts of a token: the axes of routes after `[B, T]`."""
        return len(self.expert_layers), self.experts.active if self.experts else 0


def _check_factor(factor: float) -> None:
    if not factor >= 1:
        raise ValueError(f"rope: got factor {factor}, expected at least 1")
