"""A trace of some steps with `jax.profiler`, for XProf and TensorBoard."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax

from train.config.errors import Note, warn
from train.config.schema import Profile
from train.config.storage import is_address
from train.distributed.peers import is_leader
from train.storage.uploads import Mirror


class StepTrace:
    """Traces the steps of `profile.steps` on the devices of the leader; a failure is a warning.

    The file is `profile/plugins/profile/<time>/<host>.xplane.pb` of the run directory.
    """

    def __init__(self, section: Profile, root: Path, done: int) -> None:
        """Takes the directory of the run, of which `done` steps are over."""
        self._directory = root / "profile"
        self._mirror: Mirror | None = None
        self._first, self._last = section.steps or (0, 0)
        self._active = False
        if section.steps is not None and done >= self._last:
            warn(Note(f"profile.steps: got {list(section.steps)}, but step {done} is done: nothing is traced"))
        elif section.steps is not None and done >= self._first - 1:
            self._first = done + 1
            warn(Note(f"profile.steps: step {self._first} is the first of this start, and its trace has compilations"))

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Traces the block, if the step, which counts from 1, is one of them."""
        if not is_leader() or not self._first <= number <= self._last:
            yield
            return
        if number == self._first:
            self._start()
        try:
            with jax.profiler.StepTraceAnnotation("step", step_num=number):
                yield
        finally:
            if number == self._last:
                self.close()

    def _start(self) -> None:
        options = jax.profiler.ProfileOptions()
        # Calls of Python would be most of the trace; those of JAX are in it anyway.
        options.python_tracer_level = 0
        try:
            self._mirror = Mirror(self._directory) if is_address(self._directory) else None
            local = self._directory if self._mirror is None else self._mirror.local
            jax.profiler.start_trace(local, profiler_options=options)
            self._active = True
        except (RuntimeError, OSError) as error:
            warn(f"profile.steps: nothing is traced, because {error}")

    def close(self) -> None:
        """Writes the trace, if one is under way."""
        if not self._active:
            return
        self._active = False
        try:
            jax.profiler.stop_trace()
            if self._mirror is not None:
                self._mirror.close()
        except (RuntimeError, OSError) as error:
            warn(f"profile.steps: the trace is lost, because {error}")
