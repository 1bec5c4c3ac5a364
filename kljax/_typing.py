"""Type aliases. Shape letters used throughout: B rows, T positions, D width, V vocabulary, N tokens, G groups."""

import os
from typing import TYPE_CHECKING, Any, Literal, NewType, TypeAlias

import jax
import jax.typing

Array = jax.Array

# Shapes in annotations, `Float[ArrayLike, "*b T"]`: names of axes as above, `*b` any leading ones. They are jaxtyping's
# where a test asks for it by this variable, and the bare array type everywhere else, so nothing depends on jaxtyping.
if TYPE_CHECKING:
    from typing import Annotated as Bool
    from typing import Annotated as Float
    from typing import Annotated as Integer
    from typing import Annotated as MaskLike
    from typing import Annotated as Real
    from typing import Annotated as Shaped

    from kljax.batches import Segments

    ArrayLike = jax.typing.ArrayLike
    Mask: TypeAlias = ArrayLike | Segments
elif os.environ.get("KLJAX_CHECK_SHAPES"):
    from jaxtyping import Bool, Float, Integer, Real, Shaped

    ArrayLike = jax.typing.ArrayLike
    # Booleans or integers; a mask of floats is refused with an error of its own.
    MaskLike = Shaped
    Mask = Any
else:

    class _Shaped:
        """An annotation that drops the shape."""

        def __class_getitem__(cls, item: tuple[object, str]) -> object:
            return item[0]

    Bool = Float = Integer = MaskLike = Real = Shaped = _Shaped
    # The unions under a name: `help` would spell out their members at every argument.
    ArrayLike = NewType("ArrayLike", jax.typing.ArrayLike)
    Mask = NewType("Mask", jax.typing.ArrayLike)
    ArrayLike.__module__ = Mask.__module__ = "kljax.typing"
Scalar = float | jax.Array
AxisName = str | tuple[str, ...] | None

# The names that options take, each list once: for signatures, for the checks at trace time, and for callers.
Estimator = Literal["none", "k1", "abs", "k2", "k3", "low_var_kl"]
RejectionEstimator = Literal["k1", "k2", "k3"]
KLGradient = Literal["value", "k2", "weighted_k2", "none"]
GSPOGradient = Literal["token", "sequence"]
Through = Literal["ratio", "log_prob"]
Direction = Literal["reverse", "forward"]
Divergence = Literal["tv", "kl"]
HeadLayout = Literal["dv", "vd"]
HeadImplementation = Literal["tile", "xla", "reference"]

Level = Literal["token", "sequence", "geometric"]
SurrogateLevel = Literal[Level, "average", "geometric_average"]
DivergenceLevel = Literal["token", "sequence"]
RowStatistic = Literal["token", "sum", "mean", "max"]
WeightMode = Literal["truncate", "mask", "clip"]
WeightNormalization = Literal["none", "tokens", "rows"]
RECClip = Literal["none", "one_side", "gspo_one_side", "two_side", "ring"]
RECWeight = Literal["none", "importance_sampling", "gspo_importance_sampling", "advantage"]
RECRegularizer = Literal["none", "k2", "forward_kl"]
PairLoss = Literal["sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair"]
Preference = Literal[PairLoss, "sppo_hard", "aot", "apo_zero", "apo_down", "discopop", "odds_ratio"]
SupervisedWeight = Literal["none", "probability", "uncertainty"]

Reduction = Literal[
    "token_mean", "token_sum", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm", "prompt_mean"
]
EmptyRows = Literal["drop", "count"]
MetricMode = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_max"]
ClipSide = Literal["both", "low", "high"]

Scale = Literal["std", "batch_std", "mean", "none"]
StdScale = Literal["std", "none"]
Singleton = Literal["zero", "reward"]
Baseline = Literal["mean", "logavgexp"]
RewardNormalization = Literal["none", "rows"]
BaselineAlignment = Literal["token", "position"]
ReturnsRule = Literal["skip", "reset", "zero"]
GAERule = Literal["skip", "zero", "none"]
DiscountStep = Literal["token", "turn"]
