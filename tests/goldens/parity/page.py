"""The recorders of docs/parity.md and docs/replay.md."""

import pathlib
import re

PAGE = pathlib.Path(__file__).parents[3] / "docs/parity.md"
REPLAY = PAGE.with_name("replay.md")
SHARED = "Shared by all PyTorch systems"


def blocks(page: pathlib.Path = PAGE) -> dict[str, str]:
    """The code of each recorder by the title above it."""
    return dict(re.findall(r"^### (.+?)\n.*?^```py\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL))
