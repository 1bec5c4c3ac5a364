"""The guard on the host: what it says of skipped updates, what it does beyond a limit, what it never saves."""

import dataclasses
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from tests.run_programs import shared_by_runs
from tests.train.config.built import build, problems
from tests.train.data.tokenizers_of_kinds import KINDS
from train.__main__ import main
from train.config.errors import GuardError
from train.data.tokenizers import ByteTokenizer
from train.process.error_exit import known_ending
from train.rl.metrics import SHARE, LargestToken
from train.rl.optimizer import make_optimizer
from train.run.guard import StepGuard, describe_token
from train.weights.orbax import RunCheckpoints

MONITOR = "reference.monitor=true"
VALUES = {"skipped_updates": 0.0, "kl_reference": 0.2, "entropy": 1.0}
# One token of the batch below: its log-probs are what a collapse of two updates looks like.
ROW, COLUMN = 3, 4
SPIKE = VALUES | {"kl_reference": 1.2e13, "kl_reference_max": 2.4e14}
TOKENS = {"kl_reference_max": LargestToken(*map(np.asarray, (2.4e14, ROW, COLUMN, -33.2, -0.08)))}
REASON = "guard.max_kl: the KL to the reference is 1.2e+13, the limit 10"
NAMED = (
    "; the largest is 2.4e+14 at token 2 of the 4 sampled in row 3, '2+3': id 53 ('5'), log-prob -33.2 under the "
    "policy, -0.08 under the reference"
)


def spiked_batch():
    """A batch whose row `ROW` is `2+3`, and a completion with a 5 at `COLUMN`."""
    batch = tiny.rollout_batch()
    tokens = batch.tokens.at[ROW, :3].set(jnp.array([*b"2+3"])).at[ROW, COLUMN].set(ord("5"))
    return dataclasses.replace(batch, tokens=tokens)


def at(state, step):
    return dataclasses.replace(state, step=jnp.int32(step))


@pytest.fixture
def watch_of(tmp_path):
    """A watch of a config, over checkpoints with step 0, and that state."""
    opened = []

    def make(*overrides):
        config = tiny.config_of(*overrides)
        checkpoints = RunCheckpoints(tmp_path / f"checkpoints-{len(opened)}", config.checkpoint)
        opened.append(checkpoints)
        state = tiny.state_of(config, make_optimizer(config.optim))
        checkpoints.save(state, 0)
        checkpoints.wait()
        return StepGuard(config, checkpoints, tmp_path / "nonfinite", ByteTokenizer()), state

    yield make
    for checkpoints in opened:
        checkpoints.close()


def test_non_finite_state_is_never_saved(watch_of):
    watch, state = watch_of()
    params = state.trainable["params"]
    layers = {"params": params | {"layers": jax.tree.map(lambda x: x * jnp.nan, params["layers"])}}
    with pytest.raises(GuardError, match=r"step 1: trainable\.params\.layers.* is not finite; not saved\n.*step 0"):
        watch.save(dataclasses.replace(state, trainable=layers), 1)
    assert watch.checkpoints.steps() == [0]


def test_skipped_updates_report_the_array_and_batch(watch_of, tmp_path, capsys):
    watch, state = watch_of("guard.max_skipped=2")
    batch = tiny.full_batch(np.zeros((tiny.ROWS, tiny.LENGTH)))
    poisoned = dataclasses.replace(batch, rollout_log_probs=batch.rollout_log_probs.at[0, 5].set(jnp.nan))
    watch.inspect(poisoned, at(state, 3), VALUES | {"skipped_updates": 1.0}, {})
    file = tmp_path / "nonfinite" / "step-3.npz"
    text = capsys.readouterr().err
    assert "step 3: an update was skipped, because rollout_log_probs is not finite" in text
    assert str(file) in text
    with np.load(file) as saved:
        np.testing.assert_array_equal(saved["rollout_log_probs"], poisoned.rollout_log_probs)
        assert {"tokens", "completion_mask", "advantages"} <= set(saved)
    skipping = dataclasses.replace(at(state, 3), guard=dataclasses.replace(state.guard, skipped=jnp.int32(1)))
    assert watch.check(skipping, VALUES | {"skipped_updates": 1.0}) is skipping
    last = dataclasses.replace(skipping, guard=dataclasses.replace(state.guard, skipped=jnp.int32(2)))
    with pytest.raises(GuardError, match=r"guard\.max_skipped: 2 updates in a row .* rollout_log_probs is not finite"):
        watch.check(last, VALUES | {"skipped_updates": 1.0})
    # The weights are good, so they are saved, and a run that goes on counts anew.
    restored = watch.checkpoints.restore_last(state)
    assert (int(restored.step), int(restored.guard.skipped)) == (3, 0)


