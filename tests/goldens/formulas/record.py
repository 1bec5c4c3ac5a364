"""Records functions that no release on PyPI can be called for, in PyTorch, from their published formulas.

    python -m tests.goldens.formulas.record            writes formulas.npz, where PyTorch 2.13.0 is
    python -m tests.goldens.formulas.record --check    computes everything again and compares

Everything is float64, row by row and token by token, as the formulas are written. `python -m` needs nothing of kljax.
"""

import argparse
import math
import pathlib
import sys
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

FILE = pathlib.Path(__file__).resolve().parent / "formulas.npz"
ROWS, LENGTH, TURNS, STEPS = 6, 9, 4, 7
Arrays = Mapping[str, Tensor]


def draw() -> dict[str, np.ndarray]:
    """Draws the arrays of all cases: two groups of three rows, of which one has holes and one a single token."""
    drawn = np.random.default_rng(2026)
    old = drawn.uniform(-3, -0.2, (ROWS, LENGTH))
    mask = np.arange(LENGTH)[None] < np.array([[9], [7], [8], [5], [1], [9]])
    mask[0, [2, 6]] = False
    rewards = np.array([1.0, 0.25, -0.5, 2.0, 0.5, 0.0])
    turn_ids = np.sort(drawn.integers(0, TURNS, (ROWS, LENGTH)), axis=1)
    return {
        "log_probs": old + 0.3 * drawn.normal(size=old.shape),
        "old_log_probs": old,
        "ref_log_probs": old + 0.4 * drawn.normal(size=old.shape),
        "token_advantages": drawn.normal(size=old.shape),
        "row_advantages": (rewards.reshape(2, 3) - rewards.reshape(2, 3).mean(1, keepdims=True)).ravel(),
        "weights": drawn.uniform(0.2, 1.5, old.shape),
        "mask": mask,
        "rewards": rewards,
        "group_ids": np.array([0, 0, 0, 1, 1, 1]),
        "turn_ids": turn_ids,
        "turn_scores": drawn.uniform(0, 1, (ROWS, TURNS)),
        "scored": drawn.uniform(size=(ROWS, TURNS)) < 0.7,
        "versions": drawn.integers(3, 8, (ROWS, LENGTH)),
        "parameters": drawn.normal(size=(STEPS, 5)),
        "entropies": np.array([0.3, 0.2, 0.1, 0.25, 0.15, 0.05, 0.4]),
    }


def row_sums(values: Tensor, mask: Tensor) -> Tensor:
    """The sum of each row over its tokens."""
    return torch.where(mask, values, torch.zeros_like(values)).sum(-1)


def m2po(arrays: Arrays) -> dict[str, Tensor]:
    """The largest squared log-ratio leaves, one after the other, until the mean of the rest fits; over all tokens."""
    log_ratio, advantages, mask = (
        (arrays["log_probs"] - arrays["old_log_probs"]),
        arrays["token_advantages"],
        arrays["mask"],
    )
    remaining, square = mask.clone(), log_ratio.detach() ** 2
    candidates = [
        (i, t)
        for i, t in np.ndindex(ROWS, LENGTH)
        if mask[i, t] and float(log_ratio[i, t].detach()) * float(advantages[i, t]) > 0
    ]
    while candidates and sum(float(square[at]) for at in candidates) / len(candidates) > 0.04:
        largest = max(candidates, key=lambda at: float(square[at]))
        candidates.remove(largest)
        remaining[largest] = False
    loss = torch.where(remaining, -advantages * log_ratio.exp(), torch.zeros_like(advantages)).sum() / mask.sum()
    return {"value": loss, "kept": remaining}


def gvpo(arrays: Arrays) -> dict[str, Tensor]:
    """verl-recipe: half the squared differences to the means of a group over n - 1, and the mean over the groups."""
    implicit = 0.1 * row_sums(arrays["log_probs"] - arrays["old_log_probs"], arrays["mask"])
    total = torch.zeros((), dtype=torch.float64)
    for group in range(2):
        rows = arrays["group_ids"] == group
        implied, rewards = implicit[rows], arrays["rewards"][rows]
        error = (implied - implied.mean()) - (rewards - rewards.mean())
        total = total + (error**2).sum() / 2 / (len(rewards) - 1)
    return {"value": total / 2}


def flowrl(arrays: Arrays) -> dict[str, Tensor]:
    """verl-recipe, with `log Z` of each row given: here the first score of its prompt's turns."""
    mask, counts = arrays["mask"], arrays["mask"].sum(-1)
    weight = row_sums(arrays["log_probs"] - arrays["old_log_probs"], mask).exp().clamp(max=1.5).detach()
    mean = row_sums(arrays["log_probs"], mask) / counts
    reference = row_sums(arrays["ref_log_probs"], mask) / counts
    balance = arrays["turn_scores"][:, 0] + mean - 2.0 * arrays["row_advantages"] - reference
    return {"value": (weight * balance**2).mean()}


def topd(arrays: Arrays) -> dict[str, Tensor]:
    """The reward of a token, the mean of the later ones, and z over all tokens of a prompt."""
    mask, returns = arrays["mask"], torch.zeros(ROWS, LENGTH, dtype=torch.float64)
    rho = (arrays["ref_log_probs"] - arrays["old_log_probs"]).exp()
    rewards = (0.3 * rho + 0.7).log()
    for row in range(ROWS):
        at = [t for t in range(LENGTH) if mask[row, t]]
        for number, t in enumerate(at):
            later = [rewards[row, u] for u in at[number + 1 :]]
            returns[row, t] = rewards[row, t] + (sum(later) / len(later) if later else 0)
    result = torch.zeros_like(returns)
    for group in range(2):
        members = mask & (arrays["group_ids"] == group)[:, None]
        values = returns[members]
        result[members] = (values - values.mean()) / max(float(values.std()), 1e-6)
    return {"value": result}


def turn_credit(arrays: Arrays) -> dict[str, Tensor]:
    """prime-rl: progress of the scored turns, shared backward by gamma^distance, without a sum over a row."""
    mask, coef, gamma = arrays["mask"], 0.8, 0.6
    progress, credit = torch.zeros(ROWS, TURNS, dtype=torch.float64), torch.zeros(ROWS, TURNS, dtype=torch.float64)
    for row in range(ROWS):
        before = None
        for turn in range(TURNS):
            if arrays["scored"][row, turn]:
                score = arrays["turn_scores"][row, turn]
                progress[row, turn] = 0 if before is None else score - before
                before = score
            shares = [gamma ** (turn - earlier) for earlier in range(turn + 1)]
            for earlier, share in enumerate(shares):
                credit[row, earlier] += progress[row, turn] * share / sum(shares)
    totals = arrays["rewards"] + progress.sum(-1)
    result = torch.zeros(ROWS, LENGTH, dtype=torch.float64)
    for row in range(ROWS):
        at = mask[row]
        of_tokens = credit[row][arrays["turn_ids"][row][at]]
        level = totals[row] - totals[arrays["group_ids"] == arrays["group_ids"][row]].mean()
        result[row, at] = level + coef * (of_tokens - of_tokens.mean())
    return {"value": result}


def advantage_balance(arrays: Arrays) -> dict[str, Tensor]:
    """ART's packing: weights over their mean, one sign smaller, then over the mean of |A| w."""
    mask, results = arrays["mask"], {}
    weights = arrays["weights"][mask] / arrays["weights"][mask].mean()
    for name, balance in (("positive", 0.4), ("zero", 0.0), ("negative", -0.4)):
        advantages = arrays["token_advantages"][mask].clone()
        if balance > 0:
            advantages = torch.where(advantages > 0, advantages, advantages * (1 - balance))
        elif balance < 0:
            advantages = torch.where(advantages < 0, advantages, advantages * (1 + balance))
        result = torch.zeros(ROWS, LENGTH, dtype=torch.float64)
        result[mask] = advantages / (advantages.abs() * weights).mean()
        results[name] = result
    return results


def loglinear(arrays: Arrays) -> dict[str, Tensor]:
    """AReaL: between the sampler and the policy, by the version of each token; the policy is at version 8."""
    result = torch.zeros(ROWS, LENGTH, dtype=torch.float64)
    for i, t in np.ndindex(ROWS, LENGTH):
        if arrays["mask"][i, t]:
            version = int(arrays["versions"][i, t])
            share = (8 - 1 - version) / (8 - version)
            sampler = arrays["old_log_probs"][i, t]
            result[i, t] = sampler + share * (arrays["log_probs"][i, t].detach() - sampler)
    return {"value": result}


def bema(arrays: Arrays) -> dict[str, Tensor]:
    """TRL's callback: `alpha_t (theta_t - theta_0) + EMA_t`, theta_0 the first of the parameters."""
    initial, average = arrays["parameters"][0], arrays["parameters"][0].clone()
    references = []
    for step in range(1, STEPS):
        age = 10 + 1.0 * step
        beta = max(age**-0.5, 0.25)
        average = (1 - beta) * average + beta * arrays["parameters"][step]
        references.append(age**-0.2 * (arrays["parameters"][step] - initial) + average)
    return {"value": torch.stack(references), "average": average}


def adaptive_entropy(arrays: Arrays) -> dict[str, Tensor]:
    """TRL's trainer: the coefficient of each step, from the entropies of the steps before it."""
    coef, last, applied = 0.01, math.inf, []
    for entropy in arrays["entropies"].tolist():
        applied.append(coef if last <= 0.2 else 0.0)
        coef = min(coef + 0.004, 0.016) if entropy <= 0.2 else max(coef - 0.004, 0.002)
        last = entropy
    return {"value": torch.tensor(applied, dtype=torch.float64)}


FORMULAS: Mapping[str, Callable[[Arrays], dict[str, Tensor]]] = {
    function.__name__: function
    for function in (
        m2po,
        gvpo,
        flowrl,
        topd,
        turn_credit,
        advantage_balance,
        loglinear,
        bema,
        adaptive_entropy,
    )
}


def compute() -> dict[str, np.ndarray]:
    """Computes all cases: the arrays, the values, and the gradient of each scalar with respect to `log_probs`."""
    drawn = draw()
    recorded = {f"in/{name}": array for name, array in drawn.items()}
    for name, formula in FORMULAS.items():
        arrays = {key: torch.from_numpy(array.copy()) for key, array in drawn.items()}
        arrays["log_probs"].requires_grad_()
        outputs = formula(arrays)
        recorded |= {f"{name}/{key}": value.detach().numpy() for key, value in outputs.items()}
        if "value" in outputs and outputs["value"].requires_grad:
            outputs["value"].backward()
            recorded[f"{name}/grad"] = arrays["log_probs"].grad.numpy()
    return recorded


def main() -> int:
    """Writes the file, or compares it; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare instead of writing; exit 1 if anything differs")
    torch.set_num_threads(1)
    computed = compute()
    if not parser.parse_args().check:
        np.savez_compressed(FILE, **computed)
        print(f"{len(computed)} arrays, {FILE.stat().st_size / 1e3:.0f} kB")
        return 0
    recorded = np.load(FILE)
    differing = [
        name
        for name in sorted({*computed, *recorded.files})
        if name not in computed or name not in recorded or not np.allclose(computed[name], recorded[name], 1e-12, 1e-12)
    ]
    print("\n".join(f"differs: {name}" for name in differing) or f"all {len(computed)} arrays agree")
    return int(bool(differing))


if __name__ == "__main__":
    sys.exit(main())
