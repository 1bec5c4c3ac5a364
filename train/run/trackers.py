"""Trackers that a run tells its metrics beside its own files: Weights & Biases, and a port for Prometheus."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from kljax.checkpoint import text_hash
from train.config.errors import UserError
from train.config.schema import Config
from train.run.glossary import tag_of

PACKAGES = {"report.wandb": "wandb", "report.prometheus_port": "prometheus_client"}


class Tracker(Protocol):
    """Takes the metrics of a run; steps of the warm start and of RL are counted apart."""

    def log(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        """Takes finite values of a step."""

    def close(self) -> None:
        """Sends the values that are not sent yet."""


class WandbTracker:
    """A run of Weights & Biases. A resumed run continues it; WANDB_MODE=offline writes files alone."""

    def __init__(self, project: str, root: Path, config: Mapping[str, Any]) -> None:
        """Starts or continues the run; raises `UserError` if that is refused, as without an API key."""
        import wandb

        # The directory names the run, so that one that is resumed finds it.
        number = text_hash(str(root.absolute())).hexdigest()[:16]
        settings = wandb.Settings(console="off", silent=True)
        names: dict[str, Any] = {"project": project, "name": root.name, "id": number, "dir": root}
        try:
            self._run = wandb.init(**names, config=dict(config), resume="allow", settings=settings)
        except wandb.errors.Error as error:
            raise UserError(f"report.wandb: {error}; set report.wandb=null, or WANDB_MODE=offline") from error
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


def check_trackers(config: Config) -> None:
    """Raises `UserError` if a tracker of the config needs a package that is not installed."""
    values = {"report.wandb": config.report.wandb, "report.prometheus_port": config.report.prometheus_port}
    for field, value in values.items():
        package = PACKAGES[field]
        if value is not None and importlib.util.find_spec(package) is None:
            distribution = package.replace("_", "-")
            raise UserError(
                f"{field}: got {value!r}, which needs the package {distribution}; install it with "
                f"`pip install {distribution}`, or set {field}=null"
            )


def open_trackers(config: Config, root: Path) -> list[Tracker]:
    """Opens the trackers of a config for the run in a directory.

    Raises:
      UserError: a port cannot be used.
    """
    trackers: list[Tracker] = []
    if config.report.prometheus_port is not None:
        trackers.append(PrometheusTracker(config.report.prometheus_port, root.name))
    if config.report.wandb is not None:
        trackers.append(WandbTracker(config.report.wandb, root, config.model_dump(mode="json")))
    return trackers
