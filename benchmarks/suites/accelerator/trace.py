"""A trace of two updates and of 50 decode steps by `jax.profiler`, for XProf, with the kernels that take longest."""

import collections
import pathlib
from typing import Any

import jax
from jax.profiler import ProfileData

from benchmarks.harness import machine
from benchmarks.suites.accelerator import work
from benchmarks.suites.accelerator.model import draw, learner_of, random_batch, sampler_of

UPDATES = 2
DECODE_STEPS = 50
LONGEST = 3


class TraceContender:
    """Traces one program after the other into a directory."""

    def __init__(self, directory: str) -> None:
        self.directory = pathlib.Path(directory)

    def versions(self) -> dict[str, str]:
        return machine.versions()

    def rows(self, of: str, seconds: float) -> list[dict[str, Any]]:
        """Traces "updates MODEL lora" or "decode steps MODEL lora", compiled and run once before."""
        what, name, weights = of.rsplit(" ", 2)
        lora = weights == "lora"
        batch = work.work_of(name)
        updates = what == "updates"
        if not updates and batch != work.TINY:
            # The first token comes from the prompt.
            batch = work.UpdateWork(name, completion_length=DECODE_STEPS + 1)
        learner = learner_of(batch, lora=lora)
        samples = random_batch(learner)

        def run() -> None:
            if updates:
                for _ in range(UPDATES):
                    learner.update(samples)
            else:
                jax.block_until_ready(draw(learner, sampler_of(batch, lora=lora), 0))

        with jax.set_mesh(learner.context.mesh):
            run()
            directory = self.directory / what.replace(" ", "-")
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0
            with jax.profiler.trace(str(directory), profiler_options=options):
                run()
        return [{"name": of, **read_trace(directory), "trace": str(directory)}]


def read_trace(directory: pathlib.Path) -> dict[str, Any]:
    """Sums up the newest trace below a directory: kernels, the time between first and last, and their share of it."""
    file = max(directory.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    planes = list(ProfileData.from_file(str(file)).planes)
    # Streams of a GPU and the operations of a TPU; on a CPU the threads that run them.
    devices = [plane for plane in planes if plane.name.startswith("/device:") and any(plane.lines)]
    busy = collections.Counter[str]()
    spans = list[tuple[float, float]]()
    for plane in devices or [plane for plane in planes if "CPU" in plane.name]:
        for line in plane.lines:
            if devices and not line.name.startswith(("Stream", "XLA Ops")):
                continue
            for event in line.events:
                busy[event.name] += event.duration_ns
                spans.append((event.start_ns, event.start_ns + event.duration_ns))
    covered = 0.0
    end = 0.0
    for first, last in sorted(spans):
        covered += max(0.0, last - max(first, end))
        end = max(end, last)
    span = end - min((first for first, _ in spans), default=0.0)
    longest = ", ".join(f"{name[:40]} {1e-6 * time:.1f} ms" for name, time in busy.most_common(LONGEST))
    return {
        "kernels": len(spans),
        "ms": 1e-6 * span,
        "busy": covered / span if span else None,
        "longest": longest,
    }


load = TraceContender
