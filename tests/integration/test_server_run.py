"""The real command with a server whose answers go wrong in the middle of a run: exit code, message, and the resume."""

import json

from tests.integration.command import records, run_here
from tests.train.rollouts.fake_server import PROBES, Answer, Digits, serving
from train.data.tokenizers import ByteTokenizer

MODEL = "model={layers: 1, width: 16, heads: 2, kv_heads: 1, head_dim: 8, mlp_width: 24}"
SOURCE = "rollout.source={{type: openai, url: '{}', model: m, sync: none, retries: 0}}"
EVAL = "eval={every: 2, prompts: 4, batch_size: 4, greedy: false}"
SMALL = (MODEL, "steps=2", "warm_start.steps=0", EVAL, "rollout.prompts_per_step=2")
ROWS = 2 * 4


class Loud(Digits):
    """Its log-probs are above 0 from the second step on, until it is repaired."""

    repaired = False

    def __call__(self, path: str, body: dict) -> Answer:
        status, text = super().__call__(path, body)
        if len(self.bodies) > PROBES + ROWS and not self.repaired:
            answer = json.loads(text)
            for choice in answer["choices"]:
                choice["logprobs"]["token_logprobs"] = [3.0] * len(choice["token_ids"])
            text = json.dumps(answer)
        return status, text


def test_run_ended_by_a_server_can_be_resumed(tmp_path):
    server = Loud(ByteTokenizer().eos_id)
    with serving(server) as url:
        # One address, so that both runs share their programs.
        arguments = ("configs/smoke.yaml", *SMALL, SOURCE.format(url), f"output={tmp_path}")
        broken = run_here(*arguments)
        server.repaired = True
        resumed = run_here(*arguments, "--resume")
    assert broken.returncode == 2
    assert broken.stderr.splitlines()[-2:] == [
        "error: rollout.source: logprobs.token_logprobs of the answer: got 3.0, expected numbers that are at most 0 "
        "(to 0.001, for rounding), or null",
        "The run is saved after step 1; continue it with --resume",
    ]
    assert [record["step"] for record in records(resumed.succeeded().root, "train")] == [1, 2]


class Copies(Digits):
    """Gives all requests the tokens of one seed."""

    def _choice(self, body: dict) -> dict:
        count = body["max_tokens"]
        log_probs = {"token_logprobs": [-5.6] * count}
        return {"index": 0, "token_ids": [ord("7")] * count, "logprobs": log_probs, "finish_reason": "length"}


def test_equal_completions_end_a_run(tmp_path):
    """They would train nothing, with an exit code of 0."""
    with serving(Copies(ByteTokenizer().eos_id)) as url:
        ended = run_here("configs/smoke.yaml", *SMALL, SOURCE.format(url), f"output={tmp_path}")
    assert ended.returncode == 2
    error, last = ended.stderr.splitlines()[-2:]
    assert error.startswith(
        "error: rollout: in each of the 2 groups of the step all 4 completions are equal, by chance"
    )
    assert "one seed for all of them, answers from a cache" in error
    assert last == "The run is saved after step 0; continue it with --resume"


class Floors(Digits):
    """Writes -9999 where a log-prob would be minus infinity, in the first answer of a step."""

    def __call__(self, path: str, body: dict) -> Answer:
        status, text = super().__call__(path, body)
        if (len(self.bodies) - PROBES) % ROWS != 1:
            return status, text
        answer = json.loads(text)
        answer["choices"][0]["logprobs"]["token_logprobs"][0] = -9999.0
        return status, json.dumps(answer)


def test_one_floor_is_left_out_of_a_run(tmp_path):
    """It would be all of the gradient: with `kl.rollout` the loss was 41,609, and `rollout_kl` null."""
    with serving(Floors(ByteTokenizer().eos_id)) as url:
        run = run_here("configs/smoke.yaml", *SMALL, SOURCE.format(url), f"output={tmp_path}").succeeded()
    assert (
        "warning: step 1: 6.25% of the sampled tokens have no log-prob of the sampler (null, or a floor" in run.stderr
    )
    for record in records(run.root, "train"):
        assert record["log_probs_missing"] == 1 / (2 * ROWS)
        assert 0 < record["rollout_kl"] < record["rollout_kl_max"] < 100
        assert abs(record["loss"]) < 1
