"""Steps with corrections: a lagged sampler, continued from a checkpoint; and completions that a real vLLM drew."""

import jax
import numpy as np

from tests import tiny
from tests.goldens.vllm import record
from tests.train.rollouts.fake_server import serving
from tests.train.rollouts.test_vllm import EXCHANGES, ReplayedServer
from train.config.schema import Checkpoint
from train.rl.preparation import make_preparation
from train.rl.reference import FrozenWeights
from train.rl.step import make_score
from train.rollouts.server import Client
from train.run.loop import rl_step
from train.run.programs import Programs
from train.weights.orbax import RunCheckpoints

LAGGED = tiny.config_of(
    "rollout.policy_lag=1",
    "correction=[{type: rejection_mask, upper: 1.02}, {type: importance_weights, upper: 1.01}]",
    "rollout.mismatch_by_position=2",
    "optim.learning_rate=3e-2",
    "loss.entropy_coef=0.1",  # moves the policy also where all rewards are equal
)


def test_corrected_steps_compile_once_and_continue_equally(tmp_path):
    context = tiny.context_of(LAGGED)
    with jax.set_mesh(context.mesh):
        state = tiny.state_of(LAGGED, context.optimizer)
        programs, stream = Programs.of(context, state), tiny.stream_of(context)
        compilations: list[str] = []
        jax.monitoring.register_event_duration_secs_listener(lambda event, _, **__: compilations.append(event))

        def steps(state, number):
            metrics = []
            for step in range(int(state.step), int(state.step) + number):
                state, values, _ = rl_step(context, programs, stream, FrozenWeights(None, None), state, step=step)
                metrics.append(values)
            return state, metrics

        state, first = steps(state, 2)
        checkpoints = RunCheckpoints(tmp_path, Checkpoint())
        checkpoints.save(state, 2)
        checkpoints.wait()
        restored = checkpoints.restore_last(state)
        checkpoints.close()
        compilations.clear()
        full, metrics = steps(state, 1)
        assert not [event for event in compilations if "compile" in event]
        continued, again = steps(restored, 1)
    assert again == metrics
    jax.tree.map(np.testing.assert_array_equal, continued.trainable, full.trainable)
    # At the first step nothing has moved; then the trainer is one update ahead of the sampler.
    assert first[0]["mismatch_k3"] < 1e-9
    assert (first[0]["correction_rejected"], first[0]["correction_clipped"]) == (0, 0)
    assert 0 < first[1]["correction_rejected"] < 1
    assert 0 < first[1]["correction_clipped"] < 1
    assert first[1]["mismatch_k3"] > 1e-6
    parts = {"mismatch_k3_part_1_of_2", "mismatch_k3_part_2_of_2"}
    assert parts < first[1].keys()


def test_completions_of_vllm_are_weighted_by_default():
    replay = ReplayedServer(EXCHANGES["lora"])
    with serving(replay) as url:
        client = Client(timeout=20, retries=0)
        (context, completions_of_lora, completions), (_, other, _) = record.play("lora", client, url)
        client.close()
    (entry,) = context.config.correction
    assert (entry.type, entry.max_weight) == ("truncated_importance_weights", 2.0)
    rollout = tiny.rollout_of(context, completions)
    score = make_score(context.plan, context.model, context.mesh)
    prepare, mask = jax.jit(make_preparation(context.plan)), np.asarray(rollout.batch.completion_mask)
    collected = {}
    with jax.set_mesh(context.mesh):
        for name, policy in (("own", completions_of_lora), ("other", other)):
            batch = score({"adapter": policy.adapter}, policy.params, None, rollout.batch)
            batch, _, metrics = prepare(batch, {})
            ratio = np.exp(np.asarray(batch.old_log_probs, float) - np.asarray(batch.rollout_log_probs, float))
            expected = np.where(mask, np.minimum(ratio, 2.0), 0)
            np.testing.assert_allclose(batch.correction_weights, expected, rtol=2e-5)
            collected[name] = {key: float(metric.value()) for key, metric in metrics.items()}
    # The trainer computes the log-probs of vLLM; with other weights it does not.
    assert collected["own"]["correction_clipped"] == 0
    assert abs(collected["own"]["mismatch_k1"]) < record.ALLOWED
    assert collected["own"]["correction_sample_size"] > 1 - 1e-6
    assert collected["other"]["correction_clipped"] > 0
    assert collected["other"]["correction_sample_size"] < 0.9
