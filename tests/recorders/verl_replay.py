"""verl's advantages of a batch that docs/replay.md records: `python -m tests.recorders.verl_replay FOLDER`.

The method of the trainer is read from the installed package; its queue, which needs a cluster, is a table here.
"""

import contextlib
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tests.goldens.parity.page import REPLAY, blocks
from tests.goldens.presets import batch as recordings
from tests.goldens.systems import release, verl

Tensors = Mapping[str, Any]


ROOT = pathlib.Path(sys.prefix) / "verl"


class Rows(dict[str, Any]):
    """Stands for a `TensorDict` of nested tensors."""

    def to_padded_tensor(self) -> "Rows":
        return Rows({name: x if name == "uid" else x.to_padded_tensor(0) for name, x in self.items()})


class Protocol:
    """Stands for verl's `DataProto`."""

    def __init__(self, batch: Rows, non_tensor_batch: Tensors | None = None) -> None:
        self.batch, self.non_tensor_batch = batch, dict(non_tensor_batch or {})

    def __len__(self) -> int:
        return len(self.batch["response_mask"])

    def select_idxs(self, rows: Sequence[int]) -> "Protocol":
        chosen = Rows({name: x[rows] for name, x in self.batch.items()})
        return Protocol(chosen, {name: x[rows] for name, x in self.non_tensor_batch.items()})


def nested(rows: Sequence[Any]) -> torch.Tensor:
    """One tensor of rows of their own lengths."""
    return torch.nested.as_nested_tensor([torch.as_tensor(row) for row in rows], layout=torch.jagged)


def rollout() -> Rows:
    """The batch of the preset recordings, with a token in its empty row, in the order of a balanced batch: another."""
    recorded, rows = recordings.load(), np.random.default_rng(0).permutation(recordings.ROWS).tolist()
    lengths = recorded.mask.sum(1).clip(min=1)
    return Rows(
        uid=np.array([f"prompt-{recorded.groups[row]}" for row in rows], object),
        prompts=nested([recorded.prompts[row][recorded.prompt_mask[row]] for row in rows]),
        responses=nested([recorded.completions[row, : lengths[row]] for row in rows]),
        response_mask=nested([np.ones(lengths[row], np.int64) for row in rows]),
        rm_scores=nested([[0.0] * (lengths[row] - 1) + [recorded.rewards[row]] for row in rows]),
    )


class Queue:
    """Stands for the queue that the workers share: one batch, and the columns that are written."""

    def __init__(self, stored: Rows) -> None:
        self.stored, self.written = stored, Rows()

    def kv_batch_get(self, *, keys: Sequence[str], partition_id: str, select_fields: Sequence[str]) -> Rows:
        """Returns the fields that the batch has."""
        stored = Rows({**self.stored, **self.written})
        return Rows({name: stored[name] for name in select_fields if name in stored})

    def kv_batch_put(self, *, keys: Sequence[str], partition_id: str, fields: Tensors) -> None:
        """Keeps the fields."""
        self.written.update(fields)


class Keys(list[str]):
    """The keys of a batch in the queue."""

    keys, partition_id = property(list), "train"


def trainer_class(queue: Queue) -> Any:
    """The trainer of the module that the recorder imports, with the method that it wraps and the functions of that."""
    core, _, _ = verl.load(ROOT)
    names = {"core_algos": core, "AdvantageEstimator": core.AdvantageEstimator, "torch": torch, "np": np}
    names |= {"tq": queue, "DataProto": Protocol, "TensorDict": lambda columns, batch_size: columns}
    for file, function in (
        ("verl/trainer/ppo/ray_trainer.py", "compute_advantage"),
        ("verl/trainer/ppo/v1/utils.py", "compute_advantage_for_multi_trajectories"),
        ("verl/workers/utils/padding.py", "response_to_nested"),
        ("verl/trainer/ppo/v1/trainer_base.py", "_compute_advantage"),
    ):
        names[function] = release.function_from(ROOT / file, function, names)
    trainer = type("PPOTrainer", (), {"_compute_advantage": names["_compute_advantage"]})
    release.bare(ROOT, "verl.trainer.ppo.v1")
    release.stub("verl.trainer.ppo.v1.trainer_base", tq=queue, PPOTrainer=trainer)
    return trainer


def make_trainer(trainer: Any) -> Any:
    """Makes a trainer of the class, with the configuration that its method reads."""
    made = trainer()
    algorithm = verl.VerlConfig(use_kl_in_reward=False, adv_estimator="grpo", gamma=1.0, lam=1.0)
    actor = verl.VerlConfig(rollout=verl.VerlConfig(n=recordings.SAMPLES))
    made.config = verl.VerlConfig(algorithm=algorithm, actor_rollout_ref=actor)
    return made


def keys_of(stored: Rows) -> Keys:
    """The keys of the rows of a batch."""
    return Keys(f"{uid}_{row}_0" for row, uid in enumerate(stored["uid"]))


def main() -> None:
    """Writes `replay-verl/recording.jsonl`, and the advantages of its rows."""
    folder, stored = pathlib.Path(sys.argv[1]) / "replay-verl", rollout()
    folder.mkdir()
    queue = Queue(stored)
    trainer = trainer_class(queue)
    with contextlib.chdir(folder):
        exec(blocks(REPLAY)["verl"], {})
        make_trainer(trainer)._compute_advantage(keys_of(stored), {})
    # All tokens of a row have one advantage.
    first = np.array([row[0].item() for row in queue.written["advantages"].unbind()])
    np.savez(folder / "advantages.npz", advantages=first[np.argsort(stored["uid"].astype(str), kind="stable")])


if __name__ == "__main__":
    main()
