"""Every command that the README and the docs show works: kljax runs it, train reads its config, the others know it."""

import importlib
import importlib.util
import json
import pathlib
import re
import shlex

import numpy as np
import pytest

from kljax.__main__ import main as kljax_main
from kljax.tools.audit import report
from tests import parity
from train.__main__ import parser as train_parser
from train.config.errors import ConfigError
from train.config.load import load
from train.config.storage import STORES

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHELL = re.compile(r"^```(?:sh|bash|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:\.venv/bin/)?python -m [^`]+)`")
VARIABLE = re.compile(r"[A-Z][A-Z_0-9]*=")
PLACEHOLDER = re.compile(r"[A-Z]{3,}|\[|\.\.\.")
# Problems of a config that are none where its files are.
ABSENT = re.compile(r"not there|does not exist|no such|is not a folder|has no tokenizer|cannot be read", re.IGNORECASE)


def commands() -> dict[str, list[str]]:
    """Lists the words of each command by the line that shows it."""
    collected = {}
    for page in PAGES:
        if "_build" in page.parts:
            continue
        text = page.read_text()
        lines = [line for block in SHELL.findall(text) for line in block.replace("\\\n", " ").splitlines()]
        for line in [*lines, *INLINE.findall(text)]:
            words = shlex.split(line.removeprefix("$ "), comments=True)
            while words and VARIABLE.match(words[0]):
                words = words[1:]
            if words and words[0].removeprefix(".venv/bin/") in ("python", "make"):
                collected[f"{page.relative_to(ROOT)}: {' '.join(words)}"] = [
                    words[0].removeprefix(".venv/bin/"),
                    *words[1:],
                ]
    return collected


COMMANDS = commands()
MODULES = {line: (words[2], words[3:]) for line, words in COMMANDS.items() if words[:2] == ["python", "-m"]}


def of_module(*names: str) -> list[str]:
    return [line for line, (module, _) in MODULES.items() if module in names]


@pytest.fixture
def files(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory holds the arrays that the commands of the audit name, and a dump that agrees."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for name in ("policy", "ref", "rollout"):
        np.save(f"{name}.npy", rng.normal(size=(2, 3, 5)))
    arrays = {name: -1 + 0.1 * rng.normal(size=(3, 5)) for name in ("log_probs", "ref_log_probs", "rollout_log_probs")}
    np.savez("batch.npz", mask=np.ones((3, 5)), **arrays)
    pathlib.Path("config.json").write_text(json.dumps({"beta": 0.04, "max_steps": 10}))
    parity.write(next(dump for dump in parity.dumps() if not dump["planted"]), pathlib.Path("dump.npz"))


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("line", of_module("kljax"))
def test_a_command_of_the_library_runs(
    line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, words = MODULES[line]
    if len(words) < 2 or "--checkpoints" in words or PLACEHOLDER.search(" ".join(words)):
        with pytest.raises(SystemExit, match=r"^0$"):
            kljax_main([*words[:1], "--help"])
        shown = capsys.readouterr().out
        assert all(word in shown for word in words if word.startswith("--"))
        return
    if "--out" in words:  # an audit; its pictures are drawn in tests/kljax/tools/audit/test_command.py
        monkeypatch.setattr(report, "have_matplotlib", lambda: False)
    if words[0] == "audit":  # the numbers of a page are those of a large vocabulary; what runs is the same
        words = ["500" if word == "32000" else word for word in words] + [
            "--bootstrap",
            "0",
            "--rows",
            "2",
            "--length",
            "3",
        ]
    assert kljax_main(words) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    "line", [line for line in of_module("train") if not PLACEHOLDER.search(line.partition(": ")[2])]
)
def test_the_config_of_a_run_loads(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    # An extra, which is not installed here, brings the packages of object stores.
    installed = {scheme: store._replace(package="json") for scheme, store in STORES.items()}
    monkeypatch.setattr("train.config.storage.STORES", installed)
    _, words = MODULES[line]
    if not words or words == ["--help"]:
        return
    options = train_parser().parse_intermixed_args(words)
    wrong = [problem for problem in problems(options.config, options.overrides) if not ABSENT.search(problem)]
    assert not wrong


def problems(config: str, overrides: list[str]) -> list[str]:
    try:
        load(config, overrides)
    except ConfigError as error:
        return list(error.problems)
    return []


OTHERS = [line for line, (module, _) in MODULES.items() if module.startswith(("train.", "benchmarks.", "tests."))]


@pytest.mark.parametrize("line", OTHERS)
def test_the_options_of_another_command_exist(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    module, words = MODULES[line]
    if not words:
        assert importlib.util.find_spec(module)
        return
    loaded = importlib.import_module(module)
    main = importlib.import_module(f"{module}.__main__").main if hasattr(loaded, "__path__") else loaded.main
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--help"])
    shown = capsys.readouterr().out
    missing = [word for word in words if word.startswith("--") and word.partition("=")[0] not in shown]
    assert not missing


def test_targets_exist() -> None:
    makefile = "\n".join((ROOT / name).read_text() for name in ("Makefile", ".ci/more.mk"))
    targets = {words[1] for words in COMMANDS.values() if words[0] == "make" and len(words) > 1}
    assert targets
    # The targets of environments are files under names that are variables.
    variables = dict(re.findall(r"^(\w+) := (\S+)$", makefile, re.MULTILINE))
    makefile = re.sub(r"\$\((\w+)\)", lambda found: variables.get(found[1], found[0]), makefile)
    missing = [target for target in targets if not re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE)]
    assert not missing
