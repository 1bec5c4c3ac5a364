"""Several engines: each gets every weight, none samples from old ones, and a failing one is named."""

import asyncio
import contextlib
import dataclasses
import functools
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence

import httpx
import pytest

import kljax
from tests.goldens.vllm import tiny
from tests.tiny import sampled
from tests.train.rollouts.fake_engines import PLAIN, FakeEngine, FakeRouter, FakeSglang, serving_all
from tests.train.rollouts.fake_server import Answer, serving
from train.config.errors import UserError
from train.config.plan import Plan
from train.context import RunContext
from train.distributed.exchange import run_together
from train.rollouts.open import open_source
from train.rollouts.server import Client, ServerSource
from train.rollouts.server.client import wait_for
from train.rollouts.server.engines import Engines
from train.rollouts.source import Completions, Request, SourceError

ROWS = len(tiny.PROMPTS) * tiny.SAMPLES
WEIGHTS = ("model.tie_embeddings=false",)
PHASES = ["/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"]


@functools.cache
def shared_context(*options: str) -> RunContext:
    return tiny.context_of(tiny.config_of("http://unused", *options))


policy_of = functools.cache(lambda options, number: tiny.policy_of(shared_context(*options), number))


@contextlib.contextmanager
def opened(addresses: str, *options: str, timeout: float = 2.0) -> Iterator[tuple[RunContext, ServerSource]]:
    options = options or WEIGHTS
    source = f"rollout.source={{type: openai, model: m, retries: 0, timeout: {timeout}, {addresses}}}"
    plan = Plan.of(tiny.config_of("http://unused", source, *options))
    context = dataclasses.replace(shared_context(*options), plan=plan)
    with contextlib.closing(open_source(context)) as source:
        yield context, source


def policy(context: RunContext, number: int) -> kljax.Policy:
    """The policy of a step."""
    return policy_of(WEIGHTS if context.config.lora is None else (tiny.LORA,), number)


def step(context: RunContext, source: ServerSource, number: int) -> Completions:
    """Sends the weights of a step, and samples with them."""
    source.update(policy(context, number), number)
    return sampled(context, source, Request.of(context, number))


def in_list(urls: Sequence[str]) -> str:
    return f"urls: [{', '.join(urls)}]"


def versions(engine: FakeEngine) -> list[str]:
    """The steps of the weights that completions came from, without repeats."""
    return [name.split("-")[1] if "-" in name else name for name in dict.fromkeys(engine.sampled)]


@pytest.fixture
def engines():
    return [FakeEngine(), FakeEngine()]


# One address with several servers behind it.


@pytest.mark.parametrize("policy", ["next", "first"])
@pytest.mark.parametrize("options", [WEIGHTS, (tiny.LORA,)])
def test_router_as_the_server_is_refused(engines, policy, options):
    with (
        serving_all(engines) as urls,
        serving(FakeRouter(urls, policy=policy)) as router,
        pytest.raises(
            UserError, match=r"url: got the address of a router with 2 servers; .*source\.urls, and set"
        ) as caught,
        opened(f"url: '{router}'", *options) as (context, source),
    ):
        step(context, source, 0)
    assert f"rollout.source.router={router}" in str(caught.value)


@pytest.mark.parametrize("made", [{}, {"disk": False}, {"disk": False, "tells_paused": False}, {"labels": False}])
def test_silent_balancer_is_refused_at_the_update(made):
    """Only one of its engines is paused, or their weights differ after the update."""
    engines = [FakeEngine(**made), FakeEngine(**made)]
    with (
        serving_all(engines) as urls,
        serving(FakeRouter(urls, lists=False)) as balancer,
        opened(f"url: '{balancer}'") as (context, source),
        pytest.raises(SourceError, match=r"in rollout\.source\.urls, and set rollout\.source\.router"),
    ):
        step(context, source, 0)
    assert not [*engines[0].sampled, *engines[1].sampled]


def test_adapter_behind_a_silent_balancer_is_refused(engines):
    with (
        serving_all(engines) as urls,
        serving(FakeRouter(urls, lists=False)) as balancer,
        opened(f"url: '{balancer}'", tiny.LORA) as (context, source),
        pytest.raises(SourceError, match=r"has the weights .*no such adapter.*rollout\.source\.urls"),
    ):
        step(context, source, 0)


