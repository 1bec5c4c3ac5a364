"""Engines with weights: the endpoints of vLLM and SGLang as far as the trainer uses them, and routers in front."""

import contextlib
import http.client
import itertools
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import parse_qs, urlsplit

from tests.train.rollouts.fake_server import Answer, Digits, serving
from train.data.tokenizers import ByteTokenizer

PLAIN = "default"
"""The label of the weights that an engine starts with."""


class FakeEngine(Digits):
    """vLLM with one set of weights, which has the name of the folder that it was read from.

    Attributes:
      calls: paths of the control calls, in order.
      sampled: the weights of each completion after the probes, or its adapter.
      weights: of now.
      fails: what is answered to a path in place of its answer: a status, or None to close the connection.
      hangs: paths that are answered when `over` is set.
      down: whether every connection is closed without an answer.
      keeps_label: whether an update leaves the label as it is.
      pause_mode: the mode of pauses that is expected.
    """

    def __init__(self, *, disk: bool = True, labels: bool = True, tells_paused: bool = True) -> None:
        super().__init__(ByteTokenizer().eos_id)
        self.calls: list[str] = []
        self.sampled: list[str] = []
        self.fails: dict[str, int | None] = {}
        self.hangs: set[str] = set()
        self.over = threading.Event()
        self.down = self.keeps_label = False
        self.pause_mode = "wait"
        self._disk, self._labels, self._tells_paused = disk, labels, tells_paused
        self.restart()

    def restart(self) -> None:
        """Loses weights, label and adapters."""
        self.weights, self.label, self.adapters, self.paused = PLAIN, PLAIN, set(), False
        self._phase: str | None = None

    def __call__(self, path: str, body: dict) -> Answer:
        """One answer."""
        path, _, query = path.partition("?")
        if path in self.hangs:
            self.over.wait(30)
        if self.down:
            return None
        if path in self.fails:
            status = self.fails[path]
            return None if status is None else (status, json.dumps({"error": {"message": "it broke"}}))
        if path == "/v1/models":
            names = ["m", *sorted(self.adapters)]
            return 200, json.dumps({"data": [{"id": name, "owned_by": "vllm"} for name in names]})
        if path == "/v1/completions":
            return self._complete(body)
        if path not in ("/weight_info", "/is_paused", "/list_workers", "/workers"):
            self.calls.append(path)
        return self._control(path, body, parse_qs(query))

    def _complete(self, body: dict) -> Answer:
        assert not self.paused, "a request while the engine is paused"
        if body["model"] not in ("m", *self.adapters):
            return 404, json.dumps({"error": {"message": f"The model `{body['model']}` does not exist."}})
        if not body["ignore_eos"]:
            self.sampled.append(self.weights if body["model"] == "m" else body["model"])
        return super().__call__("/v1/completions", body)

    def _control(self, path: str, body: dict, query: Mapping[str, Sequence[str]]) -> Answer:
        done: dict = {}
        match path:
            case "/pause":
                assert query == {"mode": [self.pause_mode]}
                self.paused = True
            case "/resume":
                self.paused = False
            case "/is_paused" if self._tells_paused:
                done = {"is_paused": self.paused}
            case "/weight_info" if self._labels:
                done = {"weight_version": self.label}
            case "/update_weight_version" if self._labels:
                self.label = body["new_version"]
            case "/reset_prefix_cache":
                assert query == ({"reset_running_requests": ["true"]} if self.pause_mode == "keep" else {})
            case "/init_weight_transfer_engine":
                if not self._disk:
                    return 500, json.dumps({"error": {"message": "Weight transfer not configured."}})
                assert body == {"init_info": {}}
                done = {"message": "Weight transfer initialized"}
            case "/start_weight_update" if self._disk:
                assert self.paused
                assert self._phase is None
                self._phase = "started"
            case "/update_weights" if self._disk:
                assert self._phase == "started"
                self._phase, self.weights = "updated", body["update_info"]["path"].rpartition("/")[2]
            case "/finish_weight_update" if self._disk:
                assert self._phase == "updated"
                self._phase = None
                self.label = self.label if self.keeps_label else body["weight_version"]
            case "/collective_rpc":
                assert body["method"] == "reload_weights"
                self.weights = body["kwargs"]["weights_path"].rpartition("/")[2]
            case "/v1/load_lora_adapter":
                self.adapters.add(body["lora_name"])
            case "/v1/unload_lora_adapter":
                if body["lora_name"] not in self.adapters:
                    return 404, "{}"
                self.adapters.remove(body["lora_name"])
            case _:
                return 404, '{"detail":"Not Found"}'
        return 200, json.dumps(done)


