"""Steps of TRL on the imported model, recorded as docs/replay.md says: `trl_update_side.py FOLDER MODEL`.

Needs torch, transformers, peft and trl; tests/real/trl_update.py runs it in their environment. The folder has
`options.json`, and gets `recording.jsonl`, the adapter after each update in `update-N/`, and `log.json`.
"""

import contextlib
import json
import os
import pathlib
import sys
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import datasets
import peft
import transformers
import trl

from tests.goldens.parity.page import REPLAY, blocks
from tests.recorders.trl_replay import WeightSaver
from tests.recorders.trl_side import unrecorded_afterwards


def share_of_vowels(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
    """Judges replies by something that differs between any two of them."""
    texts = [completion[-1]["content"] for completion in completions]
    return [sum(letter in "aeiou" for letter in text) / max(len(text), 1) for text in texts]


def make_trainer(model: str, problems: list[str], lora: dict[str, Any], **options: Any) -> trl.GRPOTrainer:
    """Makes a trainer of an adapter on a folder; the reference is the base."""
    quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1}
    exact = {"use_cpu": True, "bf16": False, "model_init_kwargs": {"dtype": "float32"}}
    return trl.GRPOTrainer(
        model=model,
        reward_funcs=share_of_vowels,
        args=trl.GRPOConfig(lr_scheduler_type="constant", shuffle_dataset=False, **quiet, **exact, **options),
        train_dataset=datasets.Dataset.from_dict({"prompt": [[{"role": "user", "content": x}] for x in problems]}),
        processing_class=transformers.AutoTokenizer.from_pretrained(model),
        peft_config=peft.LoraConfig(task_type="CAUSAL_LM", **lora),
    )


def main() -> None:
    """Records a run."""
    folder, model = pathlib.Path(sys.argv[1]).absolute(), sys.argv[2]
    options = json.loads((folder / "options.json").read_text())
    transformers.set_seed(0)
    with contextlib.chdir(folder), unrecorded_afterwards():
        exec(blocks(REPLAY)["TRL"], {})
        trainer = make_trainer(model, output_dir=str(folder), **options)
        trainer.model.save_pretrained(folder / "update-0")
        trainer.add_callback(WeightSaver(folder))
        trainer.train()
    (folder / "log.json").write_text(json.dumps([log for log in trainer.state.log_history if "loss" in log]))
    print(f"trl {trl.__version__}, transformers {transformers.__version__}, peft {peft.__version__}", file=sys.stderr)


if __name__ == "__main__":
    main()
