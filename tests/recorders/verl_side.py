"""The recorder of verl around the functions of the installed package: `python -m tests.recorders.verl_side FOLDER`.

verl needs a cluster; its functions need torch alone. It is read from the folder `verl` of the environment, as its wheel
has a package `tests`, too: `pip install --no-deps --target ENV/verl verl`.
"""

import contextlib
import importlib.metadata
import pathlib
import sys
import types
from typing import Any

import torch

from tests.goldens.systems import release, verl
from tests.recorders import verl_replay
from tests.recorders.page import recorder
from tests.recorders.verl_replay import ROOT

ROWS, LENGTH = 8, 12
# The dump, the number of updates on one batch, and of the micro-batches of each.
RUNS = {"verl-defaults": (1, 1), "verl-second-update": (2, 1), "verl-accumulation": (2, 2)}


class PaddedBatch(dict[str, Any]):
    """Stands for a `TensorDict` of padded tensors."""

    def select(self, *names: str) -> "PaddedBatch":
        return PaddedBatch({name: self[name] for name in names})

    def to_padded_tensor(self) -> "PaddedBatch":
        return self


class UnreadMetric:
    """Stands for verl's metric, which nothing here reads."""

    def __init__(self, **_: Any) -> None:
        pass

    @classmethod
    def from_dict(cls, metrics: dict[str, Any], **_: Any) -> dict[str, Any]:
        """Returns the metrics."""
        return metrics


def load(queue: verl_replay.Queue) -> tuple[Any, Any]:
    """The module of the workers' loss, and the trainer, whose modules the recorder changes."""
    trainer = verl_replay.trainer_class(queue)
    for package in ("verl.workers.utils", "verl.utils.dataset"):
        release.bare(ROOT, package)
    release.stub("verl.utils.tensordict_utils")
    release.stub("verl.utils.dataset.dataset_utils", "DatasetPadMode")
    release.stub("verl.utils.metric", Metric=UnreadMetric, AggregationType=types.SimpleNamespace(SUM=0, MEAN=1))
    release.stub("verl.workers.config", "ActorConfig", "CriticConfig")
    release.stub("verl.workers.utils.padding", no_padding_2_padding=lambda values, data: values)
    losses = release.load("verl.workers.utils.losses")
    release.stub("verl.workers.engine_workers", ppo_loss=losses.ppo_loss)
    return losses, trainer


def update(path: pathlib.Path, updates: int, micro_batches: int) -> None:
    """Makes updates of the log-probs themselves by the loss of the workers."""
    losses, _ = load(verl_replay.Queue(verl_replay.Rows()))
    options = {"use_kl_loss": True, "kl_loss_coef": 0.05, "kl_loss_type": "low_var_kl", "entropy_coeff": 0.01}
    options |= {"loss_scale_factor": None, "loss_agg_mode": "token-mean", "policy_loss": verl.VerlConfig()}
    config = verl.VerlConfig(**{**verl.actor_defaults(ROOT), **options}, global_batch_info={})
    torch.manual_seed(0)
    log_probs = torch.nn.Parameter(-torch.rand(ROWS, LENGTH) * 3)
    mask = (torch.arange(LENGTH) < torch.randint(3, LENGTH + 1, (ROWS, 1))).float()
    batch = PaddedBatch(
        old_log_probs=log_probs.detach().clone(),
        ref_log_prob=log_probs.detach() - 0.3 * torch.rand(ROWS, LENGTH),
        response_mask=mask,
        advantages=torch.randn(ROWS, 1) * mask,
    )
    entropy, optimizer = torch.rand(ROWS, LENGTH), torch.optim.SGD([log_probs], lr=20.0)
    with recorder("verl", path):
        for _ in range(updates):
            optimizer.zero_grad()
            for rows in torch.arange(ROWS).chunk(micro_batches):
                counts = {"dp_size": 1, "batch_num_tokens": int(mask.sum()), "global_batch_size": ROWS}
                data = PaddedBatch({name: x[rows] for name, x in batch.items()} | counts)
                output = {"log_probs": log_probs[rows], "entropy": entropy[rows]}
                losses.ppo_loss(config, output, data)[0].backward()
            optimizer.step()


def advantages(folder: pathlib.Path) -> None:
    """Runs the trainer's method that computes the advantages; the recorder writes a file of its own."""
    stored = verl_replay.rollout()
    log_probs = [-torch.rand(len(row)) for row in stored["responses"].unbind()]
    stored["old_log_probs"], stored["rollout_log_probs"] = (verl_replay.nested(log_probs) for _ in range(2))
    _, trainer = load(queue := verl_replay.Queue(stored))
    with contextlib.chdir(folder), recorder("verl", folder / "unused.npz"):
        verl_replay.make_trainer(trainer)._compute_advantage(verl_replay.keys_of(stored), {})
        assert not queue.stored.keys() & {"advantages"}
    (folder / "dump-advantages.npz").rename(folder / "verl-advantages.npz")


def main() -> None:
    """Writes one dump a run."""
    (package,) = importlib.metadata.distributions(name="verl", path=[str(ROOT)])
    print(f"verl {package.version}, torch {torch.__version__}")
    for name, (updates, micro_batches) in RUNS.items():
        with release.isolated():
            update(pathlib.Path(sys.argv[1]) / f"{name}.npz", updates, micro_batches)
    with release.isolated():
        advantages(pathlib.Path(sys.argv[1]))


if __name__ == "__main__":
    main()
