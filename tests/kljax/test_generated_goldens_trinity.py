"""Trinity-RFT's policy losses: value and gradient."""

import functools

import jax
import jax.numpy as jnp
import pytest

import kljax
from tests.goldens import cases, compare
from tests.goldens.cases import GENERATED
from tests.goldens.compare import TRINITY

SUPERVISED = {"sft": "none", "sft_is": "probability", "sft_phi": "uncertainty"}
CLIPS = {"clip_low": "clip_range_low", "clip_high": "clip_range_high"}


def clips(case: cases.Case) -> dict[str, float]:
    """The bounds of the ratio; `clip_range` is both."""
    both = case.params.get("clip_range")
    return compare.renamed(case, **CLIPS) if both is None else {"clip_low": both, "clip_high": both}


def reduction(case: cases.Case) -> compare.Reduction:
    """The reduction of a case, the mean over tokens where it names none."""
    return TRINITY[case.params.get("loss_agg_mode", "token-mean")]


def fraction(tokens: jax.Array, mask: jax.Array) -> jax.Array:
    """The fraction of tokens, with the epsilon of Trinity's masked mean."""
    return compare.mean(tokens.astype(jnp.float64), mask)


@cases.parametrize(("trinity", "PPOPolicyLossFn"), file=GENERATED)
def test_ppo(case: cases.Case) -> None:
    log_probs, old, advantages, mask = compare.policy(case)
    dual = case.params.get("clip_ratio_c", 3.0)
    if case.params.get("fallback_to_policy_gradient"):
        old = log_probs  # the old policy is taken to be this one
    kept = mask
    if case.params.get("enable_sequence_masking"):
        threshold = case.params["delta_sequence_masking"]
        kept = kljax.off_policy_sequence_mask(log_probs, old, advantages, mask, max_kl=threshold, log_ratio_clip=20.0)
        assert (mask & ~kept).any()
    rest = old, advantages, mask

    def loss(lp: jax.Array) -> jax.Array:
        per_token = kljax.ppo_clip_loss(lp, *rest, **clips(case), dual_clip=dual, log_ratio_clip=20.0)
        return jnp.where(kept, per_token, 0)

    compare.assert_loss(case, loss, reduction(case))
    metrics = {
        "metric_pg_clipfrac": kljax.clip_fraction(log_probs, *rest, **clips(case)),
        "metric_pg_clipfrac_lower": kljax.dual_clip_fraction(log_probs, *rest, dual_clip=dual),
        "metric_ppo_kl": kljax.ppo_kl(log_probs, old, mask, log_ratio_clip=20.0),
    }
    case.assert_outputs(**{name: compare.mean(metric, mask) for name, metric in metrics.items()})


@cases.parametrize(("trinity", "GSPOLossFn"), file=GENERATED)
def test_gspo(case: cases.Case) -> None:
    # The epsilon in the mean log-ratio of a row is undone by log-probs that are as much nearer to each other.
    log_probs, old, advantages, mask = compare.policy(case)
    lengths = mask.sum(-1, keepdims=True).astype(jnp.float64)
    nearer = lengths / (lengths + 1e-8)

    def loss(lp: jax.Array) -> jax.Array:
        # Only the value of the row's ratio has the epsilon; its gradient is that of the token's log-prob.
        shifted = lp - jax.lax.stop_gradient((1 - nearer) * (lp - old))
        return kljax.gspo_loss(shifted, old, advantages, mask, **clips(case), gradient="token")

    compare.assert_loss(case, loss, reduction(case))
    kl = kljax.log_ratios(old, log_probs, mask)
    per_row = jnp.mean(kljax.masked_mean(kl, mask, axis=-1) * nearer[:, 0])
    clipped = kljax.clip_fraction(log_probs, old, advantages, mask, **clips(case), level="geometric")
    case.assert_outputs(
        metric_pg_clipfrac=compare.mean(clipped, mask), metric_ppo_kl=compare.mean(kl, mask), metric_ppo_kl_seq=per_row
    )