def test_router_without_weights_to_send_is_accepted(engines):
    with (
        serving_all(engines) as urls,
        serving(FakeRouter(urls)) as router,
        opened(f"url: '{router}', sync: none") as (context, source),
    ):
        step(context, source, 0)
    assert [len(engine.sampled) for engine in engines] == [ROWS / 2, ROWS / 2]


def test_server_without_labels_is_warned_about_once(capsys):
    engine = FakeEngine(disk=False, labels=False, tells_paused=False)
    with serving(engine) as url, opened(f"url: '{url}'") as (context, source):
        for number in range(2):
            assert step(context, source, number).metrics == {}
    assert capsys.readouterr().err.count("does not tell which weights it has") == 1
    assert versions(engine) == ["0", "1"]


# Several addresses.


@pytest.mark.parametrize("routed", [False, True])
@pytest.mark.parametrize("kind", ["phases", "reload", "lora", "sglang", "sglang lora"])
def test_every_engine_samples_from_every_update(kind, routed):
    made = {"phases": FakeEngine, "reload": lambda: FakeEngine(disk=False), "lora": FakeEngine}
    engines = [made.get(kind, FakeSglang)() for _ in range(2)]
    options = (tiny.LORA,) if kind.endswith("lora") else WEIGHTS
    with serving_all(engines) as urls, serving(FakeRouter(urls)) as router:
        addresses = in_list(urls) + (f", router: '{router}'" if routed else "")
        with opened(addresses, *options) as (context, source):
            for number in range(3):
                assert step(context, source, number).metrics == {"rollout_engines": 2.0}
    for engine in engines:
        assert versions(engine) == ["0", "1", "2"]
        assert len(engine.sampled) == 3 * ROWS / 2
        assert not engine.paused
        assert not engine.adapters
    if kind == "phases":
        update = ["/pause", *PHASES[1:], "/reset_prefix_cache", "/resume"]
        assert engines[0].calls == ["/pause", *PHASES, "/reset_prefix_cache", "/resume", *update, *update]
    if kind == "reload":
        later = ["/pause", "/collective_rpc", "/update_weight_version", "/reset_prefix_cache", "/resume"]
        assert engines[1].calls[-5:] == later


def test_no_engine_resumes_before_all_are_updated(engines):
    order = []

    class Ordered(FakeEngine):
        def __call__(self, path: str, body: dict) -> Answer:
            if path == "/update_weights" and self is slow:
                time.sleep(0.2)
            if path in ("/finish_weight_update", "/resume"):
                order.append(path)
            return super().__call__(path, body)

    slow, other = Ordered(), Ordered()
    with serving_all([slow, other]) as urls, opened(in_list(urls)) as (context, source):
        step(context, source, 0)
    assert order == ["/finish_weight_update"] * 2 + ["/resume"] * 2


def test_requests_go_to_the_least_busy_engine(engines):
    """One engine answers nothing until the other has answered all that one of two connections can take."""
    slow, quick = engines
    with serving_all(engines) as urls, opened(in_list(urls) + ", concurrency: 2") as (context, source):
        source.update(policy(context, 0), 0)
        slow.hangs.add("/v1/completions")
        timer = threading.Timer(0.5, lambda: (slow.hangs.clear(), slow.over.set()))
        timer.start()
        sampled(context, source, Request.of(context, 0))
        timer.join()
    assert (len(slow.sampled), len(quick.sampled)) == (1, ROWS - 1)


def asks_of(*bodies):
    """Requests with these bodies, whose answers are JSON."""
    return [lambda body=body: (body, json.loads) for body in bodies]


def test_all_requests_end_with_the_first_error():
    """The others are not waited for, and the connections can be used again."""
    done = threading.Event()

    def answer(path: str, body: dict) -> Answer:
        if body.get("wait"):
            done.wait(10)
        return (400, "no") if body.get("fail") else (200, json.dumps(body))

    began = time.monotonic()
    with serving(answer) as url, contextlib.closing(Client(timeout=30, retries=3)) as client:
        engines = Engines(client, tiny.config_of(url).rollout.source)
        asks = asks_of({"wait": True}, {"fail": True}, {"wait": True})
        with pytest.raises(SourceError, match=r"was refused with status 400: no$"):
            wait_for(engines.complete("/v1/x", asks, most_bytes=100))
        assert time.monotonic() - began < 5
        done.set()
        bodies = [{"number": number} for number in range(20)]
        assert wait_for(engines.complete("/v1/x", asks_of(*bodies), most_bytes=100)) == bodies


