"""Runs a notebook from top to bottom in this process, as Jupyter would: `python -m tests.integration.notebooks PATH`.

It prints the output of each cell as JSON. With `--write` it stores the output in the notebook, pictures included.
"""

import argparse
import base64
import contextlib
import io
import json
import os
import pathlib
import re
from typing import Any

NUMBER = re.compile(r"-?\d+(?:\.(\d+))?")


def run(notebook: dict[str, Any]) -> list[tuple[str, list[bytes]]]:
    """Executes the code cells in one namespace; returns the printed text and the pictures of each."""
    # Here, as every test process imports this file, and only a process of its own runs notebooks.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot  # after the backend is chosen

    namespace: dict[str, Any] = {"__name__": "__main__"}
    outputs = []
    for cell in code_cells(notebook):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile("".join(cell["source"]), f"cell {cell['id']}", "exec"), namespace)
        pictures = []
        for number in pyplot.get_fignums():
            pyplot.figure(number).savefig(picture := io.BytesIO(), dpi=72)
            pictures.append(picture.getvalue())
        pyplot.close("all")
        outputs.append((printed.getvalue(), pictures))
    return outputs


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """Lists the cells with code."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def stored_text(cell: dict[str, Any]) -> str:
    """Returns the printed text that is stored with a cell."""
    return "".join(line for output in cell["outputs"] if output["output_type"] == "stream" for line in output["text"])


def agrees(printed: str, stored: str) -> bool:
    """Compares two outputs: the words exactly, each number to a unit of its last digit, which rounding can turn."""
    if NUMBER.sub("#", printed) != NUMBER.sub("#", stored):
        return False
    pairs = zip(NUMBER.finditer(printed), NUMBER.finditer(stored), strict=True)
    return all(abs(float(new[0]) - float(old[0])) < 1.5 * 10.0 ** -len(old[1] or "") for new, old in pairs)


def store(notebook: dict[str, Any], outputs: list[tuple[str, list[bytes]]]) -> str:
    """Returns the file with these outputs in its cells."""
    for number, (cell, (text, pictures)) in enumerate(zip(code_cells(notebook), outputs, strict=True), start=1):
        cell["execution_count"] = number
        lines = text.splitlines(keepends=True)
        cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}] if text else []
        for picture in pictures:
            data = {"image/png": base64.b64encode(picture).decode(), "text/plain": ["<Figure>"]}
            cell["outputs"].append({"data": data, "metadata": {}, "output_type": "display_data"})
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=str(__doc__))
    parser.add_argument("path", type=pathlib.Path)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    path = options.path.resolve()
    notebook = json.loads(path.read_text(encoding="utf-8"))
    os.chdir(path.parent)
    outputs = run(notebook)
    if options.write:
        path.write_text(store(notebook, outputs), encoding="utf-8")
    print(json.dumps([{"text": text, "pictures": len(pictures)} for text, pictures in outputs]))


if __name__ == "__main__":
    main()
