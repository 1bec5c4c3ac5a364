"""The command that downloads a missing model folder, for the end of an error."""

import os
import re
import sys
from pathlib import Path

from train.config.installation import RECIPES, as_installed, shell_command

DOWNLOAD = re.compile(r"hf download (\S+) --local-dir (\S+)")
FETCH = re.compile(r"path: (\S+) # python -m (train\.\w+) --fetch")
OFFLINE = as_installed("configs/word_problems.yaml")
"""A recipe of text that starts from no folder."""
HUB_NAME = re.compile(r"(?!.*(--|\.\.|\.git$))\b[\w.-]{1,96}\b/\b[\w.-]{1,96}\b", re.ASCII)
"""The names that `huggingface_hub` takes."""


def download_hint(folder: Path) -> str:
    """Returns the end of an error: the command that downloads the folder, or nothing for a path of no known model."""
    for recipe in sorted(RECIPES.glob("*.yaml")):
        # A recipe of a pretrained model names the command for its path in a comment.
        text = recipe.read_text(encoding="utf-8")
        for path, module in FETCH.findall(text):
            if Path(path) == folder:
                return f"; fetch it: {shell_command(module)} --fetch"
        for name, path in DOWNLOAD.findall(text):
            if Path(path) == folder:
                return f"; download it: {hub_program()} download {name} --local-dir {path}"
    if not HUB_NAME.fullmatch(str(folder)) or folder.parent.is_dir() or folder.parts[0] == "checkpoints":
        return ""
    path = Path("checkpoints") / folder.name
    return (
        f"; download it: {hub_program()} download {folder} --local-dir {path}, and set the field to {path} "
        "(or set model.revision to the full hash of a commit)"
    )


def hub_program() -> str:
    """Returns the program `hf`: the one of this environment, which a shell may not find, where it is there."""
    program = Path(sys.executable).with_name("hf")
    return os.path.relpath(program) if program.exists() else "hf"