class FakeSglang(FakeEngine):
    """SGLang, whose answers are those of its documentation and of `http_server.py`."""

    def _control(self, path: str, body: dict, query: Mapping[str, Sequence[str]]) -> Answer:
        done: dict = {"status": "ok"}
        match path:
            case "/pause_generation":
                assert body == {"mode": "retract"}
                self.paused = True
            case "/continue_generation":
                self.paused = False
            case "/update_weights_from_disk":
                assert self.paused
                assert body["flush_cache"] is True
                self.weights = body["model_path"].rpartition("/")[2]
                self.label = body["weight_version"]
                done = {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
            case "/update_weight_version":
                self.label = body["new_version"]
            case "/flush_cache":
                assert self.paused
            case "/model_info":
                done = {"model_path": "m", "tokenizer_path": "m", "is_generation": True, "weight_version": self.label}
            case "/load_lora_adapter":
                self.adapters.add(f"m:{body['lora_name']}")
                done = {"success": True, "error_message": "", "loaded_adapters": {}}
            case "/unload_lora_adapter":
                self.adapters.remove(f"m:{body['lora_name']}")
            case _:
                return 404, '{"detail":"Not Found"}'
        return 200, json.dumps(done)

    def __call__(self, path: str, body: dict) -> Answer:
        """One answer; the label of the weights is with the completions."""
        answer = super().__call__(path, body)
        if answer is None or answer[0] != 200:
            return answer
        if path == "/v1/models":
            return 200, json.dumps({"data": [{"id": "m", "owned_by": "sglang"}]})
        if path == "/v1/completions":
            return 200, json.dumps(json.loads(answer[1]) | {"metadata": {"weight_version": self.label}})
        return answer


class FakeRouter:
    """Sends each request to the next server, as vLLM's router does with its policy `round_robin`.

    With `policy` "first" all requests but completions go to the first one, as with its policy `cache_aware`. Without
    `lists` it does not tell its servers, as a balancer of connections.
    """

    def __init__(self, urls: Sequence[str], *, policy: str = "next", lists: bool = True) -> None:
        self.urls, self._policy, self._lists, self._turns = list(urls), policy, lists, itertools.count()
        self._lock = threading.Lock()

    def __call__(self, path: str, body: dict) -> Answer:
        """One answer, of a server or of its own."""
        if self._lists and path == "/list_workers":
            return 200, json.dumps({"urls": self.urls})
        if self._lists and path == "/workers":
            return 200, json.dumps({"workers": [{"url": url} for url in self.urls], "total": len(self.urls)})
        if self._lists and path.startswith("/remove_worker?url="):
            self.urls.remove(path.partition("=")[2])
            return 200, "Successfully removed worker"
        with self._lock:
            turn = next(self._turns) if self._policy == "next" or path == "/v1/completions" else 0
        parts = urlsplit(self.urls[turn % len(self.urls)])
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 0, timeout=10)
        with contextlib.closing(connection):
            connection.request("POST", path, json.dumps(body) if body else None)
            response = connection.getresponse()
            return response.status, response.read().decode()


@contextlib.contextmanager
def serving_all(engines: Sequence[FakeEngine]) -> Iterator[list[str]]:
    """The addresses of engines."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(serving(engine)) for engine in engines]
        for engine in engines:
            engine.over.set()