def test_a_removed_directory_is_one_line(watch_of, tmp_path):
    watch, state = watch_of()
    shutil.rmtree(tmp_path)
    batch = tiny.full_batch(np.zeros((tiny.ROWS, tiny.LENGTH)))
    with pytest.raises(FileNotFoundError) as caught:
        watch.inspect(batch, at(state, 3), VALUES | {"skipped_updates": 1.0}, {})
    text, code = known_ending(caught.value)
    assert (code, text.count("\n")) == (2, 0)
    assert text.endswith("its directory was removed; start a new run")


def test_limit_stops_the_run_without_saving_the_step(watch_of):
    watch, state = watch_of(MONITOR, "guard={max_kl: 0.1, action: stop}")
    message = r"step 4: guard\.max_kl: the KL to the reference is 0\.2, the limit 0\.1; step 4 is not saved\n.* step 0"
    with pytest.raises(GuardError, match=message):
        watch.check(at(state, 4), VALUES)
    watch, state = watch_of("guard={min_entropy: 2, action: stop}")
    with pytest.raises(GuardError, match=r"guard\.min_entropy: the entropy is 1, the limit 2"):
        watch.check(at(state, 4), VALUES)


def test_spike_is_a_warning_naming_the_token(watch_of, capsys):
    watch, state = watch_of(MONITOR)
    watch.inspect(spiked_batch(), at(state, 7), SPIKE, TOKENS)
    assert watch.check(at(state, 7), SPIKE).trainable is state.trainable
    assert capsys.readouterr().err == f"warning: step 7: {REASON}{NAMED}; guard.action is warn\n"
    # Within the limits nothing is said and nothing copied.
    watch.inspect(None, state, VALUES, TOKENS)
    watch.check(state, VALUES)
    assert capsys.readouterr().err == ""


def test_long_excess_gives_a_few_lines(watch_of, capsys):
    watch, state = watch_of(MONITOR)
    for step in range(1, 121):
        watch.check(at(state, step), VALUES | {"kl_reference": 200.0 if step == 30 else 19.0})
    lines = capsys.readouterr().err.splitlines()
    assert [re.match(r"warning: step (\d+)", line).group(1) for line in lines] == ["1", "30", "80"]
    assert [re.findall(r"so were (\d+) steps", line) for line in lines] == [[], ["28"], ["49"]]


def test_token_limit_sees_spikes_hidden_by_means(watch_of, capsys):
    watch, state = watch_of(MONITOR)
    values = VALUES | {"kl_reference_max": 2.4e14}
    watch.inspect(spiked_batch(), state, values, TOKENS)
    watch.check(state, values)
    reason = "guard.max_token_kl: the KL to the reference at one token is 2.4e+14, the limit 1e+06"
    assert f"step 0: {reason}{NAMED}" in capsys.readouterr().err


def test_token_limit_names_the_sampler(watch_of, capsys):
    watch, state = watch_of("kl.rollout.coef=0.1")
    values = VALUES | {"rollout_kl_max": 3e15}
    token = dataclasses.replace(TOKENS["kl_reference_max"], largest=np.float32(3e15), log_prob=np.float32(-5))
    watch.inspect(spiked_batch(), state, values, TOKENS | {"rollout_kl_max": token})
    watch.check(state, values)
    text = capsys.readouterr().err
    assert "step 0: guard.max_token_kl: the rollout KL at one token is 3e+15, the limit 1e+06; the largest is" in text
    assert "id 53 ('5'), log-prob -5 under the policy, -0.08 under the sampler; guard.action is warn" in text


