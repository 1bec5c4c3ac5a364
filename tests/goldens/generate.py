"""Re-runs the PyTorch systems that PyPI ships and records, or checks, what they compute and their defaults.

    python tests/goldens/generate.py            writes generated.json, generated.npz and defaults.json
    python tests/goldens/generate.py --check    runs every recorded case again, reads every default again, and compares

Needs Python 3.11 and pip, nothing else. A scratch environment gets PyTorch on CPU and NumPy, and the releases are
unpacked beside it without their dependencies, which are replaced by stubs when the functions are loaded. It is made in
a temporary directory and removed, unless `--environment` names one to keep. Where PyPI has PyTorch with CUDA only,
`--torch-index https://download.pytorch.org/whl/cpu` takes the smaller build; the numbers are the same.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
TORCH, LIBRARIES = "torch==2.13.0", ("numpy==2.4.6", "pyyaml==6.0.3")
# The order of the systems in generated.json.
RELEASES = {
    "trinity": "trinity-rft==0.6.0",
    "verl": "verl==0.9.1",
    "skyrl": "skyrl==0.3.0",
    "openrlhf": "openrlhf==0.11.2",
    "trl": "trl==1.16.0",
    "art": "openpipe-art==0.5.18",
}
# The shared cases that no release on PyPI can repeat, with why.
NOT_ON_PYPI = {
    "slime": "slime is not on PyPI; its cases are of commit 624b824",
    "prime-rl": "prime-rl's trainer is not on PyPI; its cases are of commit 559b447",
}
# The commits of these systems whose defaults are recorded; `--checkouts` reads them.
COMMITS = {"slime": "624b824", "prime-rl": "559b447"}
# Shared cases of a commit that are repeated with the release that PyPI has.
OTHER_VERSION = {
    "skyrl": "recorded from commit a956457, repeated with 0.3.0",
    "openrlhf": "recorded from commit 3c3be62, repeated with 0.11.2",
}


def pip(python: pathlib.Path, *arguments: str) -> None:
    """Runs `pip install` of an interpreter."""
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments], check=True)


def make_environment(directory: pathlib.Path, torch_index: str | None) -> pathlib.Path:
    """Makes what is missing in the directory; returns the interpreter that has PyTorch."""
    python = directory / "venv" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", directory / "venv"], check=True)
    pip(python, *(("--index-url", torch_index) if torch_index else ()), TORCH)
    pip(python, *LIBRARIES)
    for system, requirement in RELEASES.items():
        target = directory / "releases" / system
        if not target.exists():
            # Only read as Python source: the platform of the wheel does not matter.
            platform = ("--platform", "manylinux1_x86_64", "--python-version", "3.11", "--only-binary", ":all:")
            pip(python, "--no-deps", *platform, "--target", str(target), requirement)
    return python


def main() -> int:
    """Makes the environment, then runs the part that needs PyTorch in it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare instead of writing; exit 1 if anything differs")
    parser.add_argument("--environment", type=pathlib.Path, help="directory to make, keep and use again")
    parser.add_argument("--torch-index", help="package index for PyTorch in place of PyPI")
    parser.add_argument(
        "--checkouts", type=pathlib.Path, help="directory with git checkouts slime and prime-rl, to read their defaults"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        directory = (options.environment or pathlib.Path(scratch)).resolve()
        python = make_environment(directory, options.torch_index)
        command = [str(python), "-m", "tests.goldens.systems", str(directory / "releases")]
        command += ["--check"] if options.check else []
        command += ["--checkouts", str(options.checkouts.resolve())] if options.checkouts else []
        return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
