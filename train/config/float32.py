"""The range of float32, which every number of a config, a recording and a reward has to fit."""

import math

FLOAT32_MAX = (2 - 2**-23) * 2.0**127
"""The largest float32; larger numbers become infinite on the devices."""
FLOAT32_TINY = 2.0**-126
"""The smallest normal float32; smaller numbers are 0 on the devices."""


def fits_float32(value: object) -> bool:
    """Returns whether a value is a number, not a bool, that is finite in float32.

    Example:
        >>> [fits_float32(value) for value in (0.5, -3, 1e38, 1e39, 10**400, float("nan"), True, "1")]
        [True, True, True, False, False, False, False, False]
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    # Integers are compared as they are: a long one has no float.
    return not (isinstance(value, float) and math.isnan(value)) and -FLOAT32_MAX <= value <= FLOAT32_MAX
