"""The environments of docs/agents.md around a client of OpenEnv and a session of MCP, on fakes of both."""

import doctest
import re
from contextlib import closing
from pathlib import Path

import pytest

from train.config.environment import EnvironmentSection
from train.rollouts.episodes.environments import Environments

PAGE = Path(__file__).parents[4] / "docs" / "agents.md"
# As openenv-core 0.3.0 and mcp 2.3.0 have them: names, arguments, and what is a coroutine.
OPENENV = """
import dataclasses
from typing import Any

@dataclasses.dataclass
class StepResult:
    observation: Any
    reward: float | None = None
    done: bool = False

class GenericEnvClient:
    def __init__(self, base_url: str, connect_timeout_s: float = 10.0, message_timeout_s: float = 60.0):
        self.url = base_url

    def sync(self):
        return SyncEnvClient(self)

class SyncEnvClient:
    def __init__(self, async_client):
        self.url, self.count = async_client.url, 0

    def reset(self, **kwargs):
        return StepResult({"message": f"ready at {self.url}"})

    def step(self, action, **kwargs):
        self.count += 1
        if action["message"] == "outage":
            raise ConnectionError("no server")
        return StepResult({"message": action["message"][::-1]}, 0.5 if self.count > 1 else None, self.count > 1)

    def close(self):
        open(self.url, "w").write("closed")
"""
MCP = """
import asyncio
import dataclasses
from typing import Any

@dataclasses.dataclass
class Block:
    type: str
    text: str = ""

@dataclasses.dataclass
class CallToolResult:
    content: list[Block]
    structured_content: Any = None
    is_error: bool = False

class Client:
    def __init__(self, server, *, raise_exceptions: bool = False):
        self.url, self.task = server, None

    async def __aenter__(self):
        self.task = asyncio.current_task()
        return self

    async def __aexit__(self, *error):
        # The scopes of anyio are left where they were entered.
        assert self.task is asyncio.current_task()
        open(self.url, "w").write("closed")

    async def call_tool(self, name, arguments=None, read_timeout_seconds=None, progress_callback=None):
        assert self.task is not None
        if arguments["query"] == "outage":
            raise ConnectionError("no server")
        if name != "search" or arguments["query"] == "wrong":
            return CallToolResult([Block("text", "Error executing tool")], is_error=True)
        return CallToolResult([Block("text", arguments["query"].upper()), Block("image"), Block("text", "!")])
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A file with the environments of the page, that imports the fakes."""
    folder = tmp_path_factory.mktemp("wrapped")
    (folder / "openenv").mkdir()
    (folder / "openenv" / "core.py").write_text(OPENENV)
    (folder / "mcp.py").write_text(MCP)
    blocks = re.findall(r"^```python\n(>>> class (?:Echo|Search):.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    code = [example.source for block in blocks for example in doctest.DocTestParser().get_examples(block)]
    file = folder / "mine.py"
    file.write_text("\n".join([f"import sys\nsys.path.insert(0, {str(folder)!r})", *code]))
    return file


def opened(source, name, closed):
    return closing(Environments(EnvironmentSection(name=f"{source}:{name}", arguments={"url": str(closed)})))


def test_client_of_openenv_has_text_steps(source, tmp_path):
    closed = tmp_path / "closed"
    with opened(source, "Echo", closed) as environments:
        assert environments.form == "text"
        (reset,) = environments.answer([{"do": "reset", "episode": 0, "row": {"prompt": "?"}}])
        assert reset == {"text": f"ready at {closed}"}
        steps = [{"do": "step", "episode": 0, "text": text} for text in ("abc", "de", "outage")]
        first, second, failed = environments.answer(steps)
        assert first == {"text": "cba", "rewards": {"reward": 0.0}, "done": False}
        assert second == {"text": "ed", "rewards": {"reward": 0.5}, "done": True}
        assert failed["failure"][0] == "exception"
        assert environments.answer([{"do": "end", "episode": 0}]) == [{"rewards": None}]
        assert closed.read_text() == "closed"


def test_session_of_mcp_has_tools(source, tmp_path):
    closed = tmp_path / "closed"
    with opened(source, "Search", closed) as environments:
        assert environments.form == "tools"
        (tool,) = environments.tools
        assert tool["function"]["name"] == "search"
        assert environments.answer([{"do": "reset", "episode": 0, "row": {}}]) == [{"text": ""}]
        calls = [
            {"do": "call", "episode": 0, "tool": "search", "arguments": {"query": query}}
            for query in ("where", "wrong", "outage")
        ]
        found, refused, failed = environments.answer(calls)
        assert (found["text"], refused["text"]) == ("WHERE!", "Error executing tool")
        assert failed["failure"][0] == "exception"
        environments.answer([{"do": "close", "episode": 0}])
        assert closed.read_text() == "closed"
