"""KL coefficients over many updates, and KL in the reward, of verl, SkyRL and OpenRLHF."""

import jax
import jax.numpy as jnp

import kljax
from tests.goldens import cases, compare
from tests.goldens.cases import GENERATED


def controller(case: cases.Case) -> kljax.Controller:
    """The controller that the params describe, in the words of any of the systems."""
    params = case.params
    coef = next(params[name] for name in ("init_kl_coef", "kl_coef", "kl_loss_coef") if name in params)
    target = next((params[name] for name in ("target", "target_kl", "kl_target") if name in params), None)
    return kljax.fixed_kl(coef) if target is None else kljax.adaptive_kl(coef, target=target, horizon=params["horizon"])


@cases.parametrize(
    *[(system, f"{kind}KLController") for system in ("verl", "skyrl", "openrlhf") for kind in ("Adaptive", "Fixed")],
    file=GENERATED,
)
def test_many_updates(case: cases.Case) -> None:
    control = controller(case)

    def step(state: kljax.ControllerState, told: tuple[jax.Array, ...]) -> tuple[kljax.ControllerState, jax.Array]:
        state = control.update(state, *told)
        return state, state.coef

    _, coefs = jax.lax.scan(step, control.init(), (case.given("kls"), case.given("num_samples")))
    case.assert_outputs(coefs=coefs)


@cases.parametrize(("verl", "apply_kl_penalty"), file=GENERATED)
def test_verl_kl_in_the_reward(case: cases.Case) -> None:
    estimator, mask = {"kl": "k1", "low_var_kl": "low_var_kl"}[case.params["kl_penalty"]], case.given("mask")
    arrays = (case.given(name) for name in ("token_rewards", "old_log_probs", "ref_log_probs"))
    control = controller(case)
    state = control.init()
    rewards, kl = kljax.kl_shaped_rewards(*arrays, mask, coef=state.coef, estimator=estimator)
    current = compare.reduced(kl, mask, compare.TRINITY["seq-mean-token-mean"])
    after = control.update(state, current, len(mask))
    case.assert_outputs(
        token_rewards=rewards,
        coef=after.coef,
        metric_reward_kl_penalty=current,
        metric_reward_kl_penalty_coeff=state.coef,
    )


@cases.parametrize(("skyrl", "apply_reward_kl_penalty"), file=GENERATED)
def test_skyrl_kl_in_the_reward(case: cases.Case) -> None:
    estimator, mask = {"k1": "k1", "k3": "low_var_kl"}[case.params["kl_estimator_type"]], case.given("mask")
    arrays = (case.given(name) for name in ("token_rewards", "old_log_probs", "ref_log_probs"))
    control = controller(case)
    state = control.init()
    rewards, kl = kljax.kl_shaped_rewards(*arrays, mask, coef=state.coef, estimator=estimator)
    mean = compare.reduced(kl, mask, compare.ROW_MEAN)
    metrics = {
        "metric_avg_kl": mean,
        "metric_avg_kl_max": jnp.abs(kl).max(-1).mean(),
        "metric_kl_loss_coef": state.coef,
    }
    after = {"coef": control.update(state, mean, len(mask)).coef} if "kl_target" in case.params else {}
    case.assert_outputs(token_rewards=rewards, **metrics, **after)


@cases.parametrize(("openrlhf", "compute_reward"), file=GENERATED)
def test_openrlhf_reward(case: cases.Case) -> None:
    # The score is clipped before it is placed; the KL at masked positions, which OpenRLHF leaves, is 0 here.
    mask, kl, params = case.given("mask"), case.given("kl"), case.params
    scores = jnp.clip(case.given("rewards"), *params["reward_clip_range"])
    rewards = kljax.subtract_kl(scores, kl, mask, coef=params["kl_coef"])
    assert case.outputs == ("token_rewards",)
    case.assert_matches(rewards, jnp.where(mask, case.result("token_rewards"), 0))


@cases.parametrize(("trinity", "apply_kl_penalty_to_reward"))
def test_trinity_coefficient_after_an_update(case: cases.Case) -> None:
    # The estimator's mean is recorded; what the update makes of it is compared here.
    control = controller(case) if case.params["adaptive"] else kljax.fixed_kl(case.params["kl_coef"])
    state = control.update(control.init(), jnp.asarray(case.result("metric_kl")), len(case.given("mask")))
    if "kl_coef_after" in case.outputs:
        case.assert_matches(state.coef, case.result("kl_coef_after"))
    else:
        assert not case.params["adaptive"]
        case.assert_matches(state.coef, case.result("metric_kl_coef"))
