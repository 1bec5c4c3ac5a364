"""A controller of any system, told one KL after the other."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.goldens.systems.record import InputTensors


def trajectory(controller: Any, given: InputTensors) -> Mapping[str, Any]:
    """The coefficient after each update."""
    coefs = []
    for kl, number in zip(given.kls.tolist(), given.num_samples.tolist(), strict=True):
        controller.update(kl, number)
        coefs.append(float(controller.value))
    return {"coefs": np.array(coefs)}
