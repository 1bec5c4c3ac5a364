"""Loads every folder beside this file and saves it again, for `generate.py --load`.

    python -m tests.goldens.models.save OUT

A folder with an adapter is saved twice, the second time as `NAME-merged`; that of Qwen 3 in several files.
"""

import sys
from pathlib import Path

import kljax
from train.models import Decoder
from train.models.sharding import make_mesh
from train.weights.huggingface import load_params, save_folder
from train.weights.huggingface.config import decoder_config
from train.weights.peft import load_adapter, read_peft_config


def main(out: Path) -> None:
    """Writes the folders below `out`."""
    mesh = make_mesh()
    for folder in sorted(path.parent for path in Path(__file__).parent.glob("*/expected.npz")):
        model = Decoder(decoder_config(folder))
        params = load_params(folder, model, mesh)
        size = 10**5 if folder.name == "qwen3" else 10**9
        save_folder(out / folder.name, model, kljax.Policy(params), source=folder, max_file_bytes=size)
        if (folder / "adapter").is_dir():
            adapted = Decoder(decoder_config(folder, lora=read_peft_config(folder / "adapter")))
            adapter = load_adapter(folder / "adapter", adapted, mesh)
            save_folder(out / f"{folder.name}-merged", adapted, kljax.Policy(params, adapter), source=folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