# An engine fails.

FAULTS = {
    "status 500 at finish": lambda engine: engine.fails.update({"/finish_weight_update": 500}),
    "no answer at pause": lambda engine: engine.fails.update({"/pause": None}),
    "dead": lambda engine: setattr(engine, "down", True),
    "hangs at update": lambda engine: engine.hangs.add("/update_weights"),
    "old label": lambda engine: setattr(engine, "keeps_label", True),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("action", ["stop", "drop"])
def test_engine_that_fails_an_update_is_named(engines, fault, action, capsys):
    pool = f", on_engine_failure: {action}"
    with serving_all(engines) as urls, opened(in_list(urls) + pool) as (context, source):
        step(context, source, 0)
        FAULTS[fault](engines[1])
        if action == "stop":
            with pytest.raises(SourceError, match=rf"{urls[1]}.*1 of 2 engines are left, set .*=drop"):
                step(context, source, 1)
            assert not engines[0].paused
            return
        for number in (1, 2):
            assert step(context, source, number).metrics == {"rollout_engines": 1.0}
    error = capsys.readouterr().err
    assert error.count(f"{urls[1]} is left out from now on, 1 of 2 servers remain: ") == 1
    assert versions(engines[0]) == ["0", "1", "2"]
    assert versions(engines[1]) == ["0"]


def test_last_engine_that_fails_ends_the_run(engines):
    with serving_all(engines) as urls, opened(in_list(urls) + ", on_engine_failure: drop") as (context, source):
        step(context, source, 0)
        for engine in engines:
            engine.down = True
        with pytest.raises(SourceError, match=rf"{urls[0]}.*{urls[1]}.*no engine is left"):
            step(context, source, 1)


def test_last_engine_that_loses_its_adapter_is_not_to_be_dropped(engines):
    pool = ", on_engine_failure: drop"
    with serving(engines[0]) as url, opened(in_list([url]) + pool, tiny.LORA) as (context, source):
        source.update(policy(context, 0), 0)
        engines[0].adapters.clear()
        with pytest.raises(SourceError, match="does not exist") as caught:
            sampled(context, source, Request.of(context, 0))
    assert "on_engine_failure" not in str(caught.value)


@pytest.mark.parametrize("options", [WEIGHTS, (tiny.LORA,)])
@pytest.mark.parametrize("event", ["restarts", "dies"])
@pytest.mark.parametrize("action", ["stop", "drop"])
def test_engine_lost_within_a_batch_gives_no_completion(options, event, action):
    """Its requests are repeated by the other engine: those that it answered after a restart too."""

    class Fragile(FakeEngine):
        def _complete(self, body: dict) -> Answer:
            if len(self.sampled) == ROWS // 2 + 1 and event == "restarts":
                self.restart()
            if len(self.sampled) == ROWS // 2 + 1 and event == "dies":
                self.down = True
                return None
            return super()._complete(body)

    engines = [FakeEngine(), Fragile()]
    pool = f", on_engine_failure: {action}"
    with serving_all(engines) as urls, opened(in_list(urls) + pool, *options) as (context, source):
        step(context, source, 0)
        if action == "stop":
            with pytest.raises(SourceError, match=rf"{urls[1]}.* set rollout\.source\.on_engine_failure=drop"):
                step(context, source, 1)
            return
        assert step(context, source, 1).metrics == {"rollout_engines": 1.0}
    assert len(engines[0].sampled) == ROWS // 2 + ROWS


def test_engine_restarted_without_its_adapter_gets_the_next(engines):
    with serving_all(engines) as urls, opened(in_list(urls), tiny.LORA) as (context, source):
        source.update(policy(context, 0), 0)
        engines[1].restart()
        step(context, source, 1)
    assert versions(engines[1]) == ["1"]


def test_engine_restarted_between_steps_gets_the_weights(engines):
    with serving_all(engines) as urls, opened(in_list(urls)) as (context, source):
        step(context, source, 0)
        engines[1].restart()
        step(context, source, 1)
    assert versions(engines[1]) == ["0", "1"]


@contextlib.contextmanager
def pool_of(answer, *names: str, options: str = "") -> Iterator[Engines]:
    """A pool that drops engines; a function gives the JSON of each answer from the name, the path and the body."""

    async def respond(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content or "{}")
        value = await answer(request.url.host, request.url.path, body)
        return httpx.Response(200, stream=httpx.ByteStream(json.dumps(value).encode()))

    addresses = in_list([f"http://{name}" for name in names]) + options
    source = f"rollout.source={{type: openai, model: m, retries: 0, on_engine_failure: drop, {addresses}}}"
    with contextlib.closing(Client(timeout=5, retries=0, transport=httpx.MockTransport(respond))) as client:
        yield Engines(client, tiny.config_of("http://unused", source).rollout.source)


def test_label_is_read_once_after_a_batch():
    asked: list[str] = []

    async def answer(name: str, path: str, body: dict) -> dict:
        asked.append(path)
        return {"weight_version": "new"}

    with pool_of(answer, "a", "b") as engines:
        engines.expect("new", 1)
        wait_for(engines.complete("/v1/x", asks_of({}), most_bytes=100))
        assert asked == ["/v1/x", "/weight_info"]


@pytest.mark.parametrize("names", [("a", "dead"), ("a", "b", "dead")])
def test_engine_that_several_batches_lose_is_dropped_once(names, capsys, monkeypatch):
    monkeypatch.setattr("train.rollouts.server.client.wait_before", lambda *_: 0.0)

    async def answer(name: str, path: str, body: dict) -> dict:
        await asyncio.sleep(0.01)
        if name == "dead":
            raise httpx.ConnectError("refused")
        return {"data": []}

    with pool_of(answer, *names) as engines:
        batches = [engines.complete("/v1/x", asks_of({}), most_bytes=100) for _ in range(6)]
        assert [wait_for(batch) for batch in batches] == [[{"data": []}]] * 6
        assert engines.urls == [f"http://{name}" for name in names[:-1]]
    assert capsys.readouterr().err.count("http://dead is left out") == 1


def test_router_is_checked_after_another_batch_took_an_engine_out():
    """Until then it may still answer with the weights of that engine."""
    routed = ["a", "b"]

    async def answer(name: str, path: str, body: dict) -> dict:
        await asyncio.sleep(0.01)
        if path == "/remove_worker":
            routed.remove("b")
        if path == "/list_workers":
            return {"urls": routed}
        if path == "/weight_info":
            is_old = name == "b" or (name == "router" and "b" in routed)
            return {"weight_version": "old" if is_old else "new"}
        return {"data": []}

    with pool_of(answer, "a", "b", options=", router: 'http://router'") as engines:
        engines.expect("new", 1)
        batches = [engines.complete("/v1/x", asks_of({}), most_bytes=100) for _ in range(2)]
        assert [wait_for(batch) for batch in batches] == [[{"data": []}]] * 2


def test_answers_of_an_engine_dropped_meanwhile_are_repeated():
    """One batch finds that `b` has other weights, while an answer of `b` to another is still to come."""
    is_dropped = asyncio.Event()

    async def answer(name: str, path: str, body: dict) -> dict:
        if path == "/weight_info":
            return {"weight_version": "new" if name == "a" else "old"}
        if body.get("slow") and name == "b":
            await is_dropped.wait()
        return {"from": name}

    with pool_of(answer, "a", "b") as engines:
        engines.expect("new", 1)
        batches = [engines.complete("/v1/x", asks_of(body), most_bytes=100, place=1) for body in ({}, {"slow": True})]
        assert wait_for(batches[0]) == [{"from": "a"}]
        assert engines.urls == ["http://a"]
        engines._client._loop.call_soon_threadsafe(is_dropped.set)
        assert wait_for(batches[1]) == [{"from": "a"}]


@pytest.mark.parametrize("event", ["fails the update", "restarts"])
def test_lost_engine_leaves_the_router(engines, event):
    with (
        serving_all(engines) as urls,
        serving(router := FakeRouter(urls)) as front,
        opened(in_list(urls) + f", router: '{front}', on_engine_failure: drop") as (context, source),
    ):
        step(context, source, 0)
        if event == "fails the update":
            engines[1].fails["/finish_weight_update"] = 500
        source.update(policy(context, 1), 1)
        if event == "restarts":
            engines[1].restart()
        sampled(context, source, Request.of(context, 1))
        assert router.urls == [urls[0]]
    assert engines[0].sampled[-ROWS:] == [engines[0].weights] * ROWS


def test_router_with_another_engine_is_refused(engines):
    """At the start if it tells its servers, else at the first update."""
    with serving_all([*engines, FakeEngine()]) as urls:
        with (
            serving(FakeRouter(urls)) as router,
            pytest.raises(UserError, match=r"has 3 servers, but rollout\.source\.urls has 2; list every server"),
            opened(in_list(urls[:2]) + f", router: '{router}'"),
        ):
            pass
        with (
            serving(FakeRouter(urls, lists=False)) as router,
            opened(in_list(urls[:2]) + f", router: '{router}'") as (context, source),
            pytest.raises(SourceError, match=rf"{router} has the weights .*{PLAIN}"),
        ):
            step(context, source, 0)


def test_completion_of_other_weights_is_an_error(engines):
    """SGLang tells them with each completion, vLLM for spans of tokens."""

    class Old(FakeSglang):
        def __call__(self, path: str, body: dict) -> Answer:
            answer = super().__call__(path, body)
            if answer is None or path != "/v1/completions" or self.label == PLAIN:
                return answer
            text = json.loads(answer[1]) | {"metadata": {"weight_version": "old"}}
            return 200, json.dumps(text)

    class OldTokens(FakeEngine):
        def _choice(self, body: dict) -> dict:
            spans = [{"version": version, "start": 0, "end": 1} for version in (self.label, "old")]
            return super()._choice(body) | ({"weight_versions": spans} if self.label != PLAIN else {})

    for kind in (Old, OldTokens):
        with (
            serving(kind()) as url,
            opened(f"url: '{url}'") as (context, source),
            pytest.raises(SourceError, match=rf"{url}.*weight_version of the answer: got .*old, expected .*-0-"),
        ):
            step(context, source, 0)


class Keeping(FakeEngine):
    """vLLM that freezes the requests under way: the first id is of the weights before, the others of those after."""

    def __init__(self, *, tells: bool = True) -> None:
        super().__init__()
        self.pause_mode = "keep"
        self.holds, self.begun, self.resumed = False, threading.Event(), threading.Event()
        self._tells = tells

    def __call__(self, path: str, body: dict) -> Answer:
        """One answer."""
        answer = super().__call__(path, body)
        if path == "/resume" and self.holds:
            self.resumed.set()
        return answer

    def _choice(self, body: dict) -> dict:
        before = self.label
        if self.holds:
            self.begun.set()
            assert self.resumed.wait(60)
        spans = [{"version": before, "start": 0, "end": 1}, {"version": self.label, "start": 1}]
        return super()._choice(body) | ({"weight_versions": spans} if self._tells else {})


def test_requests_under_way_keep_going_with_new_weights():
    engine = Keeping()
    with serving(engine) as url, opened(f"url: '{url}', in_flight: keep", timeout=60.0) as (context, source):
        step(context, source, 0)
        engine.holds = True
        source.start([Request.of(context, 1)])
        assert engine.begun.wait(60)
        source.update(policy(context, 1), 1)
        assert engine.resumed.is_set()
        completions = source.take().completions
    told = [
        row[mask] for row, mask in zip(completions.fields["token_versions"], completions.completion_mask, strict=True)
    ]
    assert {tuple(map(int, versions)) for versions in told} == {(0, 1)}


def test_kept_requests_need_the_versions_of_tokens():
    with (
        serving(Keeping(tells=False)) as url,
        opened(f"url: '{url}', in_flight: keep") as (context, source),
        pytest.raises(SourceError, match=r"weight_versions of the answer: got null, expected the spans of the tokens"),
    ):
        step(context, source, 0)
    with (
        serving(FakeSglang()) as url,
        opened(f"url: '{url}', in_flight: keep") as (context, source),
        pytest.raises(SourceError, match=r"rollout\.source\.in_flight: got keep, which needs vLLM"),
    ):
        step(context, source, 0)


def test_refusals_name_the_field(engines):
    with (
        serving_all([FakeEngine(), FakeSglang()]) as urls,
        pytest.raises(UserError, match=r"urls: got servers of SGLang and vLLM, expected one kind"),
        opened(in_list(urls)),
    ):
        pass
    with serving_all(engines) as urls:
        engines[1].down = True
        with (
            pytest.raises(SourceError, match=rf"rollout\.source\.urls: GET {urls[1]}/v1/models failed once"),
            opened(in_list(urls)),
        ):
            pass


def test_engine_lost_in_another_process_is_left_out(engines, monkeypatch):
    """Each process sends requests of its own; the leader alone sends weights."""
    with serving_all(engines) as urls, opened(in_list(urls) + ", on_engine_failure: drop") as (context, source):
        step(context, source, 0)
        monkeypatch.setattr(
            "train.rollouts.server.engines.exchange_json", lambda label, state: [state, [[urls[0]], []]]
        )
        assert step(context, source, 1).metrics == {"rollout_engines": 1.0}
        assert versions(engines[0]) == ["0"]
        monkeypatch.setattr(
            "train.rollouts.server.engines.exchange_json", lambda label, state: [state, [[urls[1]], []]]
        )
        with pytest.raises(SourceError, match=rf"urls: no engine is left; the last one to fail was {urls[1]}"):
            step(context, source, 2)


SENT: list[tuple[str, tuple[str, ...]]] = []


class _Bridge:
    def send(self, policy, version, urls):
        SENT.append((version, urls))

    def close(self):
        SENT.append(("closed", ()))


def bridge(context):
    return _Bridge()


def broken(context):
    made = _Bridge()
    made.send = lambda policy, version, urls: 1 / 0
    return made


@pytest.mark.parametrize(
    ("kind", "calls"),
    [
        (FakeEngine, ["/pause", "/update_weight_version", "/reset_prefix_cache", "/resume"]),
        (FakeSglang, ["/pause_generation", "/update_weight_version", "/flush_cache", "/continue_generation"]),
    ],
)
def test_caches_are_reset_after_a_transfer(kind, calls):
    engine = kind()
    with serving(engine) as url, opened(f"url: '{url}', sync: '{__name__}:bridge'") as (context, source):
        step(context, source, 0)
    assert [call for call in engine.calls if call != "/model_info"] == calls


def test_failure_to_resume_reaches_every_process(monkeypatch):
    """What runs together in all processes raises in all of them."""
    together: list[str] = []
    resumed = []

    def noting(label, function):
        together.append(label)
        try:
            return run_together(label, function)
        finally:
            together.pop()

    class Resumed(FakeEngine):
        def __call__(self, path: str, body: dict) -> Answer:
            if path == "/resume":
                resumed.append(bool(together))
            return super().__call__(path, body)

    monkeypatch.setattr("train.rollouts.server.weights.run_together", noting)
    with serving(Resumed()) as url, opened(f"url: '{url}', sync: '{__name__}:bridge'") as (context, source):
        source.update(policy(context, 0), 0)
    assert resumed == [True]


@pytest.mark.parametrize("sync", ["weights", f"{__name__}:bridge"])
def test_source_that_does_not_start_leaves_nothing(engines, sync, monkeypatch, tmp_path):
    SENT.clear()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    engines[0].fails["/v1/completions"] = 400
    with (
        serving(engines[0]) as url,
        pytest.raises(SourceError, match="it broke"),
        opened(f"url: '{url}', sync: '{sync}'"),
    ):
        pass
    assert len(SENT) == (sync != "weights")
    assert not [*tmp_path.iterdir()]


def test_adapters_of_a_lost_server_are_removed(engines, tmp_path):
    engine = engines[0]
    with serving(engine) as url, opened(f"url: '{url}', folder: '{tmp_path}'", tiny.LORA) as (context, source):
        source.update(policy(context, 0), 0)
        assert [*tmp_path.iterdir()]
        engine.down = True
    assert not [*tmp_path.iterdir()]


def test_function_sends_the_weights_of_paused_engines(engines):
    SENT.clear()
    with serving_all(engines) as urls:
        with opened(in_list(urls) + f", sync: '{__name__}:bridge'") as (context, source):
            step(context, source, 0)
        assert [names for _, names in SENT] == [tuple(urls), ()]
        assert [engine.label for engine in engines] == [SENT[0][0]] * 2
        with (
            opened(in_list(urls) + f", sync: '{__name__}:broken'") as (context, source),
            pytest.raises(SourceError, match=r"rollout\.source\.sync: .*:broken: send: ZeroDivisionError"),
        ):
            step(context, source, 0)
        assert not engines[0].paused
    assert Counter(engines[0].calls)["/update_weight_version"] == 1