@cases.parametrize(("trinity", "SAPOPolicyLossFn"), file=GENERATED)
def test_sapo(case: cases.Case) -> None:
    log_probs, old, advantages, mask = compare.policy(case)
    taus = compare.renamed(case, tau_positive="tau_pos", tau_negative="tau_neg")
    sapo = functools.partial(kljax.sapo_loss, **taus, through="log_prob")
    compare.assert_loss(case, lambda lp: sapo(lp, old, advantages, mask), reduction(case))
    # The gate is the loss at advantage 1 (with the temperature of its sign) without the log-prob.
    gates = sapo(log_probs, old, jnp.sign(advantages), mask) / -(jnp.sign(advantages) * log_probs)
    kl = compare.mean(kljax.ppo_kl(log_probs, old, mask), mask)
    case.assert_outputs(metric_avg_soft_gate=compare.mean(gates, mask), metric_ppo_kl=kl)


@cases.parametrize(("trinity", "TOPRPolicyLossFn"), file=GENERATED)
def test_topr(case: cases.Case) -> None:
    log_probs, old, advantages, mask = compare.policy(case)
    threshold = case.params["advantage_threshold"]
    topr = functools.partial(kljax.topr_loss, threshold=threshold)
    compare.assert_loss(case, lambda lp: topr(lp, old, advantages, mask), reduction(case))
    weights = topr(log_probs, old, advantages, mask) / -(advantages * log_probs)
    case.assert_outputs(metric_avg_alpha=compare.mean(weights, mask))


@cases.parametrize(("trinity", "CISPOPolicyLossFn"), file=GENERATED)
def test_cispo(case: cases.Case) -> None:
    log_probs, old, advantages, mask = compare.policy(case)
    bounds = clips(case) or {"clip_low": 1.0, "clip_high": 0.28}
    masked = compare.renamed(case, mask_low="mask_clip_range_low", mask_high="mask_clip_range_high")
    loss = functools.partial(kljax.cispo_loss, **bounds, **masked)
    compare.assert_loss(case, lambda lp: loss(lp, old, advantages, mask), reduction(case))
    kl = compare.mean(kljax.ppo_kl(log_probs, old, mask), mask)
    kept = loss(log_probs, old, advantages, mask) != 0
    case.assert_outputs(metric_ppo_kl=kl, metric_unmasked_frac=fraction(kept, mask))


@cases.parametrize(("trinity", "ImportanceSamplingLossFn"), file=GENERATED)
def test_importance_sampling(case: cases.Case) -> None:
    log_probs, *rest = compare.policy(case)
    compare.assert_loss(
        case, lambda lp: kljax.importance_sampling_loss(lp, *rest, log_ratio_clip=20.0), reduction(case)
    )
    old, _, mask = rest
    kl = kljax.ppo_kl(log_probs, old, mask, log_ratio_clip=20.0)
    case.assert_outputs(metric_approx_kl=compare.mean(kl, mask))


@cases.parametrize(("trinity", "OPMDPolicyLossFn"), file=GENERATED)
def test_opmd(case: cases.Case) -> None:
    advantages, mask = case.given("advantages"), case.given("mask")
    compare.assert_loss(case, lambda lp: kljax.opmd_loss(lp, advantages, mask, tau=case.params["tau"]), reduction(case))
    case.assert_outputs()


@cases.parametrize(("trinity", "sPPOPolicyLossFn"), file=GENERATED)
def test_sppo(case: cases.Case) -> None:
    log_probs, *rest = compare.policy(case)
    epsilon = case.params["epsilon"]
    compare.assert_loss(case, lambda lp: kljax.sppo_loss(lp, *rest, clip=epsilon), reduction(case))
    old, _, mask = rest
    inside = kljax.rejection_mask(log_probs, old, mask, lower=1 / (1 + epsilon), upper=1 + epsilon)
    case.assert_outputs(metric_pg_clipfrac=fraction(~inside, mask))


