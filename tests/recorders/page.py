"""A recorder as it stands in docs/parity.md, put in place for one run."""

import atexit
import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from tests.goldens.parity.page import SHARED, blocks


@contextlib.contextmanager
def recorder(title: str, path: pathlib.Path, **header: Any) -> Iterator[None]:
    """Runs the code of the page, and writes the dump where the process of a user would end.

    Args:
      title: of the recorder.
      path: of the dump.
      header: sections of the header that differ from the page's; None leaves one out.
    """
    code, scope = blocks(), {}  # type: ignore[var-annotated]
    with mock.patch.object(atexit, "register"):
        exec(code[SHARED], scope)
        exec(code[title], scope)
    yield
    changed = {**scope["header"], **header}
    scope["header"].clear()
    scope["header"].update({name: section for name, section in changed.items() if section is not None})
    scope["write"](path)
