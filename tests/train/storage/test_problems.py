"""Errors of stores, as their packages and TensorStore word them, in one line for users."""

import pytest

from train.process.disk_problem import disk_problem

BODY = "[http_response_body='<Error><Code>AccessDenied</Code></Error>'] [http_response_code='403']"
REFUSED = (
    'PERMISSION_DENIED: Error opening "zarr" driver: Error writing "a/.zarray" in OCDBT database at "run/state/": '
    f"Error writing \"run/state/manifest.ocdbt\": AccessDenied: Access Denied {BODY} [tensorstore_spec='{{}}']"
)
GONE = 'ABORTED: Error reading "x/manifest.ocdbt": All 6 retry attempts failed: CURL error Could not connect to server'
GOOGLE = (
    "Error opening \"zarr\" driver: Error writing gs://bucket/run/manifest.ocdbt: not found [tensorstore_spec='{}']"
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (REFUSED, '"run/state/manifest.ocdbt": AccessDenied: Access Denied'),
        (GONE, 'ABORTED: Error reading "x/manifest.ocdbt": All 6 retry attempts failed: CURL error Could not connect'),
        (GOOGLE, "gs://bucket/run/manifest.ocdbt: not found"),
    ],
)
def test_error_of_tensorstore_has_its_reason(text: str, reason: str) -> None:
    assert (disk_problem(ValueError(text)) or "").startswith(f"cannot write to the store: {reason}")


def test_error_of_a_package_below_another_is_found() -> None:
    error = RuntimeError("a save failed")
    kind = type("ConnectTimeoutError", (Exception,), {"__module__": "botocore.exceptions"})
    error.__cause__ = kind("Connect timeout on endpoint URL")
    assert disk_problem(error) == "cannot write to the store: Connect timeout on endpoint URL"


def test_error_with_an_address_names_it() -> None:
    error = PermissionError(13, "the store refuses it: Access Denied", "s3://bucket/run/metrics.jsonl")
    assert disk_problem(error) == "cannot write s3://bucket/run/metrics.jsonl: the store refuses it: Access Denied"


@pytest.mark.parametrize("error", [ValueError("NOT_FOUND: nothing"), RuntimeError("s3://bucket"), KeyError("gs://b")])
def test_other_errors_are_none_of_a_store(error: Exception) -> None:
    assert disk_problem(error) is None
