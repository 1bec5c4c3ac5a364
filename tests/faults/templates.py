"""Chat templates that fail, hang, write without end, or take all memory."""

import shutil
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from tests.faults.case import Fault, raised
from tests.faults.folders import GOLDENS
from train.data.tokenizers import chat
from train.data.tokenizers.chat import ChatTemplate
from train.data.tokenizers.files import load_folder

MESSAGES = [{"role": "user", "content": "hi"}]
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}BODY{% endfor %}{% endfor %}"
MACRO = "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}"


def rendered(source: str, *words: str, seconds: float = chat.SECONDS) -> Callable[[Path], str]:
    """Makes a fault of a template that must be refused."""

    def run(_: Path) -> str:
        with mock.patch.object(chat, "SECONDS", seconds):
            return raised(lambda: render(source), "the chat template", *words, error=ValueError)

    return run


def render(source: str) -> str:
    """Renders a conversation."""
    return ChatTemplate(source, {}).render(MESSAGES, reply=True)


def usable(_: Path) -> str:
    """Renders after a process was killed."""
    return "identical" if render("{{ messages[0].content }}") == "hi" else "silent"


def written(text: bytes | str, *words: str, name: str = "tokenizer_config.json") -> Callable[[Path], str]:
    """Makes a fault of a file beside a tokenizer."""

    def run(directory: Path) -> str:
        folder = Path(shutil.copytree(GOLDENS / "tokenizers" / "chatml", directory / "folder"))
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        return raised(lambda: load_folder(folder), "model.path", *words)

    return run


CASES = {
    "no template": rendered("{% for %}", "not valid jinja2"),
    "blocks nested too deeply": rendered("{% if 1 %}" * 2000 + "{% endif %}" * 2000, "RecursionError"),
    "division by zero": rendered("{{ 1 / messages[0].role.find('u') }}", "ZeroDivisionError"),
    "a constant division by zero": rendered("{{ 1 / 0 }}", "ZeroDivisionError"),
    "a range that is too long": rendered("{% for i in range(10 ** 9) %}{% endfor %}", "OverflowError"),
    "a text of 10 GB": rendered("{% set n = messages | length %}{{ 'x' * (n * 10 ** 10) }}", "MemoryError"),
    "a constant text of 10 GB": rendered("{{ 'x' * 10 ** 10 }}", "MemoryError"),
    # Its memory is written, so that on a slow machine the limit of CPU time may come first.
    "a text that is doubled without end": rendered(
        "{% set s = namespace(t='x') %}{% for i in range(40) %}{% set s.t = s.t ~ s.t %}{% endfor %}"
    ),
    "a text of 10 GB by its format": rendered("{{ '%10000000000d' % (messages | length) }}", "MemoryError"),
    "a macro without end": rendered(MACRO, "RecursionError"),
    "loops without end": rendered(LOOP.replace("BODY", ""), "no answer within 0.3 s of CPU time", seconds=0.3),
    "a power without end": rendered("{{ (messages | length + 8) ** (10 ** 10) }}", "0.3 s of CPU time", seconds=0.3),
    "a long text of words": rendered("{{ lipsum(n=10 ** 7) }}", "0.3 s of CPU time", seconds=0.3),
    "a text without end": rendered(LOOP.replace("BODY", "x" * 1000), "more than 10,000,000 characters"),
    "a missing name": rendered("{{ nothing.at.all }}", "'nothing' is undefined"),
    "its own refusal": rendered("{{ raise_exception('no') }}", "refuses messages of user: no"),
    "attributes of Python": rendered("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    "a template after a killed one": usable,
    "a template that is not UTF-8": written(b"\xff", "cannot read", name="chat_template.jinja"),
    "a template that is a number": written('{"chat_template": 3, "eos_token": "</s>"}', "got int, expected text"),
    "templates that are numbers": written('{"chat_template": [3]}', "got list, expected text"),
    "a config nested too deeply": written("[" * 100_000, "nested too deeply"),
    "a config with a number of 6,000 digits": written('{"a": ' + "1" * 6000 + "}", "cannot read"),
    "a config that is a list": written("[]", "holds list, expected a JSON object"),
    "a tokenizer that is no JSON": written("{", "cannot read", name="tokenizer.json"),
    "a tokenizer that is empty": written("{}", "cannot read", name="tokenizer.json"),
}
HARMLESS = {"a template after a killed one": "the next process renders it"}
FAULTS = [Fault("chat templates", name, run, HARMLESS.get(name, "")) for name, run in CASES.items()]
