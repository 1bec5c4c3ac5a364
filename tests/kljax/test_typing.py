"""The shapes and types in the signatures hold, and the names of options are those that are checked."""

import os
import pathlib
import subprocess
import sys
import typing

import kljax.typing
from kljax import kl
from tests.kljax import calls

ROOT = pathlib.Path(__file__).parents[2]


def test_arguments_and_results_match_their_annotated_shapes() -> None:
    command = [sys.executable, "-m", "tests.kljax.typed_calls"]
    environment = {**os.environ, "KLJAX_CHECK_SHAPES": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    unchecked = set(calls.callable_functions()) - set(done.stdout.split())
    # Controllers are called through the pair of functions that they return.
    assert all(calls.calls_of(name)[0].function is not getattr(kljax, name) for name in unchecked), unchecked
    assert len(unchecked) < 10


def test_annotations_show_the_array_without_its_shape() -> None:
    annotations = kljax.k1.__annotations__
    assert annotations["log_probs"] is kljax.typing.ArrayLike
    assert annotations["return"] is kljax.typing.Array


def test_every_listed_estimator_is_computed() -> None:
    assert tuple(kl._ESTIMATORS) == typing.get_args(kljax.typing.Estimator)
