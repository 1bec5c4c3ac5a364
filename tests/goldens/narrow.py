"""The recorded PyTorch results in float32 or bfloat16 on any device, within bounds that float64 gives.

The calls of the table are run on the inputs rounded to the narrow dtype, and their results are compared with PyTorch's.
The bound of each number is the sum of two parts, both from float64 on the CPU:

- what rounding the inputs changes: the exact result of the rounded inputs, less the recorded one;
- what arithmetic in float32 may change: `ULPS` roundings of the largest number of the result, and the largest change
  that such a change of every input makes. Where a clip lies within that, either side of it is right.
"""

import contextlib
import dataclasses
import functools
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kljax
from tests.goldens.cases import SHARED, Case, all_cases
from tests.kljax.systems import EXERCISES, matches
from tests.kljax.systems.metrics import METRICS

# The kind of entry that runs a case, in this order where several name it.
KINDS = {
    "losses": "policy_loss",
    "advantages": "advantage",
    "rewards": "placement",
    "kl": "kl",
    "reductions": "reduction",
    "corrections": "correction",
    "diagnostics": "statistic",
}
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
# The library computes in float32 whatever the dtype of its inputs.
UNIT, ULPS = 2.0**-24, 64
# A gradient in bfloat16 is the sum of so many rounded gradients, one for each use of its input.
SUMMANDS = 4
# Signs of the changes of the inputs are drawn so often.
DRAWS = 3
Exercise = Callable[[Case], None]


@dataclasses.dataclass(frozen=True)
class NarrowCase(Case):
    """A case whose inputs are rounded to a dtype, and whose results are kept instead of asserted.

    Attributes:
      dtype: of the inputs.
      wide: whether the rounded inputs are given in float64.
      noise: draws a relative change of the wide inputs; None: none.
      results: pairs of a result and the recorded one.
    """

    dtype: Any
    wide: bool
    noise: np.random.Generator | None
    results: list[tuple[np.ndarray, np.ndarray]]

    def given(self, name: str) -> jax.Array:
        value = self.recorded(name)
        if not np.issubdtype(value.dtype, np.floating):
            return jnp.asarray(value)
        rounded = value.astype(self.dtype)
        if not self.wide:
            return jnp.asarray(rounded)
        signs = 0.0 if self.noise is None else self.noise.choice((-1.0, 1.0), value.shape)
        return jnp.asarray(rounded.astype(np.float64) * (1 + ULPS * UNIT * signs))

    def assert_matches(self, actual: Any, expected: Any) -> None:
        assert isinstance(actual, jax.Array), "computed by another than the device"
        self.results.append((np.asarray(actual), np.asarray(expected, np.float64)))


@contextlib.contextmanager
def _precision(wide: bool) -> Iterator[None]:
    """Computes in float64 on the CPU, or in 32 bits on the default device, where float64 is taken for float32."""
    settings = {"jax_enable_x64": wide, "jax_numpy_dtype_promotion": "standard", "jax_numpy_rank_promotion": "allow"}
    before = {name: jax.config.values[name] for name in settings}
    device = jax.default_device(jax.devices("cpu")[0]) if wide else contextlib.nullcontext()
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        with device, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def share_of_bound(exercise: Exercise, case: Case, dtype: str) -> float:
    """Returns the largest error of a case over its bound; infinity for a result that is not finite but should be."""

    def run(*, wide: bool, seed: int | None = None) -> list[tuple[np.ndarray, np.ndarray]]:
        noise = None if seed is None else np.random.default_rng(seed)
        fields = {field.name: getattr(case, field.name) for field in dataclasses.fields(Case)}
        narrow = NarrowCase(**fields, dtype=DTYPES[dtype], wide=wide, noise=noise, results=[])
        with _precision(wide):
            exercise(narrow)
        return narrow.results

    exact, moved = run(wide=True), [run(wide=True, seed=seed) for seed in range(DRAWS)]
    worst = 0.0
    for index, (actual, recorded) in enumerate(run(wide=False)):
        answer = np.asarray(exact[index][0], np.float64)
        bound = np.abs(answer - recorded) + _arithmetic(answer, [np.asarray(item[index][0]) for item in moved])
        if actual.dtype == jnp.bfloat16:
            bound = bound + SUMMANDS * float(jnp.finfo(jnp.bfloat16).eps) / 2 * np.max(np.abs(answer), initial=0.0)
        error = np.abs(actual.astype(np.float64) - recorded)
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.where(error == 0, 0.0, error / bound)
        worst = max(worst, float(np.nan_to_num(share, nan=np.inf).max(initial=0.0)))
    return worst


def _arithmetic(answer: np.ndarray, moved: Sequence[np.ndarray]) -> np.ndarray:
    """Returns how far arithmetic in float32 may move each number of an exact answer."""
    largest = np.max(np.abs(answer), initial=0.0)
    spread = np.max([np.abs(other - answer) for other in moved], axis=0)
    return np.asarray(ULPS * UNIT * largest + spread)


def cases_of(family: str) -> list[tuple[Exercise, Case]]:
    """Lists the shared cases of a family with an entry of the table that runs them, and with their metrics."""
    entries = [(name, entry) for name, kind in KINDS.items() for entry in kljax.systems.entries(kind=kind)]
    calls = [(name, entry, golden) for name, entry in entries if entry.call for golden in entry.goldens]
    collected: list[tuple[Exercise, Case]] = []
    for case in (case for case in all_cases() if case.file == SHARED):
        of = (call for call in calls if call[1].system == case.system and matches(call[2], case))
        name, entry, _ = next(of)
        if name == family:
            metrics = METRICS.get((case.system, case.function))
            collected.append((functools.partial(_run, entry, metrics), case))
    return collected


def _run(entry: kljax.systems.Entry, metrics: Callable[[Case], dict[str, jax.Array]] | None, case: Case) -> None:
    EXERCISES[case.system, case.function](entry, case)
    if metrics is not None:
        case.assert_metrics(metrics(case))


class GoldensContender:
    """Compares the recorded cases of a family on the default device of the process.

    Args:
      every: takes each so many-th case.
    """

    def __init__(self, every: int) -> None:
        self.every = every

    def versions(self) -> dict[str, str]:
        """Returns the versions of the libraries."""
        return {"jax": jax.__version__}

    def rows(self, of: str, seconds: float) -> list[dict[str, Any]]:
        """Compares the cases of "FAMILY DTYPE" for so many seconds.

        Returns:
          One row: cases compared and in all, the largest error over its bound, and the cases beyond their bounds.
        """
        family, dtype = of.split()
        chosen, until, shares = cases_of(family)[:: self.every], time.monotonic() + seconds, dict[str, float]()
        for exercise, case in chosen:
            if time.monotonic() > until:
                break
            shares[f"{case.system} {case.function} {case.id}"] = share_of_bound(exercise, case, dtype)
        outside = [name for name, share in shares.items() if not share <= 1]
        row = {"name": of, "compared": len(shares), "cases": len(chosen), "share": max(shares.values(), default=None)}
        return [row | ({"problem": f"beyond their bounds: {', '.join(outside)}"} if outside else {})]


def load(every: int = 1) -> GoldensContender:
    """Returns the contender; float64 on the CPU stays possible where only an accelerator was asked for."""
    jax.config.update("jax_default_matmul_precision", "highest")  # else products of float32 are rounded before
    platforms = jax.config.values["jax_platforms"]
    if platforms and "cpu" not in platforms.split(","):
        jax.config.update("jax_platforms", f"{platforms},cpu")
    return GoldensContender(every)
