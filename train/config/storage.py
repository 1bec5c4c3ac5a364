"""Addresses of object stores, as `s3://bucket/name`: which of them a path may be, and what each store needs."""

import argparse
import functools
import importlib.util
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


class Store(NamedTuple):
    """An object store: its name, the package that speaks to it, and the extra of kljax that brings the package."""

    name: str
    package: str
    extra: str


STORES = {"s3": Store("Amazon S3", "s3fs", "s3"), "gs": Store("Google Cloud Storage", "gcsfs", "gcs")}
"""The stores by the scheme of their addresses."""
COMMIT_FILE = "commit_success.txt"
"""The last file of a directory of orbax in a store: without it the directory is not complete."""
SECONDS = {"connect_timeout": 10, "read_timeout": 60}
"""Longest waits for a store: for a connection, and for each part of an answer; a request is repeated a few times."""
_ONE_SLASH = re.compile(rf"({'|'.join(STORES)}):/(?!/)")


def is_address(text: str | os.PathLike[str]) -> bool:
    """Whether a text, or a path made of it, is an address and no path of this machine.

    Example:
        >>> [is_address(text) for text in ("s3://bucket/run", "gs:/bucket/run", "./s3:/run", "runs")]
        [True, True, False, False]
    """
    return bool(ADDRESS.match(os.fspath(text)) or _ONE_SLASH.match(os.fspath(text)))


@functools.cache
def prepare_packages() -> None:
    """Sets the packages of the stores up: nothing is cached, since other processes write too, and waits end."""
    import fsspec

    # With TensorFlow installed, epath would go through it, which cannot read S3.
    os.environ.setdefault("EPATH_USE_TF", "false")
    s3 = fsspec.config.conf.setdefault("s3", {})
    s3.setdefault("use_listings_cache", False)
    s3.setdefault("config_kwargs", {**SECONDS, "retries": {"max_attempts": 3}})
    # Otherwise gcsfs asks another service of Google for the kind of a bucket, and warns where it has no answer.
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    gcs = fsspec.config.conf.setdefault("gcs", {})
    gcs.setdefault("use_listings_cache", False)
    gcs.setdefault("requests_timeout", SECONDS["read_timeout"])


def small_file(folder: str, name: str) -> Any:
    """Returns the path of a file in a folder, local or in a store, to look at while a config is checked.

    Raises:
      OSError: the address cannot be used.
    """
    if not is_address(folder):
        return Path(folder).expanduser() / name
    if problem := address_problem(folder):
        raise OSError(problem)
    prepare_packages()
    from etils import epath

    return epath.Path(folder) / name


def local_problem(text: str) -> str:
    """Returns the reason why a text is no path of this machine, or no text if it may be one.

    Example:
        >>> local_problem("s3://bucket/run")
        'an address; mount the bucket, and name a path of the mount'
    """
    return "an address; mount the bucket, and name a path of the mount" if is_address(text) else ""


def local_argument(text: str) -> Path:
    """Reads an argument of a command line that has to be a path of this machine.

    Raises:
      ArgumentTypeError: it is an address in an object store.
    """
    if problem := local_problem(text):
        raise argparse.ArgumentTypeError(f"got {text!r} ({problem})")
    return Path(text)


def address_problem(text: str) -> str:
    """Returns the reason why an address cannot be used, or no text if it can; `text` may be a local path, too.

    Example:
        >>> address_problem("https://host/run")
        'an address of https://; expected a path, or an address of s3:// or gs://'
        >>> address_problem("s3:/bucket/run")
        'one slash; expected two, as s3://bucket/run'
        >>> address_problem("runs"), address_problem("gs:///run")
        ('', 'no bucket; expected gs://BUCKET/NAME')
    """
    if not is_address(text):
        return ""
    if one := _ONE_SLASH.match(text):
        return f"one slash; expected two, as {one[1]}://{text[one.end() :]}"
    scheme, _, rest = text.partition("://")
    if scheme not in STORES:
        return f"an address of {scheme}://; expected a path, or an address of {' or '.join(f'{s}://' for s in STORES)}"
    if not rest.partition("/")[0]:
        return f"no bucket; expected {scheme}://BUCKET/NAME"
    if not rest.partition("/")[2].strip("/"):
        return f"a bucket alone; expected {scheme}://{rest.strip('/')}/NAME"
    if set(rest) & set("?*[]#\\"):
        return "a character of ? * [ ] # \\, which names in a bucket cannot have here"
    store = STORES[scheme]
    if importlib.util.find_spec(store.package) is None:
        return f"{scheme}:// needs the package {store.package}; run pip install 'kljax[train,{store.extra}]'"
    return ""
