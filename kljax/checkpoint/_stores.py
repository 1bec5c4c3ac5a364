"""Checkpoints in object stores, which have no rename: a directory is complete once its commit file is there.

Orbax and TensorStore write to gs:// themselves. TensorStore has a driver for S3 too, which orbax does not name: to it
s3:// is a path of this machine.
"""

import functools
import os
import pathlib
from typing import Any

COMMIT_FILE = "commit_success.txt"
"""Orbax writes this file last."""
RETRIES = {"max_retries": 6, "initial_delay": "500ms", "max_delay": "10s"}
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")


def is_in_store(path: str | os.PathLike[str]) -> bool:
    """Whether a path is an address in an object store."""
    return "://" in os.fspath(path)


def checkpoint_directory(path: str | os.PathLike[str]) -> Any:
    """Returns the absolute directory of a checkpoint: a local path, or that of epath in an object store."""
    if not is_in_store(path):
        return pathlib.Path(path).absolute()
    from etils import epath

    if os.fspath(path).startswith("s3://"):
        open_s3_in_orbax()
    return epath.Path(os.fspath(path))


def is_complete(directory: Any) -> bool:
    """Whether a checkpoint is there and whole: orbax renames a local directory into place."""
    if is_in_store(directory):
        return bool((directory / COMMIT_FILE).exists())
    return bool(directory.is_dir())


def commit_options(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the options of an orbax `CheckpointManager` with which a store has complete steps alone."""
    if not is_in_store(directory):
        return {}
    from orbax.checkpoint._src.path import step

    temporary = temporary_path_class()
    return {
        "temporary_path_class": temporary,
        "step_name_format": step.standard_name_format(temporary_path_cls=temporary),
    }


def temporary_path_class() -> Any:
    """Returns the class of orbax that writes to the final directory of a store, and a commit file last."""
    open_s3_in_orbax()
    from orbax.checkpoint._src.path import atomicity

    return atomicity.CommitFileTemporaryPath


@functools.cache
def open_s3_in_orbax() -> None:
    """Lets orbax name the S3 driver of TensorStore for s3://, as it names that of Google for gs://.

    One function of orbax makes every specification of TensorStore; it gets the address as one of gs://.

    Raises:
      RuntimeError: this release of orbax has no such function.
    """
    from orbax.checkpoint._src.serialization import tensorstore_utils

    make = getattr(tensorstore_utils, "build_kvstore_tspec", None)
    if make is None:
        import orbax.checkpoint as ocp

        raise RuntimeError(f"orbax {ocp.__version__} cannot be led to S3; install orbax-checkpoint 0.12.8")

    @functools.wraps(make)
    def make_specification(directory: str, *arguments: Any, **options: Any) -> Any:
        address = os.fspath(directory)
        if not address.startswith("s3:/"):
            return make(directory, *arguments, **options)
        return _with_s3(make(f"gs://{address.removeprefix('s3:').lstrip('/')}", *arguments, **options))

    tensorstore_utils.build_kvstore_tspec = make_specification


def _with_s3(specification: Any) -> Any:
    """Puts the driver of S3 in the place of that of Google in a specification of TensorStore."""
    if isinstance(specification, list):
        return [_with_s3(entry) for entry in specification]
    if not isinstance(specification, dict):
        return specification
    if specification.get("driver") in ("gcs", "gcs_grpc"):
        return s3_driver(specification["bucket"], specification["path"])
    return {name: _with_s3(entry) for name, entry in specification.items()}


def s3_driver(bucket: str, path: str) -> dict[str, Any]:
    """Describes the driver of S3, with endpoint and region of the variables that other tools of AWS read, too."""
    driver: dict[str, Any] = {"driver": "s3", "bucket": bucket, "path": path, "s3_request_retries": RETRIES}
    if os.environ.get("AWS_ACCESS_KEY_ID"):
        # The other sources of keys are not looked for: those that are missing are errors on the terminal.
        driver["aws_credentials"] = {"type": "environment"}
    for name, variables in (("endpoint", ENDPOINTS), ("aws_region", REGIONS)):
        if value := next((os.environ[variable] for variable in variables if os.environ.get(variable)), None):
            driver[name] = value
    return driver
