"""Files at the root that other programs read: CI, hooks, templates and the citation agree with the project."""

import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml

import kljax
from tests import selection

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKEFILES = (ROOT / "Makefile").read_text() + (ROOT / ".ci/more.mk").read_text()
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", MAKEFILES, re.M))
WORKFLOWS = ROOT / ".github/workflows"
GUIDE = ROOT / "docs/contributing"
FORMS = sorted(path for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config")


def make_targets(script: str) -> set[str]:
    """Returns the targets that the commands of a script call."""
    lines = re.findall(r"(?:^|\$\(|[;{)]) *make ([^\n;)]*)", script, re.M)
    return {word for line in lines for word in line.split() if re.fullmatch("[a-z][a-z-]*", word)}


def test_ci_script_calls_existing_targets():
    targets = make_targets((ROOT / ".ci/run").read_text())
    assert {"lint", "types", "test", "test-more", "test-aot", "test-isa", "test-newest"} <= targets
    assert targets <= TARGETS


def test_workflow_runs_each_stage_of_the_ci_script():
    (job,) = yaml.safe_load((WORKFLOWS / "ci.yml").read_text())["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run ${{ matrix.stage }}"]
    script = ROOT / ".ci/run"
    assert script.stat().st_mode & 0o111
    stages = re.findall(r"^(\w+)\(\)", script.read_text(), re.M)
    assert job["strategy"]["matrix"]["stage"] == stages
    assert re.search(r"\$\{\*:-(.*)\}", script.read_text())[1].split() == stages


def test_nightly_workflow_runs_existing_targets():
    (job,) = yaml.safe_load((WORKFLOWS / "nightly.yml").read_text())["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == ["make nightly"]
    called = re.findall(r"^\t\$\(MAKE\) (.*)$", MAKEFILES, re.M)
    assert {word for line in called for word in line.split() if re.fullmatch("[a-z][a-z-]*", word)} <= TARGETS


@pytest.mark.parametrize("workflow", ["ci", "nightly"])
def test_workflow_has_both_pythons(workflow):
    (job,) = yaml.safe_load((WORKFLOWS / f"{workflow}.yml").read_text())["jobs"].values()
    (setup,) = (step["with"] for step in job["steps"] if "setup-python" in step.get("uses", ""))
    assert setup["python-version"].split() == ["3.12", "3.11"]


@pytest.mark.parametrize("mark", selection.MARKS)
def test_tests_that_make_test_leaves_out_exist(mark):
    names = selection.read_names(mark)
    assert len(set(names)) == len(names)
    for name in names:
        file, _, test = name.partition("[")[0].partition("::")
        assert (ROOT / file).exists(), name
        # A doctest has the name of what it documents.
        assert file.startswith("kljax/") or not test or f"def {test}(" in (ROOT / file).read_text(), name


def test_faults_can_be_planted():
    """Each replaces text that its file has once; code that changes takes its faults along."""
    faults = json.loads((ROOT / "tests/mutants/mutants.json").read_text())
    lost = [fault["what"] for fault in faults if (ROOT / fault["file"]).read_text().count(fault["old"]) != 1]
    assert faults
    assert lost == []


def test_hooks_use_the_locked_environment():
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local"
    for hook in repository["hooks"]:
        command, *words = hook["entry"].split()
        assert command == ".venv/bin/ruff" or (command == "make" and set(words) <= TARGETS), hook["id"]


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_issue_form_has_distinct_labelled_fields(path):
    form = yaml.safe_load(path.read_text())
    assert form["name"]
    assert form["description"]
    assert all(field["attributes"]["label"] for field in form["body"])
    assert len({field["id"] for field in form["body"]}) == len(form["body"])


def test_citation_has_the_version_and_license():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (kljax.__version__, PROJECT["license"])
    assert citation["title"].startswith(f"{PROJECT['name']}: ")


def table_of_tests() -> dict[tuple[str, ...], tuple[str, ...]]:
    """Reads the map of `docs/contributing/tests.md`: paths of source, and those of their tests."""
    page = (GUIDE / "tests.md").read_text().split("\n## ")[0]
    lines = [line.split("|") for line in page.splitlines() if line.startswith("| `")]
    return {tuple(re.findall("`(.+?)`", line[1])): tuple(re.findall("`(.+?)`", line[2])) for line in lines}


def test_every_module_has_one_row_of_the_map():
    table = table_of_tests()
    sources = [source for row in table for source in row]
    for path in [*(ROOT / "kljax").rglob("*.py"), *(ROOT / "train").rglob("*.py")]:
        module = path.relative_to(ROOT)
        names = {str(name) for name in (module, *module.parents)}
        assert len([source for source in sources if source in names]) == 1, f"{module}: docs/contributing/tests.md"


def test_every_row_of_the_map_has_test_files():
    for sources, tests in table_of_tests().items():
        paths = [ROOT / test for test in tests]
        files = [file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path])]
        assert any(file.name.startswith("test_") for file in files), sources


@pytest.mark.parametrize("page", ["index", "tests"])
def test_paths_of_the_guide_exist(page):
    named = set(re.findall(r"`((?:kljax|train|tests|docs|configs)/[\w./-]+)`", (GUIDE / f"{page}.md").read_text()))
    named -= {"configs/presets/SYSTEM/ALGORITHM.yaml"}
    assert named
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []
