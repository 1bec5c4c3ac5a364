"""One update as verl's worker composes it from verl's own functions, with switches that plant faults."""

import dataclasses
import pathlib
import types
from typing import Any
from unittest import mock

import numpy as np
import torch

from tests.goldens.parity import batch
from tests.goldens.systems import verl

CLIPS = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 3.0}


@dataclasses.dataclass(frozen=True)
class Scoring:
    """How log-probs are computed from logits."""

    temperature: float = 0.8
    softcap: float | None = 6.0
    logit_scale: float = 0.5
    vocabulary: int = batch.VOCABULARY
    top_p: float | None = None
    shift: int = 0
    dtype: torch.dtype = torch.float32


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of an update; the defaults are those that the header of a dump declares."""

    policy: Scoring = Scoring()
    reference: Scoring = Scoring()
    policy_hidden: str = "hidden"
    reference_hidden: str = "ref_hidden"
    recorded_mask: str = "completion"
    used_mask: str = "completion"
    old: str = "old"
    old_shift: int = 0
    ratio_sign: int = 1
    weights_level: str = "token"
    weights_cap: float = 2.0
    weights_sign: int = 1
    weights_power: int = 1
    kl: str = "low_var_kl"
    kl_sign: int = 1
    kl_shift: int = 0
    kl_of: str = "policy"
    kl_to: str = "ref"
    kl_coef: float = 0.05
    kl_attached: bool = True
    ddof: int = 1
    eps: float = 1e-6
    scaled: bool = True
    advantage_sign: int = 1
    interleaved: bool = False
    clips: tuple[tuple[str, float], ...] = ()
    mode: str = "token-mean"
    micro_batches: int = 1
    grad_scale: float = 1.0
    dtype: torch.dtype = torch.float32


def header(settings: Settings) -> dict[str, Any]:
    """The header of a dump of an update without faults, whose reduction may vary."""
    scoring = settings.policy
    return {
        "system": "verl",
        "release": "0.9.1",
        "dtype": "float32",
        "log_probs": {
            "temperature": scoring.temperature,
            "softcap": scoring.softcap,
            "logit_scale": scoring.logit_scale,
            "vocab_size": scoring.vocabulary,
        },
        "loss": {"name": "vanilla", "clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0},
        "reduction": {"name": settings.mode},
        "kl": {"name": "low_var_kl", "coef": settings.kl_coef},
        "advantage": {"name": "grpo"},
        "correction": {"name": "rollout_is=token", "upper": 2.0},
    }


def score(functional: types.ModuleType, hidden: torch.Tensor, arrays: dict[str, Any], scoring: Scoring) -> torch.Tensor:
    """Log-probs `[B, T]`, position t of token t, as a worker makes them of the logits; position 0 holds 0."""
    logits = (hidden @ torch.from_numpy(arrays["head"])).to(scoring.dtype).float() * scoring.logit_scale
    if scoring.softcap is not None:
        logits = scoring.softcap * torch.tanh(logits / scoring.softcap)
    logits = logits[..., : scoring.vocabulary] / scoring.temperature
    if scoring.top_p is not None:
        logits = nucleus(logits, torch.from_numpy(arrays["tokens"]), scoring.top_p)
    predicting = torch.roll(logits, 1 - scoring.shift, 1)
    log_probs = functional.logprobs_from_logits_naive(predicting, torch.from_numpy(arrays["tokens"]))
    log_probs[:, 0] = 0
    return log_probs


def nucleus(logits: torch.Tensor, tokens: torch.Tensor, top_p: float) -> torch.Tensor:
    """Removes the tokens outside the top-p set of the position that predicts them, but never the sampled one."""
    ordered, order = logits.sort(-1, descending=True)
    probs = ordered.softmax(-1)
    keep = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, probs.cumsum(-1) - probs < top_p)
    keep.scatter_(-1, torch.roll(tokens, -1, 1)[..., None], True)
    return logits.masked_fill(~keep, -torch.inf)


def mask_of(which: str, arrays: dict[str, Any]) -> torch.Tensor:
    """A mask by name."""
    mask = batch.completion_mask(arrays)
    position, last = np.arange(batch.LENGTH), arrays["lengths"][:, None] - 1
    masks = {
        "completion": mask,
        "right": np.pad(mask, ((0, 0), (1, 0)))[:, :-1],
        "left": np.pad(mask, ((0, 0), (0, 1)))[:, 1:],
        "prompt": mask | ((position < arrays["prompt_lengths"][:, None]) & (position > 0)),
        "pad": mask | (position > last),
        "no_eos": mask & (position != last),
    }
    return torch.from_numpy(masks[which].astype(np.float32))


def moved(tensor: torch.Tensor, by: int) -> torch.Tensor:
    """A row moved to the right, filled with zeros."""
    result = torch.roll(tensor, by, 1)
    if by > 0:
        result[:, :by] = 0
    elif by < 0:
        result[:, by:] = 0
    return result


def advantages_of(core: types.ModuleType, arrays: dict[str, Any], mask: torch.Tensor, s: Settings) -> torch.Tensor:
    """GRPO's advantages by verl; without Bessel's correction by torch, since verl has no option for it."""
    rewards = torch.from_numpy(arrays["rewards"])
    ids = arrays["group_ids"]
    if s.interleaved:
        ids = np.arange(batch.ROWS) % batch.GROUPS
    if s.ddof == 1:
        rewards_per_token = torch.zeros_like(mask)
        rewards_per_token[:, -1] = rewards
        result, _ = core.compute_grpo_outcome_advantage(
            rewards_per_token, torch.ones_like(mask), ids, epsilon=s.eps, norm_adv_by_std_in_grpo=s.scaled
        )
        return s.advantage_sign * result
    result = torch.zeros_like(rewards)
    for group in np.unique(ids):
        rows = torch.from_numpy(ids == group)
        members = rewards[rows]
        result[rows] = (members - members.mean()) / (members.std(correction=0) + s.eps)
    return s.advantage_sign * result[:, None].expand_as(mask).clone()


def update(modules: tuple[types.ModuleType, ...], arrays: dict[str, Any], s: Settings) -> dict[str, np.ndarray]:
    """Runs the update; returns every field of the dump."""
    core, corr, functional = modules
    recorded, used = mask_of(s.recorded_mask, arrays), mask_of(s.used_mask, arrays)
    if s.recorded_mask != "completion":
        used = recorded
    lp = {name: torch.from_numpy(arrays[f"{name}_hidden"]) for name in ("old", "rollout")}
    lp = {name: score(functional, hidden, arrays, Scoring()) for name, hidden in lp.items()}
    lp["ref"] = score(functional, torch.from_numpy(arrays[s.reference_hidden]), arrays, s.reference)
    lp["policy"] = score(functional, torch.from_numpy(arrays[s.policy_hidden]), arrays, s.policy)
    lp["policy"] = lp["policy"].detach().requires_grad_()
    advantages = advantages_of(core, arrays, used, s)
    config = verl.VerlConfig(rollout_is_threshold=s.weights_cap)
    weights, _ = corr.compute_rollout_correction_weights(
        s.weights_sign * (lp["old"] - lp["rollout"]),
        used,
        rollout_is=s.weights_level,
        rollout_is_threshold=config.rollout_is_threshold,
    )
    per_row = {"advantages": advantages, "used": used, "weights": weights}
    losses, total = [], torch.zeros(())
    per_token: dict[str, torch.Tensor] = {}
    for rows in torch.arange(batch.ROWS).chunk(s.micro_batches):
        part, fields = _micro_batch(core, s, lp | per_row, rows)
        losses.append(fields)
        total = total + part / s.micro_batches
    per_token = {name: torch.cat([fields[name] for fields in losses]) for name in losses[0]}
    (total * s.grad_scale).backward()
    fields = {
        "mask": recorded,
        "log_probs": lp["policy"],
        "old_log_probs": lp["old"],
        "rollout_log_probs": lp["rollout"],
        "ref_log_probs": lp["ref"],
        "advantages": advantages,
        "weights": weights,
        **per_token,
        "loss": total,
        "grad_log_probs": lp["policy"].grad,
        "metric/kl": functional.masked_mean(per_token["kl"], used),
    }
    return {name: np.asarray(value.detach().numpy(), np.float32) for name, value in fields.items()}


def _micro_batch(
    core: types.ModuleType,
    s: Settings,
    lp: dict[str, torch.Tensor],
    rows: torch.Tensor,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of a micro-batch by verl's registry, with the KL term of its worker, and its values per token."""
    policy, mask, weights = lp["policy"][rows], lp["used"][rows], lp["weights"][rows]
    old = moved(lp[s.old].detach(), s.old_shift)[rows]
    numerator, denominator = (policy, old) if s.ratio_sign == 1 else (old, policy)
    defaults = verl.actor_defaults(pathlib.Path(core.__file__ or "").parents[3])
    config = verl.VerlConfig(**{**defaults, **CLIPS, **dict(s.clips)}, global_batch_info={})
    seen: list[torch.Tensor] = []
    real = core.agg_loss

    def spy(loss_mat: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(loss_mat)
        return real(loss_mat, *args, **kwargs)

    with mock.patch.object(core, "agg_loss", spy):
        loss, _ = core.compute_policy_loss_vanilla(
            denominator,
            numerator,
            lp["advantages"][rows],
            mask,
            loss_agg_mode=s.mode,
            config=config,
            rollout_is_weights=weights**s.weights_power if s.weights_power else None,
        )
    reference = moved(lp[s.kl_to].detach(), s.kl_shift)[rows]
    subject = lp[s.kl_of][rows]
    pair = (subject, reference) if s.kl_sign == 1 else (reference, subject)
    kl = core.kl_penalty(*pair, s.kl)
    term = kl if s.kl_attached else kl.detach()
    loss = loss + s.kl_coef * core.agg_loss(term, mask, s.mode)
    ratio = torch.exp(numerator - denominator)
    return loss, {"token_loss": seen[0].detach(), "kl": kl.detach(), "ratio": ratio.detach()}
