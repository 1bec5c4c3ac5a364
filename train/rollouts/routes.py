"""Routes, the experts that a sampler used: whether they are recorded, and their checks before a step starts."""

import math

import jax
import numpy as np

from train.config.plan import Layout
from train.context import RunContext
from train.distributed.global_arrays import RowSplit
from train.rollouts.source import Completions, SourceError
from train.sequences.batch import prompt_lengths
from train.sequences.token_fields import ROUTES


def records_routes(context: RunContext) -> bool:
    """Whether rollouts record the experts of their tokens."""
    return context.model.config.experts is not None and context.config.routing.replay == "rollout"


def check_routes(context: RunContext, completions: Completions, rows: RowSplit) -> None:
    """Checks the routes of rows from the host; the sampler of this process needs no check.

    The last token of a row has none: no sampler computes it, and it decides no log-prob.

    Raises:
      SourceError: the model has no experts, or other layers or experts; an expert twice; a token without routes, unless
        `routing.missing` is `choose`; or rows that share a prompt in the update have other routes of it.
    """
    routes = completions.fields.get(ROUTES)
    config = context.config
    experts = context.model.config.experts
    shape = context.model.config.route_shape
    if routes is None or (experts is None and config.routing.replay == "none"):
        return
    if experts is None:
        raise SourceError(f"rollout: {ROUTES}: the model has no experts; set routing.replay=none")
    if routes.shape[2:] != shape:
        raise SourceError(
            f"rollout: {ROUTES}: got {routes.shape[2]} layers x {routes.shape[3]} experts, expected {shape[0]} x "
            f"{shape[1]}; only layers with experts count"
        )
    if isinstance(routes, jax.Array):
        return
    mask = np.asarray(completions.token_mask)
    _check_experts(routes, mask, experts.count, rows.held)
    columns = np.arange(mask.shape[1])
    fed = columns < mask.sum(-1, keepdims=True) - 1
    missing = (routes < 0).any((2, 3)) & fed
    if missing.any() and config.routing.missing == "error":
        row = int(np.argmax(missing.any(1)))
        raise SourceError(
            f"rollout: {ROUTES}: row {rows.held[row]} has no experts for {int(missing[row].sum())} of its "
            f"{int(fed[row].sum())} tokens; set routing.missing=choose to let the trainer's router choose them"
        )
    layout = Layout.of(config)
    packed = config.optim.packing and config.optim.share_prompts
    # Packed rows may share a prompt of all rows of a group.
    group = math.gcd(config.rollout.samples_per_prompt, len(routes)) if packed else layout.group
    if group > 1:
        # A row whose completion is empty needs no experts.
        lengths = np.asarray(prompt_lengths(completions))
        longest = int(lengths.max(initial=0))
        fed_prompts = (fed & (columns < lengths[:, None]))[:, :longest].reshape(-1, group, longest)
        completed = (mask.sum(-1) > lengths).reshape(-1, group, 1)
        prompts = np.sort(routes[:, :longest].reshape(-1, group, longest, *shape), axis=-1)
        first = np.take_along_axis(prompts, np.argmax(completed, axis=1)[..., None, None, None], axis=1)
        differ = (prompts != first).any((-2, -1)) & fed_prompts & completed
        if differ.any():
            raise SourceError(
                f"rollout: {ROUTES}: completions of one prompt have other experts for its tokens; set "
                "optim.share_prompts=false"
            )


def _check_experts(routes: np.ndarray, mask: np.ndarray, count: int, rows: np.ndarray) -> None:
    ordered = np.sort(routes, axis=-1)
    known = (routes >= 0).all(-1)
    twice = (ordered[..., 1:] == ordered[..., :-1]).any(-1) & known
    wrong = ((routes < -1) | (routes >= count)).any(-1) | twice | ((routes >= 0).any(-1) & ~known)
    wrong &= mask[..., None]
    if wrong.any():
        row, column, layer = map(int, np.argwhere(wrong)[0])
        raise SourceError(
            f"rollout: {ROUTES}: row {rows[row]}, column {column}, layer {layer}: got the experts "
            f"{routes[row, column, layer].tolist()}, expected different ones from 0 to {count - 1}, or -1 for all"
        )
