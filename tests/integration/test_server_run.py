"""The real command with a server whose answers go wrong in the middle of a run: exit code, message, and the resume."""

import json

from tests.integration.command import records, run_here
from tests.train.rollouts.fake_server import Answer, Digits, serving
from train.data.tokenizers import ByteTokenizer

MODEL = "model={layers: 1, width: 16, heads: 2, kv_heads: 1, head_dim: 8, mlp_width: 24}"
SOURCE = "rollout.source={{type: openai, url: '{}', model: m, sync: none, retries: 0}}"
EVAL = "eval={every: 2, prompts: 4, batch_size: 4, greedy: false}"
SMALL = (MODEL, "steps=2", "warm_start.steps=0", EVAL, "rollout.prompts_per_step=2")
PROMPTS = 2


class Loud(Digits):
    """Its log-probs are above 0 from the second step on, until it is repaired."""

    repaired = False

    def __call__(self, path: str, body: dict) -> Answer:
        status, text = super().__call__(path, body)
        if len(self.bodies) > 1 + PROMPTS and not self.repaired:
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
        "error: rollout.source: logprobs.token_logprobs of the answer: got 3.0, expected finite numbers that are at "
        "most 0 (to 0.001, for rounding) and at least -10000",
        "The run is saved after step 1; continue it with --resume",
    ]
    assert [record["step"] for record in records(resumed.succeeded().root, "train")] == [1, 2]
