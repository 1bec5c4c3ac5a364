"""Runs a call on recorded arrays: which it read, what it returned, the gradient of its value."""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from tests.goldens.systems import release

Call = Callable[["InputTensors", Mapping[str, Any]], Mapping[str, Any]]
WIDENED = "float32 inside, widened to float64"


class InputTensors:
    """The inputs of a call by name, as tensors; remembers which of them were read."""

    def __init__(self, arrays: Mapping[str, np.ndarray], gradient_of: str | None) -> None:
        self._tensors = {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
        if gradient_of is not None:
            self._tensors[gradient_of].requires_grad_()
        self.read: set[str] = set()

    def __getattr__(self, name: str) -> torch.Tensor:
        tensors = self.__dict__["_tensors"]
        if name not in tensors:
            raise AttributeError(f"no input {name}")
        self.read.add(name)
        return tensors[name]

    def has(self, name: str) -> bool:
        """Whether the case has this input."""
        return name in self._tensors


@dataclasses.dataclass(frozen=True)
class RecordedResult:
    """The inputs and outputs of a call."""

    inputs: tuple[str, ...]
    outputs: dict[str, np.ndarray]

    def differs_from(self, other: "RecordedResult") -> bool:
        """Whether any output is not the same but for the last digits of float64."""
        return any(not close(self.outputs[name], other.outputs[name]) for name in self.outputs)


def close(actual: np.ndarray, expected: np.ndarray, tolerance: float = 1e-12) -> bool:
    """Equal to 1e-12, relative or absolute, where NaN is equal to NaN."""
    same_shape = actual.shape == expected.shape
    return same_shape and bool(np.allclose(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True))


def _tensor(value: torch.Tensor | np.ndarray | float) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.as_tensor(value, dtype=torch.float64)


def run(
    call: Call, params: Mapping[str, Any], arrays: Mapping[str, np.ndarray], gradient_of: str | None
) -> RecordedResult:
    """One call; `grad` is the gradient of `sum(value * cotangent)`, with cotangent 1 for a scalar."""
    inputs = InputTensors(arrays, gradient_of)
    outputs = {name: _tensor(value) for name, value in call(inputs, params).items() if value is not None}
    if gradient_of is not None and outputs["value"].requires_grad:
        value = outputs["value"]
        (value * inputs.cotangent if value.ndim else value).sum().backward()
        grad = getattr(inputs, gradient_of).grad
        outputs["grad"] = torch.zeros_like(getattr(inputs, gradient_of)) if grad is None else grad
    as_arrays = {name: np.asarray(outputs[name].detach().numpy(), np.float64) for name in sorted(outputs)}
    return RecordedResult(tuple(sorted(inputs.read)), as_arrays)


def run_widened(
    call: Call, params: Mapping[str, Any], arrays: Mapping[str, np.ndarray], gradient_of: str | None
) -> tuple[RecordedResult, bool]:
    """The call in float64 throughout, and whether the release works in float32 somewhere inside."""
    as_released = run(call, params, arrays, gradient_of)
    with release.widened():
        wide = run(call, params, arrays, gradient_of)
    return wide, wide.differs_from(as_released)


def write(directory: pathlib.Path, note: str, index: list[dict[str, Any]], arrays: Mapping[str, np.ndarray]) -> None:
    """Writes the two files; the same cases give the same bytes."""
    lines = ",\n".join(json.dumps(case) for case in index)
    (directory / "generated.json").write_text(f'{{"note": {json.dumps(note)}, "cases": [\n{lines}\n]}}\n')
    np.savez(directory / "generated.npz", **arrays)  # type: ignore[arg-type]