def test_every_other_action_names_the_token(watch_of, capsys):
    watch, state = watch_of(MONITOR, "guard.action=stop")
    watch.inspect(spiked_batch(), at(state, 4), SPIKE, TOKENS)
    with pytest.raises(GuardError, match=f"^{re.escape(f'step 4: {REASON}{NAMED}; step 4 is not saved')}"):
        watch.check(at(state, 4), SPIKE)
    for action, done in (("roll_back", "rolled back to"), ("lower_learning_rate", "the learning rate is now 0.5")):
        watch, state = watch_of(MONITOR, f"guard.action={action}")
        watch.inspect(spiked_batch(), at(state, 4), SPIKE, TOKENS)
        watch.check(at(state, 4), SPIKE)
        assert f"step 4: {REASON}{NAMED}; {done}" in capsys.readouterr().err


def test_updates_skipped_by_a_limit_are_counted(watch_of, tmp_path, capsys):
    watch, state = watch_of(MONITOR, "guard={action: skip, max_skipped: 2}")
    values = SPIKE | {"skipped_updates": 0.5, SHARE: 0.5}
    watch.inspect(spiked_batch(), at(state, 4), values, TOKENS)
    once = dataclasses.replace(at(state, 4), guard=dataclasses.replace(state.guard, skipped=jnp.int32(1)))
    assert watch.check(once, values) is once
    done = f"step 4: an update was skipped, because it was beyond a limit: {REASON}{NAMED}; guard.action is skip"
    assert done in capsys.readouterr().err
    assert not (tmp_path / "nonfinite").exists()
    twice = dataclasses.replace(once, guard=dataclasses.replace(state.guard, skipped=jnp.int32(2)))
    message = f"guard.max_skipped: 2 updates in a row were skipped; at step 4 it is beyond a limit: {REASON}"
    with pytest.raises(GuardError, match=f"^{re.escape(message)}\nStep 4 is saved"):
        watch.check(twice, values)


def test_token_without_tokenizer_is_named_by_its_id():
    token = dataclasses.replace(TOKENS["kl_reference_max"], other_log_prob=np.float32(np.nan))
    text = describe_token(spiked_batch(), {"kl_reference_exact_max": token}, None, ["kl_reference_exact_max"])
    assert text.endswith("token 2 of the 4 sampled in row 3: id 53, log-prob -33.2 under the policy")
    assert describe_token(spiked_batch(), {}, None, ["kl_reference_max"]) == ""


def test_token_of_pieces_shows_its_space():
    tokenizer, batch = KINDS["prepend"](), spiked_batch()
    word = [tokenizer._tokenizer.token_to_id("▁apples")]
    batch = dataclasses.replace(batch, tokens=batch.tokens.at[ROW, COLUMN].set(word[0]))
    assert tokenizer.decode(word) == "apples"
    assert f": id {word[0]} (' apples')" in describe_token(batch, TOKENS, tokenizer, list(TOKENS))


def test_rollback_restores_weights_and_continues_the_prompts(watch_of, capsys):
    watch, state = watch_of(MONITOR, "guard={max_kl: 0.1, action: roll_back, max_actions: 1}")
    moved = dataclasses.replace(at(state, 4), trainable=jax.tree.map(lambda x: x + 1, state.trainable))
    back = watch.check(moved, VALUES)
    for got, expected in zip(jax.tree.leaves(back.trainable), jax.tree.leaves(state.trainable), strict=True):
        np.testing.assert_array_equal(got, expected)
    assert (int(back.step), int(back.guard.actions)) == (4, 1)
    assert "rolled back to the weights of step 0" in capsys.readouterr().err
    with pytest.raises(GuardError, match=r"2 times so far \(guard\.max_actions\)"):
        watch.check(back, VALUES)


def test_lower_max_actions_of_a_resumed_run_stops_it(watch_of):
    watch, state = watch_of(MONITOR, "guard={max_kl: 0.1, action: lower_learning_rate, max_actions: 1}")
    state = dataclasses.replace(state, guard=dataclasses.replace(state.guard, actions=np.int32(2)))
    with pytest.raises(GuardError, match=r"3 times so far \(guard\.max_actions\)"):
        watch.check(at(state, 4), VALUES)


