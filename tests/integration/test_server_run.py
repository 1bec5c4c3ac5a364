"""The real command with a server whose answers go wrong in the middle of a run: exit code, message, and the resume."""

import json

from tests.integration.command import Run, records, run_here
from tests.train.rollouts.fake_server import Answer, Digits, serving
from train.data.tokenizers import ByteTokenizer

MODEL = "model={layers: 1, width: 16, heads: 2, kv_heads: 1, head_dim: 8, mlp_width: 24}"
SOURCE = "rollout.source={{type: openai, url: '{}', model: m, sync: none, retries: 0}}"
SMALL = (MODEL, "steps=2", "eval.every=2", "eval.prompts=4", "eval.batch_size=4", "rollout.prompts_per_step=2")
PROMPTS = 2


class Loud(Digits):
    """Its log-probs are above 0 from the second step on."""

    def __call__(self, path: str, body: dict) -> Answer:
        status, text = super().__call__(path, body)
        if len(self.bodies) > 1 + PROMPTS:
            answer = json.loads(text)
            for choice in answer["choices"]:
                choice["logprobs"]["token_logprobs"] = [3.0] * len(choice["token_ids"])
            text = json.dumps(answer)
        return status, text


def test_a_run_that_a_server_ends_is_saved_and_goes_on(tmp_path):
    def command(server: Digits, *options: str) -> Run:
        with serving(server) as url:
            return run_here("configs/smoke.yaml", *SMALL, SOURCE.format(url), f"output={tmp_path}", *options)

    eos = ByteTokenizer().eos_id
    broken = command(Loud(eos))
    assert broken.returncode == 2
    assert broken.stderr.splitlines()[-2:] == [
        "error: rollout.source: logprobs.token_logprobs of the answer: got 3.0, expected finite numbers that are at "
        "most 0 (to 0.001, for rounding)",
        "The run is saved after step 1; continue it with --resume",
    ]
    finished = command(Digits(eos), "--resume").succeeded()
    assert [record["step"] for record in records(finished.root, "train")] == [1, 2]
