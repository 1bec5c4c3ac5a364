"""The KL estimators on a trained SmolLM2-135M-Instruct: both anchors at lags of 0, 1, 4 and 16 updates.

    python -m train.real steps=20 checkpoint.every=1 checkpoint.keep=20     # a run that keeps every step
    python -m tests.real.anchors runs/real --out audit/real         # writes anchors.txt and anchors.json

The policy of the last step replies to held-out problems. At every position of these replies each estimator is compared
with the exact KL over the 49,152 tokens, of logits divided by the temperature, as replies are drawn.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kljax
from tests.real.replies import draw_replies
from train.config.errors import UserError
from train.models.head import make_logits
from train.process.console import run_command
from train.rl.policy import ScoredPolicy, Sequences, hidden_states
from train.run.saved_run import SavedRun
from train.run.setup import make_context
from train.sequences.batch import move_columns

LAGS = (0, 1, 4, 16)
PROMPTS = 16


def reply_logits(scored: ScoredPolicy, sequences: Sequences, longest: int, temperature: float) -> jax.Array:
    """Computes the logits `[N, C, V]` of the tokens of replies, divided by the temperature."""
    hidden = move_columns(hidden_states(scored, sequences), prompt_lengths_of(sequences) - 1, longest)
    logits = jax.vmap(make_logits(scored.model, scored.policy.params), (0, None))(hidden, jnp.float32)
    return logits / temperature


def prompt_lengths_of(sequences: Sequences) -> jax.Array:
    """Counts the tokens before each reply."""
    assert sequences.completion_mask is not None
    return jnp.sum(sequences.token_mask & ~sequences.completion_mask, axis=1)


def audit(run: Path, step: int | None, lags: Sequence[int]) -> kljax.audit.AnchorAudit:
    """Audits the estimators on replies of a step of a run.

    Raises:
      UserError: the run has not kept a step.
    """
    saved = SavedRun.at(run)
    last = saved.step(step)
    context = make_context(saved.config)
    temperature = saved.config.temperature
    with jax.set_mesh(context.mesh):
        policies = {lag: saved.policy(context.model, context.mesh, saved.step(last - lag)) for lag in lags}
        sequences, longest = draw_replies(context, policies[0], PROMPTS), saved.config.data.completion_length()
        compute = jax.jit(
            lambda policy: reply_logits(ScoredPolicy(context.model, policy), sequences, longest, temperature)
        )
        logits = {lag: np.asarray(compute(policy)) for lag, policy in policies.items()}
        reference = np.asarray(compute(kljax.Policy(policies[0].params)))
        replies = np.asarray(move_columns(sequences.completion_mask, prompt_lengths_of(sequences), longest))
    return kljax.audit.audit_anchors(logits[0], reference, logits, replies, bootstrap=0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; the exit code is 0, or 2 for an error that the user can fix."""
    command = argparse.ArgumentParser(prog="python -m tests.real.anchors", description=str(__doc__).partition("\n")[0])
    command.add_argument("run", metavar="RUN", type=Path, help="directory of a run of configs/real.yaml")
    command.add_argument("--step", metavar="N", type=int, help="step of the policy; the last one saved if left out")
    command.add_argument("--lags", metavar="LAG", type=int, nargs="+", default=LAGS, help="lags of the sampler")
    command.add_argument("--out", metavar="DIR", type=Path, default=Path("audit/real"), help="folder for the report")
    options = command.parse_args(arguments)

    def run() -> None:
        if 0 not in options.lags:
            raise UserError(f"--lags: got {options.lags}, expected 0 among them, the policy itself")
        measured: Any = audit(options.run, options.step, sorted(options.lags))
        measured.write(options.out)
        print(measured.table())

    return run_command(run)


if __name__ == "__main__":
    raise SystemExit(main())