@cases.parametrize(("trinity", "SFTLossFn"), ("trinity", "SFTISLossFn"), ("trinity", "SFTPhiLossFn"), file=GENERATED)
def test_supervised_losses(case: cases.Case) -> None:
    mask, weight = case.given("mask"), SUPERVISED[case.params["name"]]
    bound = compare.renamed(case, max_probability="cutoff_prob")
    loss = functools.partial(kljax.cross_entropy_loss, mask=mask, weight=weight, **bound)
    compare.assert_loss(case, loss, reduction(case))
    case.assert_outputs()


@cases.parametrize(("trinity", "MIXPolicyLossFn"), ("trinity", "MIXCHORDPolicyLossFn"), file=GENERATED)
def test_mixtures(case: cases.Case) -> None:
    # Each part is a mean over its own tokens, times its number of rows; `mu` follows a schedule in CHORD.
    _, old, advantages, mask = compare.policy(case)
    params, expert = case.params, case.given("expert") > 0
    weight = SUPERVISED["sft_phi" if params.get("enable_phi_function") else "sft"]
    step, mu = 5, params.get("mu", params.get("mu_peak"))
    if step < params.get("mu_warmup_steps", 0):
        mu = step / params["mu_warmup_steps"] * params["mu_peak"]

    def total(lp: jax.Array) -> jax.Array:
        ppo = kljax.ppo_clip_loss(lp, old, advantages, mask, **clips(case), dual_clip=3.0, log_ratio_clip=20.0)
        sft = kljax.cross_entropy_loss(lp, mask, weight=weight)
        usual, taught = (
            compare.reduced(loss, mask & rows[:, None], reduction(case)) * rows.sum().astype(jnp.float64)
            for loss, rows in ((ppo, ~expert), (sft, expert))
        )
        return (1 - mu) * usual + mu * taught

    case.assert_value_and_grad(total, "log_probs")
    case.assert_outputs()


@cases.parametrize(("trinity", "RECPolicyLossFn"), file=GENERATED)
def test_rec(case: cases.Case) -> None:
    log_probs, *rest = compare.policy(case)
    params = case.params
    words = {name: params.get(name, "none").replace("-", "_") for name in ("clip_mode", "weight", "regularizer")}
    rings = {"ring_low": 0.4, "ring_high": 0.4}
    # Trinity's k2 has no half.
    coef = params.get("regularizer_coef", 0.0) * (2 if words["regularizer"] == "k2" else 1)
    options = {**words, **rings, "coef": coef, "temperature": params.get("temp", 1.0)}
    mode = "seq-mean-token-mean" if words["clip_mode"] == "gspo_one_side" else "token-mean"
    compare.assert_loss(case, lambda lp: kljax.rec_loss(lp, *rest, **options), TRINITY[mode])
    bare = kljax.rec_loss(log_probs, *rest, **rings, clip_mode=words["clip_mode"])
    case.assert_outputs(metric_pg_clipfrac=fraction(bare == 0, rest[-1]))


# `test_systems` compares the same values and gradients with the call of the table.
@pytest.mark.thorough
@cases.parametrize(("trinity", "DPOLossFn"), file=GENERATED)
def test_dpo_of_a_single_pair(case: cases.Case) -> None:
    # Trinity sums over the tokens of all pairs at once, so that only a batch of one pair is DPO: the rows of the
    # preferred answers are one sequence here, and those of the rejected ones another.
    ref, mask, params = case.given("ref_log_probs"), case.given("mask"), case.params

    def loss(lp: jax.Array) -> jax.Array:
        chosen, rejected = (tuple(x[start::2].reshape(-1) for x in (lp, ref, mask)) for start in (0, 1))
        names = ("rejected_log_probs", "rejected_ref_log_probs", "rejected_mask")
        options = {"coef": params["beta"], **compare.renamed(case, label_smoothing="label_smoothing")}
        return kljax.dpo_loss(*chosen, **dict(zip(names, rejected, strict=True)), **options)

    case.assert_value_and_grad(loss, "log_probs")
    case.assert_outputs()