def test_the_learning_rate_is_lowered_in_the_state(watch_of):
    watch, state = watch_of(MONITOR, "guard={max_kl: 0.1, action: lower_learning_rate, learning_rate_factor: 0.25}")
    lower = watch.check(watch.check(at(state, 4), VALUES), VALUES)
    assert (float(lower.guard.rate), int(lower.guard.actions)) == (0.0625, 2)
    assert watch.check(lower, VALUES | {"kl_reference": 0.05}) is lower


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("guard.max_kl=0.1", r"guard.max_kl: got 0.1, but no KL to the reference is measured"),
        ("guard.max_token_kl=9", r"guard.max_token_kl: got 9, but no KL to the reference is measured"),
        ("guard.action=roll_back", "guard.action: got roll_back, which answers a limit, but there is none"),
        ("guard.learning_rate_factor=0.1", "guard.learning_rate_factor: got 0.1, which guard.action warn does not use"),
        ("guard.max_actions=1", "guard.max_actions: got 1, which guard.action warn does not use"),
        ("guard.max_skipped=0", "guard.max_skipped: got 0, expected an integer >= 1"),
    ],
)
def test_ineffective_guard_is_refused(override, message):
    assert any(message in problem for problem in problems(override, "kl.loss.coef=0"))


def test_limits_go_with_any_measured_kl():
    build(MONITOR, "guard.max_kl=0.1")
    build("kl.loss.coef=0", "kl.rollout.coef=0.1", "guard={max_token_kl: 100, action: skip}")
    assert any(
        "guard.max_kl: got 9" in text for text in problems("kl.loss.coef=0", "kl.rollout.coef=0.1", "guard.max_kl=9")
    )
    build("kl.loss.coef=0", "guard={max_kl: null, max_token_kl: null}")
    build("kl.loss.coef=0.1", "kl.loss.estimator=exact", "guard.max_kl=0.1")


def test_diverging_run_stops_with_its_exit_code(tmp_path, capsys):
    # The first update is finite, and moves the policy; the KL term of the second is beyond float32.
    config = (
        *("configs/smoke.yaml", f"output={tmp_path}", "kl.loss.coef=3e38", "steps=9", "guard.max_skipped=3"),
        "guard.max_token_kl=1e-12",
        *("warm_start.steps=0", "eval={every: 9, prompts: 2, batch_size: 2, greedy: false}"),
    )
    with shared_by_runs():
        assert main(config) == 3
        text = capsys.readouterr().err
        assert "guard.max_skipped: 3 updates in a row were skipped" in text
        assert re.search(r"because the norm of the gradient of params\.\S+ is not finite; the batch is in ", text)
        named = (
            r"token \d of the \d sampled in row \d+, '\S+=': id \d+ \(.+\), log-prob -\S+ under the policy, -\S+ under"
        )
        assert re.search(
            rf"warning: step \d: guard\.max_token_kl: .*; the largest is \S+ at {named} the (reference|sampler)", text
        )
        records = [json.loads(line) for line in (tmp_path / "smoke" / "metrics.jsonl").read_text().splitlines()]
        steps = [record for record in records if record["phase"] == "train"]
        assert steps[-1]["skipped_updates"] == 1
        assert steps[0]["skipped_updates"] < 1
        assert len(steps) < 9
        assert list((tmp_path / "smoke" / "nonfinite").iterdir())
        # It counts anew: two batches of two updates.
        assert main([*config, "--resume"]) == 3
        assert "updates in a row were skipped" in capsys.readouterr().err


def test_loss_without_a_gradient_is_told_once(watch_of, capsys, tmp_path):
    (tmp_path / "mine.py").write_text("def loss(log_probs, advantages, mask):\n    return 0 * log_probs\n")
    watch, state = watch_of(f"loss={tmp_path / 'mine.py'}:loss")
    watch.check(at(state, 1), VALUES | {"updates_without_gradient": 0.0})
    assert not capsys.readouterr().err
    for step in (2, 3):
        watch.check(at(state, step), VALUES | {"updates_without_gradient": 0.5})
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"warning: loss\.type: .*mine\.py:loss: an update of step 2 had no gradient from it, .*", line)
