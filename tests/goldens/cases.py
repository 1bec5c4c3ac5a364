"""The recorded PyTorch results: an index by system and function, arrays read when they are asked for."""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kljax.calls import traced_program

DIRECTORY = pathlib.Path(__file__).parent
SHARED, GENERATED = "torch_goldens", "generated"

# Both sides work in float64, except where the PyTorch side works in float32 inside; these are all of them, with why.
RTOL, ATOL = 1e-7, 1e-11
FLOAT32_TOLERANCE = 1e-5
FLOAT32 = {
    ("openrlhf", "compute_approx_kl"): "casts both log-probs to float32 before it subtracts them",
    ("slime", "compute_approx_kl"): "casts both log-probs to float32 before it subtracts them",
    ("slime", "ppo_kl_shaped_gae"): "allocates the padded rewards and values of its GAE in float32",
}

# Outputs that are what a function is called for; the others are metrics.
RESULTS = {"value", "grad", "advantages", "returns", "raw_kl", "weights", "kept", "coefs"}
RESULTS |= {"token_rewards", "token_level_rewards"}

# Ids of the cases of bounds and defaults that some test asked for.
CLAIMED: set[str] = set()


@functools.cache
def _arrays(file: str) -> Mapping[str, np.ndarray]:
    return np.load(DIRECTORY / f"{file}.npz")


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of one PyTorch function."""

    id: str
    system: str
    function: str
    params: Mapping[str, Any]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    gradient_of: str | None
    note: str | None
    file: str

    def given(self, name: str) -> jax.Array:
        """An input; masks as booleans. The generated cases on one batch share its arrays."""
        return jnp.asarray(self.recorded(name))

    def recorded(self, name: str) -> np.ndarray:
        """An input as it is stored."""
        assert name in self.inputs, f"{self.id} did not read {name}"
        position = f"{self.id}/in/{name}" if self.file == SHARED else f"{self.params['batch']}/{name}"
        value = _arrays(self.file)[position]
        return value.astype(bool) if name == "mask" else value

    def result(self, name: str) -> np.ndarray:
        """Returns the result of PyTorch."""
        return _arrays(self.file)[f"{self.id}/out/{name}"]

    def arrays(self) -> dict[str, dict[str, Any]]:
        """All inputs and results by their names."""
        return {
            "inputs": {name: self.given(name) for name in self.inputs},
            "outputs": {name: self.result(name) for name in self.outputs},
        }

    def settings(self) -> tuple[Any, ...]:
        """The common part of cases that differ in their batch alone."""
        params = json.dumps({name: value for name, value in self.params.items() if name != "batch"}, sort_keys=True)
        return self.system, self.function, params, self.inputs, self.outputs, self.gradient_of, self.file

    def metrics(self) -> set[str]:
        """The outputs that a function returns beside its results."""
        return set(self.outputs) - RESULTS

    def assert_metrics(self, actual: Mapping[str, jax.Array]) -> None:
        """Asserts that these are all metrics, and that each matches."""
        assert set(actual) == self.metrics()
        for name, array in actual.items():
            self.assert_matches(jnp.asarray(array, jnp.float64), self.result(name))

    def assert_matches(self, actual: jax.Array, expected: np.ndarray | jax.Array) -> None:
        """Compares at the tolerance of the case: 1e-7 relative, or 1e-5 where PyTorch worked in float32."""
        narrow = (self.system, self.function) in FLOAT32
        rtol, atol = (FLOAT32_TOLERANCE, FLOAT32_TOLERANCE) if narrow else (RTOL, ATOL)
        assert actual.dtype == jnp.float64
        chex.assert_trees_all_close(np.asarray(actual), np.asarray(expected), rtol=rtol, atol=atol)

    def assert_value_and_grad(self, function: Callable[[jax.Array], jax.Array], of: str) -> None:
        """Asserts that `function(input named of)` has the recorded value and, under the cotangent, gradient.

        Where PyTorch returned a constant, detached from `of`, the gradient here must be 0.
        """
        value, pull_back = jax.vjp(function, self.given(of))
        self.assert_matches(value, self.result("value"))
        cotangent = self.given("cotangent") if "cotangent" in self.inputs else jnp.ones_like(value)
        gradient = pull_back(cotangent.astype(value.dtype))[0]
        self.assert_matches(gradient, self.result("grad") if "grad" in self.outputs else np.zeros(gradient.shape))


@dataclasses.dataclass(frozen=True)
class TracedCase(Case):
    """A case inside `jax.jit`: its arrays are traced, its comparisons are collected for later, and results it read."""

    traced: dict[str, dict[str, Any]]
    comparisons: list[tuple[Any, Any]]
    read: set[str]

    def given(self, name: str) -> jax.Array:
        assert name in self.inputs, f"{self.id} did not read {name}"
        return self.traced["inputs"][name]

    def result(self, name: str) -> Any:
        self.read.add(name)
        return self.traced["outputs"][name]

    def assert_matches(self, actual: Any, expected: Any) -> None:
        self.comparisons.append((actual, expected))


Exercise = Callable[[Case], None]
Comparison = tuple[Case, Any, Any]


def run_together(exercises: Sequence[tuple[Sequence[Case], Exercise]]) -> list[list[Comparison]]:
    """Runs exercises as one program that is traced once, each on cases of the same settings.

    Returns the comparisons of each exercise, `(case, actual, expected)`, for `Case.assert_matches`.
    """
    assert all(len({case.settings() for case in cases}) == 1 for cases, _ in exercises)
    collected: list[list[tuple[Any, Any]]] = []

    def compared(arrays: list[dict[str, dict[str, Any]]]) -> tuple[Any, ...]:
        collected.clear()
        for (cases, exercise), of_case in zip(exercises, arrays, strict=True):
            fields = {field.name: getattr(cases[0], field.name) for field in dataclasses.fields(Case)}
            traced = TracedCase(**fields, traced=of_case, comparisons=[], read=set())
            try:
                exercise(traced)
            except Exception as error:
                error.add_note(f"in {traced.id}")
                raise
            collected.append(traced.comparisons)
        return tuple(jax.tree.leaves(collected))

    run = traced_program(compared)
    comparisons: list[list[Comparison]] = [[] for _ in exercises]
    for number in range(max((len(cases) for cases, _ in exercises), default=0)):
        # Cases of the same settings have the same shapes; where there are fewer, the last one is run again.
        now = [cases[min(number, len(cases) - 1)] for cases, _ in exercises]
        arrays = run([case.arrays() for case in now])
        compared_now = jax.tree.unflatten(jax.tree.structure(collected), arrays)
        for case, pairs, results in zip(now, compared_now, comparisons, strict=True):
            results += [(case, *pair) for pair in pairs]
    return comparisons


@functools.cache
def all_cases() -> tuple[Case, ...]:
    """Every case, the shared ones and then the generated ones, in the order of their indexes."""
    return tuple(
        Case(
            c["id"],
            c["system"],
            c["function"],
            c["params"],
            tuple(c["inputs"]),
            tuple(c["outputs"]),
            c["gradient_of"],
            c["note"],
            file,
        )
        for file in (SHARED, GENERATED)
        for c in json.loads((DIRECTORY / f"{file}.json").read_text())["cases"]
    )


def parametrize(*functions: tuple[str, str], note: str) -> pytest.MarkDecorator:
    """Parametrizes a test over the generated cases of the (system, function) pairs with a note, and claims them."""
    chosen = [case for case in all_cases() if case.note == note and (case.system, case.function) in functions]
    missing = set(functions) - {(case.system, case.function) for case in chosen}
    assert not missing, f"no recorded case of {missing}"
    CLAIMED.update(case.id for case in chosen)
    return pytest.mark.parametrize("case", [pytest.param(case, id=_label(case)) for case in chosen])


def _label(case: Case) -> str:
    return "-".join([case.id, *(str(value) for key, value in case.params.items() if key not in ("note", "dtype"))])
