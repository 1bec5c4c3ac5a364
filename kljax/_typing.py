"""Type aliases. Shape letters used throughout: B rows, T positions, D width, V vocabulary, N tokens, G groups."""

import jax
import jax.typing

Array = jax.Array
ArrayLike = jax.typing.ArrayLike
Scalar = float | jax.Array
AxisName = str | tuple[str, ...] | None
