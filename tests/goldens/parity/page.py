"""The recorders of docs/parity.md."""

import pathlib
import re

PAGE = pathlib.Path(__file__).parents[3] / "docs/parity.md"
SHARED = "Shared by all PyTorch systems"


def blocks() -> dict[str, str]:
    """The code of each recorder by the title above it."""
    return dict(re.findall(r"^### (.+?)\n.*?^```py\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL))
