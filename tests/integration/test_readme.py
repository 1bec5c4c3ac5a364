"""The examples of the README work: its Python runs, and the files and targets it names are there."""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_python_runs():
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    assert blocks
    code = "\n".join(blocks) + "\nprint(float(loss))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert abs(float(done.stdout) - 0.083726) < 1e-4


def test_the_first_commands_are_make_targets():
    commands = re.search(r"```sh\n(.*?)```", README, re.S)
    targets = re.findall(r"^make (\w+)", commands.group(1), re.M)
    assert targets == ["train", "test"]
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{target}:", makefile, re.M) for target in targets)


def test_named_files_exist():
    pages = README + (ROOT / "docs" / "recipes.md").read_text()
    named = set(re.findall(r"(?:configs|colab|benchmarks|tests|docs)/[\w/.-]+\.\w+", pages))
    assert named
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing
    shipped = {f"configs/{path.name}" for path in (ROOT / "configs").glob("*.yaml")} - {"configs/smoke.yaml"}
    assert shipped <= named, "every recipe is in the table of recipes"
