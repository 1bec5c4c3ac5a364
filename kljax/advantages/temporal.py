"""Returns and advantages that run backwards over the tokens of a row. Arrays are `[..., T]`; nothing is whitened."""

from collections.abc import Callable
from typing import Any, get_args

import jax
import jax.numpy as jnp

from kljax._checks import as_float, check_at_least, check_choice, check_mask, check_same_shape, check_scalar
from kljax._typing import Array, ArrayLike, DiscountStep, Float, GAERule, Mask, MaskLike, Real, ReturnsRule, Scalar
from kljax.masking import masked
from kljax.rows import row_cumsum, row_ends, segment_ids

__all__ = ["gae", "reinforce_plus_plus_returns"]

MASKED_RULES = get_args(ReturnsRule)
GAE_RULES = get_args(GAERule)
DISCOUNT_STEPS = get_args(DiscountStep)


def reinforce_plus_plus_returns(
    token_rewards: Real[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    gamma: Scalar = 1.0,
    masked_tokens: ReturnsRule = "skip",
    discount_per: DiscountStep = "token",
) -> Float[Array, "*b T"]:
    """Discounted returns: `G_t = R_t + gamma * G_{t+1}` over the unmasked tokens of a row.

    The systems differ in the effect of a masked token in between, such as the output of a tool:

    - "skip": it takes no discount; the return of the next unmasked token goes on (verl 0.9.1);
    - "reset": it cuts the row; credit from behind it does not reach the tokens before it (SkyRL, earlier verl);
    - "zero": its reward is 0, and it takes one step of discount like any other token (Trinity-RFT, OpenRLHF, slime).

    Args:
      token_rewards: `[..., T]`, rewards per token, usually from `kl_shaped_rewards`; masked ones are ignored.
      mask: boolean or `Segments`.
      gamma: the discount, usually between 0 and 1.
      masked_tokens: one of the three rules above.
      discount_per: "token", or "turn": only the last token of a turn discounts what follows. A turn is a run of
        unmasked tokens, such as those between two outputs of a tool.

    Returns:
      `[..., T]`, float32 or float64, in the unit of the rewards; masked positions hold 0. A `gamma` of 0 lets nothing
      through, not even an infinite reward. REINFORCE++ whitens them next, with `masked_whiten`.

    Raises:
      ValueError: for an unknown rule or `discount_per`, differing shapes, or a `gamma` that is negative or no scalar.

    References:
      Hu et al., "REINFORCE++" (2025), eq. 4.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> rewards, mask = jnp.array([[0.0, 0.0, 1.0]]), jnp.array([[1, 0, 1]])
      >>> print(kljax.reinforce_plus_plus_returns(rewards, mask, gamma=0.5))
      [[0.5 0.  1. ]]
    """
    check_choice("masked_tokens", masked_tokens, MASKED_RULES)
    check_choice("discount_per", discount_per, DISCOUNT_STEPS)
    check_same_shape(token_rewards=token_rewards, mask=mask)
    check_scalar("gamma", gamma)
    check_at_least("gamma", gamma, 0)
    keep = check_mask(mask)
    rewards = masked(token_rewards, keep)
    gamma = jnp.asarray(gamma, rewards.dtype)

    def step(later: Array, now: tuple[Array, Array, Array | None]) -> tuple[Array, Array]:
        reward, unmasked, discounts = now
        total = reward + _weighed(_where(discounts, gamma), later)
        skipped = {"skip": later, "reset": jnp.zeros_like(later), "zero": total}[masked_tokens]
        return jnp.where(unmasked, total, skipped), jnp.where(unmasked, total, 0)

    arrays = rewards, keep, _discounts(keep, discount_per)
    return _scan_back(step, _nothing(rewards), arrays, segment_ids(mask))


def gae(
    rewards: Real[ArrayLike, "*b T"],
    values: Real[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    gamma: Scalar = 1.0,
    lam: Scalar = 1.0,
    masked_tokens: GAERule = "skip",
    discount_per: DiscountStep = "token",
) -> tuple[Array, Array]:
    """Generalised advantage estimates, and the returns that the value function is fitted to.

    With `V` and `A` 0 after the last token:

        delta_t  = R_t + gamma * V_{t'} - V_t
        A_t      = delta_t + gamma * lam * A_{t'}
        return_t = A_t + V_t

    The systems differ in which token is `t'`, and in how a masked token counts:

    - "skip": `t'` is the next unmasked token, so a span that the policy did not write neither discounts nor breaks the
      credit, and padding never enters (verl);
    - "zero": `t'` is `t + 1`; rewards and values under the mask are 0, and the recursion runs on through them with a
      discount each (OpenRLHF). A value in front of a masked token is compared with 0, even inside a row;
    - "none": `t'` is `t + 1`, and rewards and values under the mask enter as they are (SkyRL, Trinity-RFT, slime, TRL):
      what the value function says of a tool's output, or of padding, becomes credit.

    Args:
      rewards: `[..., T]`, rewards per token; masked ones are ignored, but for "none".
      values: the value of the state before each token; masked ones are ignored, but for "none".
      mask: boolean or `Segments`.
      gamma: the discount, usually between 0 and 1.
      lam: trace decay, 0 (one-step) to 1 (Monte Carlo).
      masked_tokens: one of the three rules above; "skip" and "zero" are rules of `reinforce_plus_plus_returns`.
      discount_per: "token", or "turn": `gamma` and `lam` are 1 but at the last token of a turn. A turn is a run of
        unmasked tokens, such as those between two outputs of a tool.

    Returns:
      `(advantages, returns)`, both `[..., T]`, float32 or float64, in the unit of the rewards; masked positions
      hold 0. Not whitened: apply `masked_whiten` to the advantages if that is wanted. With "none", NaN under the mask
      reaches every earlier token of its row; what lies before the first unmasked token, or has weight 0 because
      `gamma` or `lam` is 0, reaches nothing.

    Gradient:
      Linear in rewards and values. A loss takes both results as constants: compute them outside the
      function that is differentiated, or stop their gradient.

    Raises:
      ValueError: for an unknown rule or `discount_per`, differing shapes, or a `gamma` or `lam` that is negative or no
        scalar.

    References:
      Schulman et al., "High-dimensional continuous control using GAE" (2016), eq. 16; Wang et al., "VAGEN" (2025), for
      discounts per turn.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> rewards, values = jnp.array([[0.0, 0.0, 1.0]]), jnp.array([[0.5, 9.0, 0.5]])
      >>> advantages, returns = kljax.gae(rewards, values, jnp.array([[1, 0, 1]]), gamma=1.0, lam=1.0)
      >>> print(advantages, returns)
      [[0.5 0.  0.5]] [[1. 0. 1.]]
    """
    check_choice("masked_tokens", masked_tokens, GAE_RULES)
    check_choice("discount_per", discount_per, DISCOUNT_STEPS)
    check_same_shape(rewards=rewards, values=values, mask=mask)
    check_scalar("gamma", gamma)
    check_at_least("gamma", gamma, 0)
    check_scalar("lam", lam)
    check_at_least("lam", lam, 0)
    rewards, values = as_float(rewards, values)
    keep = check_mask(mask)
    enters = row_cumsum(keep, mask) > 0 if masked_tokens == "none" else keep
    rewards = jnp.where(enters, rewards, 0)
    values = jnp.where(enters, values, 0)
    gamma = jnp.asarray(gamma, rewards.dtype)
    lam = jnp.asarray(lam, rewards.dtype)

    def step(
        later: tuple[Array, Array], now: tuple[Array, Array, Array, Array | None]
    ) -> tuple[tuple[Array, Array], Array]:
        next_value, next_advantage = later
        reward, value, unmasked, discounts = now
        advantage = reward + _weighed(_where(discounts, gamma), next_value) - value
        advantage += _weighed(_where(discounts, gamma * lam), next_advantage)
        carry = value, advantage
        if masked_tokens == "skip":
            carry = jnp.where(unmasked, value, next_value), jnp.where(unmasked, advantage, next_advantage)
        return carry, jnp.where(unmasked, advantage, 0)

    arrays = rewards, values, keep, _discounts(keep, discount_per)
    advantages = _scan_back(step, (_nothing(rewards), _nothing(values)), arrays, segment_ids(mask))
    return advantages, masked(advantages + values, keep)


def _discounts(keep: Array, discount_per: DiscountStep) -> Array | None:
    """Returns which tokens discount what follows them, `[..., T]`; None if all do."""
    if discount_per == "token":
        return None
    after = jnp.concatenate([keep[..., 1:], jnp.zeros_like(keep[..., :1])], -1)
    return keep & ~after


def _where(discounts: Array | None, factor: Array) -> Array:
    """Returns the factor where a token discounts, and 1 elsewhere."""
    return factor if discounts is None else jnp.where(discounts, factor, 1)


def _weighed(weight: Array, values: Array) -> Array:
    """`weight * values`, where a weight of 0 leaves nothing even of NaN."""
    return weight * jnp.where(weight != 0, values, 0)


def _nothing(values: Array) -> Array:
    """`[...]` zeros to start from. Made from the values, so that inside `shard_map` they vary over the same devices."""
    return jnp.zeros_like(values.sum(-1))


def _scan_back(step: Callable[[Any, Any], tuple[Any, Array]], start: Any, arrays: Any, ids: Array | None) -> Array:
    """Runs `step` from the last token of every sequence to its first; results in the order of the positions."""

    def by_position(array: Array) -> Array:
        return jnp.moveaxis(array, -1, 0)

    def step_in_segment(later: Any, now: tuple[Array, Any]) -> tuple[Any, Array]:
        ends, inputs = now
        return step(jax.tree.map(lambda carry, zero: jnp.where(ends, zero, carry), later, start), inputs)

    if ids is not None:
        arrays = row_ends(ids), arrays
    run = step if ids is None else step_in_segment
    _, results = jax.lax.scan(run, start, jax.tree.map(by_position, arrays), reverse=True)
    return jnp.moveaxis(results, 0, -1)
