"""Types for annotations: arrays, and the names that options take.

A wrapper annotates the name that it passes on, `def loss(estimator: kljax.typing.Estimator)`, so that an editor and a
type checker know the choices; `typing.get_args` lists them.
"""

from kljax._typing import (
    Array,
    ArrayLike,
    AxisName,
    Baseline,
    BaselineAlignment,
    ClipSide,
    Direction,
    Divergence,
    DivergenceLevel,
    EmptyRows,
    Estimator,
    GAERule,
    GSPOGradient,
    HeadImplementation,
    HeadLayout,
    KLGradient,
    Level,
    Mask,
    MetricMode,
    RECClip,
    RECRegularizer,
    RECWeight,
    Reduction,
    RejectionEstimator,
    ReturnsRule,
    RewardNormalization,
    RowStatistic,
    Scalar,
    Scale,
    Singleton,
    StdScale,
    SupervisedWeight,
    SurrogateLevel,
    Through,
    WeightMode,
    WeightNormalization,
)
