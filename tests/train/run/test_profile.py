"""Traces of some steps, whatever the step a run starts from."""

from contextlib import closing

import jax
import jax.numpy as jnp
import pytest

from tests.train.config.built import build, problems
from train.config.schema import Profile
from train.run.profile import StepTrace


def traces(root) -> list[str]:
    return [path.name for path in root.rglob("*.xplane.pb")]


def run_steps(root, steps: tuple[int, int] | None, *, done: int, last: int) -> None:
    with closing(StepTrace(Profile(steps=steps), root, done)) as trace:
        for number in range(done + 1, last + 1):
            with trace.step(number):
                jnp.ones(3).sum().block_until_ready()


@pytest.mark.parametrize(
    ("steps", "done", "last", "traced", "said"),
    [
        (None, 0, 2, 0, ""),
        ((2, 3), 0, 4, 1, ""),
        ((1, 1), 0, 2, 1, "step 1 is the first of this start, and its trace has compilations"),
        # A run that is continued within the steps traces the rest of them, and after them nothing.
        ((2, 5), 3, 6, 1, "step 4 is the first of this start"),
        ((2, 3), 3, 6, 0, "got [2, 3], but step 3 is done: nothing is traced"),
        # One that a signal ends before the last step writes what there is.
        ((2, 9), 0, 3, 1, ""),
    ],
)
def test_steps_are_traced(steps, done, last, traced, said, tmp_path, capsys):  # noqa: PLR0917
    run_steps(tmp_path, steps, done=done, last=last)
    assert len(traces(tmp_path)) == traced
    err = capsys.readouterr().err
    assert said in err if said else err == ""


def test_step_that_fails_leaves_its_trace(tmp_path):
    trace = StepTrace(Profile(steps=(2, 2)), tmp_path, 1)
    with pytest.raises(ZeroDivisionError), closing(trace), trace.step(2):
        _ = 1 / 0
    assert len(traces(tmp_path)) == 1


def test_profiler_in_use_or_a_full_disk_is_a_warning(monkeypatch, tmp_path, capsys):
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("Only one profile may be run at a time.")

    monkeypatch.setattr(jax.profiler, "start_trace", fail)
    run_steps(tmp_path, (2, 2), done=0, last=2)
    assert "nothing is traced, because Only one profile may be run" in capsys.readouterr().err


def test_impossible_steps_are_refused():
    build("profile.steps=[2, 5]")
    assert problems("profile.steps=[2, 6]") == ["profile.steps: got [2, 6], but the run has steps = 5"]
    (line,) = problems("profile.steps=[3, 2]")
    assert line.endswith("expected the first and the last step, as [10, 12] or null")
    for value in ("[3]", "3", "[0, 2]"):
        assert [line for line in problems(f"profile.steps={value}") if line.startswith("profile.steps")], value
    (line,) = problems("report.unhealthy_after=60")
    assert line == "report.unhealthy_after: got 60, but nothing asks for it; set report.health_port"
    (line,) = problems("report={health_port: 9000, prometheus_port: 9000}")
    assert line == "report.health_port: got 9000, which is report.prometheus_port; set another one"
