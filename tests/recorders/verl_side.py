"""The recorder of verl around the functions of the installed package: `python -m tests.recorders.verl_side FOLDER`.

verl needs a cluster; its functions need torch alone. It is read from the folder `verl` of the environment, as its wheel
has a package `tests`, too: `pip install --no-deps --target ENV/verl verl`.
"""

import importlib.metadata
import pathlib
import sys

import torch

from tests.goldens.systems import verl
from tests.recorders.page import recorder

ROOT = pathlib.Path(sys.prefix) / "verl"
ROWS, LENGTH, COEF = 8, 12, 0.05
# The dump and its number of updates on one batch.
RUNS = {"verl-defaults": 1, "verl-second-update": 2}
HEADER = {"loss": {"name": "vanilla"}}


def run(path: pathlib.Path, updates: int) -> None:
    """Makes updates of the log-probs themselves, as `workers/utils/losses.py` composes the loss."""
    core, _, _ = verl.load(ROOT)
    config = verl.VerlConfig(**verl.actor_defaults(ROOT), global_batch_info={})
    torch.manual_seed(0)
    log_prob = torch.nn.Parameter(-torch.rand(ROWS, LENGTH) * 3)
    old, reference = log_prob.detach().clone(), log_prob.detach() - 0.3 * torch.rand(ROWS, LENGTH)
    mask = (torch.arange(LENGTH) < torch.randint(3, LENGTH + 1, (ROWS, 1))).float()
    advantages = torch.randn(ROWS, 1) * mask
    optimizer = torch.optim.SGD([log_prob], lr=20.0)
    with recorder("verl", path, **HEADER):
        for _ in range(updates):
            optimizer.zero_grad()
            policy, _ = core.get_policy_loss_fn("vanilla")(
                old_log_prob=old,
                log_prob=log_prob,
                advantages=advantages,
                response_mask=mask,
                loss_agg_mode="token-mean",
                config=config,
                rollout_is_weights=None,
            )
            penalty = core.kl_penalty(logprob=log_prob, ref_logprob=reference, kl_penalty="low_var_kl")
            (policy + COEF * core.agg_loss(penalty, mask, "token-mean")).backward()
            optimizer.step()


def main() -> None:
    """Writes one dump a run."""
    (package,) = importlib.metadata.distributions(name="verl", path=[str(ROOT)])
    print(f"verl {package.version}, torch {torch.__version__}")
    for name, updates in RUNS.items():
        run(pathlib.Path(sys.argv[1]) / f"{name}.npz", updates)


if __name__ == "__main__":
    main()
