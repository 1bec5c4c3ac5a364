"""Functions of the user in the objective: what they return, what they raise, and a loss that teaches nothing."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from train.config.errors import UserError
from train.config.plan import Plan
from train.rl.metrics import WITHOUT_GRADIENT
from train.rl.objective import coefficients
from train.rl.preparation import make_preparation
from train.rl.step import make_update
from train.run.user_functions import check_user_functions

ROWS, LENGTH = tiny.ROWS, tiny.LENGTH
FUNCTIONS = """
import sys
import jax
import jax.numpy as jnp
import numpy as np

def loss(log_probs, advantages, mask):
    return {}

def advantage(rewards, mask):
    return {}

def weights(log_probs, sampling_log_probs, mask):
    return {}
"""
RIGHT = {
    "loss": "-advantages * log_probs",
    "advantage": "rewards",
    "weights": "jnp.exp(log_probs - sampling_log_probs)",
}
FIELDS = {"loss": "loss.type", "advantage": "advantage.type", "weights": r"correction\[0\]"}


def plan_of(tmp_path, function: str = "", body: str = "", *options: str) -> Plan:
    """The plan of a config with three functions of the user, of which one returns something else."""
    file = tmp_path / "mine.py"
    file.write_text(FUNCTIONS.format(*({**RIGHT, function: body}[name] for name in RIGHT)))
    chosen = f"loss={file}:loss", f"advantage={file}:advantage", f"correction=[{file}:weights]"
    return Plan.of(tiny.config_of(*chosen, *options))


def test_right_functions_pass_in_every_form(tmp_path):
    check_user_functions(plan_of(tmp_path))
    for function, body in (
        ("loss", "jnp.where(mask, -advantages * log_probs, 0).astype(jnp.bfloat16)"),
        ("advantage", "jnp.zeros(mask.shape)"),
        ("advantage", "(jnp.zeros(mask.shape), jnp.ones(mask.shape))"),
        ("weights", "log_probs > sampling_log_probs"),
        ("weights", "mask"),
    ):
        check_user_functions(plan_of(tmp_path, function, body))
    check_user_functions(Plan.of(tiny.config_of()))


WRONG = [
    ("loss", "jnp.where(mask, -advantages * log_probs, 0).mean()", f"float32[], expected floats [{ROWS}, {LENGTH}]"),
    ("loss", "None", f"NoneType, expected floats [{ROWS}, {LENGTH}]"),
    ("loss", "3.0", f"float, expected floats [{ROWS}, {LENGTH}]"),
    ("loss", "mask.astype(int)", f"int32[{ROWS}, {LENGTH}], expected floats [{ROWS}, {LENGTH}]"),
    ("loss", "mask", f"bool[{ROWS}, {LENGTH}], expected floats"),
    ("loss", "log_probs + 1j", f"complex64[{ROWS}, {LENGTH}], expected floats"),
    ("loss", "log_probs[:, 1:]", f"float32[{ROWS}, {LENGTH - 1}], expected floats"),
    ("loss", "(log_probs, {})", "tuple, expected floats"),
    ("advantage", "None", f"NoneType, expected floats [{ROWS}] or [{ROWS}, {LENGTH}]"),
    ("advantage", "rewards[:, None]", f"float32[{ROWS}, 1], expected floats [{ROWS}] or [{ROWS}, {LENGTH}]"),
    ("advantage", "rewards > 0", f"bool[{ROWS}], expected floats"),
    ("advantage", "(rewards, rewards)", f"returns: float32[{ROWS}], expected floats [{ROWS}, {LENGTH}]"),
    ("advantage", "(rewards, rewards, 1)", "tuple, expected floats"),
    ("weights", "None", f"NoneType, expected floats or booleans [{ROWS}, {LENGTH}]"),
    ("weights", "mask.astype(int)", f"int32[{ROWS}, {LENGTH}], expected floats or booleans"),
    ("weights", "log_probs.mean(-1)", f"float32[{ROWS}], expected floats or booleans [{ROWS}, {LENGTH}]"),
]


@pytest.mark.parametrize(("function", "body", "message"), WRONG)
def test_other_results_are_named_before_the_run(tmp_path, function, body, message):
    head = rf"^{FIELDS[function]}: .*mine\.py:{function} returned "
    with pytest.raises(UserError, match=head + re.escape(message)):
        check_user_functions(plan_of(tmp_path, function, body))


@pytest.mark.parametrize("function", RIGHT)
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("sys.exit(0)", "SystemExit: 0\n"),
        ("1 / 0", "ZeroDivisionError: division by zero\n"),
        ("nothing", "NameError: name 'nothing' is not defined\n"),
        ("float(mask.sum())", "ConcretizationTypeError: "),
        ("jnp.zeros(3) @ jnp.zeros(4)", "TypeError: dot_general "),
    ],
)
def test_exception_keeps_the_traceback_under_its_line(tmp_path, function, body, message):
    with pytest.raises(UserError, match=rf"^{FIELDS[function]}: .*mine\.py:{function}: {message}") as caught:
        check_user_functions(plan_of(tmp_path, function, body))
    frames = re.findall(r'^  File "(.*)", line', str(caught.value), re.MULTILINE)
    assert frames
    assert all(frame.endswith("mine.py") for frame in frames)
    assert f"return {body}" in str(caught.value)


def test_loss_sees_the_rows_of_a_micro_batch(tmp_path):
    with pytest.raises(UserError, match=rf"expected floats \[{ROWS // 2}, {LENGTH}\]"):
        check_user_functions(plan_of(tmp_path, "loss", "None", "optim.micro_batches=2"))


def test_negative_weights_are_no_numbers(tmp_path):
    """The update is then skipped, as for weights that are NaN; a weight of 0, or below 0 under the mask, is right."""
    body = "jnp.where(mask & (jnp.arange(log_probs.shape[1])[None] == 6), -1.0, jnp.where(mask, 0.0, -2.0))"
    plan = plan_of(tmp_path, "weights", body)
    batch = tiny.full_batch(np.full((ROWS, LENGTH), -1.0))
    prepared, _, _ = jax.jit(make_preparation(plan))(batch, {})
    mask = np.asarray(batch.completion_mask)
    is_negative = mask & (np.arange(LENGTH) == 6)
    assert is_negative.any()
    np.testing.assert_array_equal(np.isnan(prepared.correction_weights), is_negative)
    assert not np.any(np.asarray(prepared.correction_weights)[~is_negative])


@pytest.mark.parametrize(
    ("body", "shares"),
    [
        ("jnp.zeros_like(log_probs)", [1, 0]),
        ("-advantages * jax.lax.stop_gradient(log_probs)", [1, 0]),
        ("-advantages * log_probs", [0, 0]),
    ],
)
def test_loss_without_a_gradient_is_counted(tmp_path, body, shares):
    """Beside a KL, whose gradient hides it; without an advantage there is nothing to learn."""
    plan = plan_of(tmp_path, "loss", body, "optim.micro_batches=2", "kl.loss.coef=0.1")
    config = plan.config
    state = tiny.state_of(config, tiny.keep_gradient())
    update = make_update(plan, tiny.model_of(config), tiny.keep_gradient(), state, tiny.mesh_of())
    batch = tiny.full_batch(np.full((ROWS, LENGTH), -1.0))
    actual = []
    for advantages in (batch.advantages, jnp.zeros_like(batch.advantages)):
        filled = dataclasses.replace(batch, advantages=jnp.where(batch.completion_mask, advantages, 0))
        state, metrics = update(
            tiny.state_of(config, tiny.keep_gradient()), None, filled, jnp.arange(ROWS), coefficients(config)
        )
        assert float(metrics["grad_norm"].value()) > 0
        assert "policy_slope" not in metrics
        actual.append(float(metrics[WITHOUT_GRADIENT].value()))
    assert actual == shares
