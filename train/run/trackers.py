"""Trackers that a run tells its metrics beside its own files: Weights & Biases, and a port for Prometheus."""

import importlib.util
import os
import re
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from kljax.checkpoint import text_hash
from train.config.errors import UserError, warn
from train.config.schema import Config
from train.config.storage import is_address
from train.distributed.peer_watch import last_progress
from train.run.glossary import tag_of

MOST_SECONDS = 60.0
"""A tracker has this time for the values of a step, and again to send the last ones."""
SHOWN = 300
"""Characters of an error of a tracker that are shown."""


class Tracker(Protocol):
    """Takes the metrics of a run; steps of the warm start and of RL are counted apart."""

    def log(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        """Takes finite values of a step."""

    def close(self) -> None:
        """Sends the values that are not sent yet."""


class GuardedTracker:
    """A tracker whose failure, or silence for `MOST_SECONDS`, is a warning; the run goes on without it."""

    def __init__(self, field: str, tracker: Tracker) -> None:
        self._field = field
        self._tracker = tracker
        self._failed = False

    def log(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        """Takes finite values of a step, unless the tracker has failed."""
        self._call(f"step {step}", lambda: self._tracker.log(phase, step, values))

    def close(self) -> None:
        """Sends the values that are not sent yet, unless the tracker has failed."""
        self._call("the end", self._tracker.close)

    def _call(self, moment: str, action: Callable[[], None]) -> None:
        if self._failed:
            return
        errors: list[BaseException] = []

        def call() -> None:
            try:
                action()
            except BaseException as error:  # any error of the package, also SystemExit
                errors.append(error)

        # A daemon, so that one that never returns does not hold the process at its end.
        thread = threading.Thread(target=call, name=self._field, daemon=True)
        thread.start()
        thread.join(MOST_SECONDS)
        if thread.is_alive() or errors:
            self._failed = True
            reason = describe(errors[0]) if errors else f"no answer within {MOST_SECONDS:g} s"
            warn(f"{self._field}: {reason}, at {moment}; the run goes on without it")


class WandbTracker:
    """A run of Weights & Biases. A resumed run continues it; WANDB_MODE=offline writes files alone."""

    def __init__(self, project: str, root: Path, config: Mapping[str, Any]) -> None:
        """Starts or continues the run."""
        import wandb

        # The directory names the run, so that one that is resumed finds it.
        number = text_hash(str(root.absolute())).hexdigest()[:16]
        settings = wandb.Settings(console="off", silent=True)
        directory = tempfile.gettempdir() if is_address(root) else root
        names: dict[str, Any] = {
            "project": project,
            "name": root.name,
            "id": number,
            "dir": directory,
        }
        self._run = wandb.init(**names, config=dict(config), resume="allow", settings=settings)
        for phase in ("warm_start", "train", "eval"):
            self._run.define_metric(f"{phase}/*", step_metric=f"{phase}/step")

    def log(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        """Logs the values as `phase/group/name`, against the steps of their phase."""
        named = {f"{phase}/{tag_of(name)}": value for name, value in values.items()}
        self._run.log({f"{phase}/step": step, **named})

    def close(self) -> None:
        """Sends the values that are not sent yet."""
        self._run.finish()


class PrometheusTracker:
    """The last value of every metric, as text at `/metrics` of a port on all interfaces."""

    def __init__(self, port: int, name: str) -> None:
        import prometheus_client

        registry = prometheus_client.CollectorRegistry()
        labels = ("run", "phase", "metric")
        self._values = prometheus_client.Gauge("kljax_metric", "Last value of a metric", labels, registry=registry)
        self._steps = prometheus_client.Gauge("kljax_step", "Last step of a phase", labels[:2], registry=registry)
        self._name = name
        progress = prometheus_client.Gauge(
            "kljax_last_progress_timestamp_seconds", "Unix time at which the last phase began", registry=registry
        )
        progress.set_function(lambda: last_progress().time)
        try:
            self._server, self._thread = prometheus_client.start_http_server(port, registry=registry)
        except OSError as error:
            raise UserError(f"report.prometheus_port: cannot listen on port {port}: {error.strerror}") from error

    def log(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        """Sets the values of the next answer."""
        self._steps.labels(self._name, phase).set(step)
        for name, value in values.items():
            self._values.labels(self._name, phase, name).set(value)

    def close(self) -> None:
        """Frees the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


TRACKERS: Mapping[str, tuple[str, Callable[[Any, Path, Config], Tracker]]] = {
    "prometheus_port": ("prometheus_client", lambda port, root, config: PrometheusTracker(port, root.name)),
    "wandb": ("wandb", lambda project, root, config: WandbTracker(project, root, config.model_dump(mode="json"))),
}
"""The trackers by their fields of `report`: the package that each needs, and how it is opened."""


def describe(error: BaseException) -> str:
    """Describes an error of a tracker in one line, without the keys that its text may have.

    Example:
      >>> describe(ValueError("bad key 0123456789abcdef0123456789abcdef01234567"))
      'ValueError: bad key ***'
    """
    text = " ".join(str(error).split())
    for name, value in os.environ.items():
        if re.search("KEY|TOKEN|SECRET|PASSWORD", name, re.IGNORECASE) and len(value) >= 4:
            text = text.replace(value, "***")
    text = re.sub(r"[\w-]{20,}", "***", text)[:SHOWN]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def check_trackers(config: Config) -> None:
    """Raises `UserError` if a tracker of the config needs a package that is not installed."""
    for name, (package, _) in TRACKERS.items():
        value = getattr(config.report, name)
        spec = importlib.util.find_spec(package) if value is not None else None
        # A folder of the name, which W&B makes in the working directory, is found too, without a file of a package.
        if value is not None and (spec is None or spec.origin is None):
            distribution = package.replace("_", "-")
            raise UserError(
                f"report.{name}: got {value!r}, which needs the package {distribution}; install it with "
                f"`pip install {distribution}`, or set report.{name}=null"
            )


def open_trackers(config: Config, root: Path) -> list[Tracker]:
    """Opens the trackers of a config for the run in a directory.

    Raises:
      UserError: a port cannot be used, or a package refuses, as Weights & Biases does without an API key.
    """
    trackers: list[Tracker] = []
    for name, (_, opener) in TRACKERS.items():
        field = f"report.{name}"
        value = getattr(config.report, name)
        if value is None:
            continue
        try:
            trackers.append(GuardedTracker(field, opener(value, root, config)))
        except BaseException as error:  # any error of the package, also SystemExit
            for tracker in trackers:
                tracker.close()
            if isinstance(error, KeyboardInterrupt | UserError):
                raise
            offline = ", or WANDB_MODE=offline" if field == "report.wandb" else ""
            raise UserError(f"{field}: {describe(error)}; set {field}=null{offline}") from error
    return trackers
