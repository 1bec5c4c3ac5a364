"""Records the dumps of the parity tests with the systems' own PyTorch functions.

    python tests/goldens/parity/record.py --environment DIR    writes dumps.json and dumps.npz

It needs what `tests/goldens/generate.py` needs, and uses the same environment: PyTorch 2.13.0 on CPU and the releases.
"""

import argparse
import json
import pathlib
import subprocess
import sys

DIRECTORY = pathlib.Path(__file__).resolve().parent
ROOT = DIRECTORY.parents[2]


def main() -> int:
    """Makes the environment, then runs the part that needs PyTorch in it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environment", type=pathlib.Path, required=True, help="directory to make, keep and use again")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    directory = options.environment.resolve()
    if options.inside:
        return write(directory / "releases")
    from tests.goldens import generate

    python = generate.make_environment(directory, None)
    command = [str(python), "-m", "tests.goldens.parity.record", "--environment", str(directory), "--inside"]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def write(releases: pathlib.Path) -> int:
    """Records every dump; arrays equal to those of the clean dump of the system are stored once."""
    import numpy as np
    import torch

    from tests.goldens.parity import dumps

    torch.set_num_threads(1)
    index, arrays = dumps.record(releases)
    lines = ",\n".join(json.dumps(entry) for entry in index)
    (DIRECTORY / "dumps.json").write_text(f'{{"dumps": [\n{lines}\n]}}\n')
    np.savez_compressed(DIRECTORY / "dumps.npz", **arrays)  # type: ignore[arg-type]
    size = (DIRECTORY / "dumps.npz").stat().st_size
    print(f"{len(index)} dumps, {len(arrays)} arrays, {size / 1e6:.2f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
