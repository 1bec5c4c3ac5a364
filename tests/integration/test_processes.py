"""The real command in several real processes: ahead of the update, stopped by one error, and refused."""

import json

import pytest
from pyarrow import parquet

from tests import exactness, peers
from tests.integration.command import records, run_here
from tests.integration.test_shipped_configs import CALCULATOR
from tests.train.rollouts.episodes.test_server_turns import Talking
from tests.train.rollouts.fake_engines import FakeEngine, serving_all
from tests.train.rollouts.fake_environment import environment_of
from tests.train.rollouts.fake_server import PROBES, Answer, Digits, serving
from train.data.tokenizers import ByteTokenizer

TINY = (
    *exactness.COMMON,
    "warm_start={steps: 10, batch_size: 16, learning_rate: 1e-2}",
    "eval={prompts: 8, batch_size: 8, every: 2}",
    "checkpoint={every: 2, keep: 10}",
    "reference={source: ema, decay: 0.9}",
    "kl={loss: {coef: 0.1}}",
)
# As little as a run can have: it is about its end.
LEAST = (
    "model.layers=1",
    "warm_start.steps=0",
    "eval={prompts: 8, batch_size: 8, greedy: false}",
    "reference={source: step, step: 0}",
    "kl={loss: {coef: 0.0}, rollout: {coef: 0.0}}",
    "optim={updates_per_batch: 1, micro_batches: 1}",
)


def train(env, *arguments: object, mesh: str) -> list[tuple[int, str, str]]:
    """Runs the tiny config in two processes of one device each."""
    return peers.run("train", *TINY, f"mesh={mesh}", *arguments, processes=2, devices=1, env=env)


@pytest.mark.thorough
def test_processes_take_log_probs_computed_by_each_other(env, tmp_path):
    """Over three epochs of a recording, shuffled, so that rows change processes; one process scores every batch."""
    rows = tmp_path / "rows.jsonl"
    completions = [(group, sample) for group in range(16) for sample in range(4)]
    rows.write_text(
        "".join(
            json.dumps(
                {
                    "prompt_ids": [*[1] * (1 + group % 3), group],
                    "completion_ids": [40 + sample, *[50 + group] * (group % 3)],
                    "group": group,
                    "reward": (group + sample) % 5 / 4,
                }
            )
            + "\n"
            for group, sample in completions
        )
    )
    options = ("warm_start.steps=0", "rollout.slots=null", "steps=6", "reference={source: base}")

    def source(mib: int) -> str:
        return f"rollout.source={{type: file, path: {rows}, max_reference_mib: {mib}}}"

    ended = train(env, *options, source(1), f"output={tmp_path}/two", mesh="{data: 2}")
    for code, out, err in ended:
        assert code == 0, f"{out}\n{err}"
    run_here(*TINY, *options, source(0), "mesh={data: 2}", f"output={tmp_path}/one").succeeded()
    first, second = (records(tmp_path / name / "quickstart", "train") for name in ("one", "two"))
    assert all(record["kl_reference"] > 1e-9 for record in first[1:])
    assert first == second


@pytest.mark.thorough
def test_one_process_continues_the_batch_saved_by_two(env, tmp_path):
    """Each process requests the completions of its own prompts; the digits of the server depend on its seeds alone."""
    eos, shape = ByteTokenizer().eos_id, "rollout.prompts_per_step=4"
    server = Digits(eos)
    with serving(server) as url:
        ahead = (
            *("rollout.ahead=1", shape, "warm_start.steps=0", "rollout.slots=null"),
            f"rollout.source={{type: openai, url: '{url}', model: m, sync: none, retries: 0}}",
        )
        begun = train(env, *ahead, "steps=2", f"output={tmp_path}/two", mesh="{data: 2}")
        for code, out, err in begun:
            assert code == 0, f"{out}\n{err}"
        run_here(*TINY, *ahead, "mesh={}", "steps=3", f"output={tmp_path}/one").succeeded()
        requests = len(server.bodies)
        run_here(*TINY, *ahead, "mesh={}", "steps=3", f"output={tmp_path}/two", "--resume").succeeded()
    # Requests to look at the server, and one batch: that of step 4, for which another run would go on.
    assert len(server.bodies) - requests == PROBES + 4 * 4
    first, second = (records(tmp_path / name / "quickstart", "train") for name in ("one", "two"))
    # Nobody knows the version of the weights that the server keeps.
    assert not any("rollout_lag" in record for record in first + second)
    for name in ("reward", "completion_length", "finished"):
        assert [record[name] for record in first] == [record[name] for record in second]


@pytest.mark.slow
def test_error_of_one_process_ends_both_and_saves(env, tmp_path):
    """The reward function fails on one prompt, in a row of process 1, at the second step."""
    (tmp_path / "judge.py").write_text(
        "import jax\n"
        "calls = 0\n"
        "def one(record, completion, finished):\n"
        "    global calls\n"
        "    calls += 1\n"
        "    if jax.process_index() == 1 and calls > 30:\n"
        "        raise ValueError('no judge today')\n"
        "    return 1.0\n"
    )
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{number}+1="}) + "\n" for number in range(8)))
    recorded = tmp_path / "recorded.jsonl"
    texts = [{"prompt": f"{group}+1=", "completion": str(sample)} for group in range(8) for sample in range(4)]
    recorded.write_text("".join(json.dumps(row) + "\n" for row in texts))
    task = (
        f"rollout.source={{type: file, path: {recorded}}}",
        *("task=jsonl", f"data.train={rows}", f"data.eval={rows}", f"data.reward={tmp_path}/judge.py:one"),
        *("data.max_prompt_length=7", "data.max_completion_length=3", "rollout.slots=null", "rewards.workers=0"),
    )
    ended = train(env, *task, *LEAST, "steps=9", f"output={tmp_path}", mesh="{data: 2}")
    for code, _, err in ended:
        assert code == 2, err
        assert "error: process 1 of 2: " in err
        assert "no judge today" in err
        assert "The run is saved after step 1; continue it with --resume" in err
        assert "Traceback" not in err
    assert (tmp_path / "quickstart" / "checkpoints" / "1").is_dir()
    # Both processes have judged rows of the recorded groups.
    described = parquet.read_table(tmp_path / "quickstart" / "rollouts" / "00000001.parquet").to_pylist()
    assert len({row["row"] // 4 for row in described}) > 1
    for row in described:
        assert row["completion"] == str(row["row"] % 4)
        sampled = "".join(row["token_texts"][len(row["prompt_ids"]) :])
        assert sampled.removesuffix("<eos>") == row["completion"]


@pytest.mark.slow
def test_data_missing_in_one_process_end_both(env, tmp_path):
    (tmp_path / "problems.py").write_text(
        "import jax\n"
        "from train.config.errors import UserError\n"
        "from train.data.tasks import Example, Task\n"
        "def numbers():\n"
        "    if jax.process_index() == 1:\n"
        "        raise UserError('no disk here')\n"
        "    return Task('numbers', [Example('1', '1', '1')] * 8, [Example('1', '1', '1')], score)\n"
        "def score(example, completion, finished):\n"
        "    return {'reward': 1.0}\n"
    )
    task = (f"task={tmp_path}/problems.py:numbers", "data.max_prompt_length=7", "data.max_completion_length=3")
    for code, _, err in train(env, *task, *LEAST, f"output={tmp_path}/runs", mesh="{data: 2}"):
        assert code == 2, err
        assert "error: process 1 of 2: no disk here" in err
    assert not (tmp_path / "runs").exists()


@pytest.mark.thorough
def test_processes_with_other_configs_write_nothing(env, tmp_path):
    address = f"127.0.0.1:{peers.free_port()}"
    flags = [("--coordinator", address, "--process", number, "--processes", 2) for number in range(2)]
    with (
        peers.started("train", *TINY, f"output={tmp_path}", *flags[0], processes=1, devices=1, env=env) as first,
        peers.started(
            "train", *TINY, "seed=7", f"output={tmp_path}", *flags[1], processes=1, devices=1, env=env
        ) as other,
    ):
        both = [*first, *other]
        peers.wait(both, 120)
        for peer in both:
            assert peer.returncode == 2
            assert "error: seed: process 0 has 1, process 1 has 7; start all processes with the same" in peer.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.thorough
def test_two_processes_send_weights_once_to_each_engine(env, tmp_path):
    """The leader speaks to the engines; one that fails its second update is left out by both processes."""

    class FailsLater(FakeEngine):
        def __call__(self, path: str, body: dict) -> Answer:
            if path == "/update_weights" and self.calls.count("/pause") == 2:
                return 500, "{}"
            return super().__call__(path, body)

    engines = [FakeEngine(), FailsLater()]
    with serving_all(engines) as urls:
        pool = f"urls: [{', '.join(urls)}], on_engine_failure: drop"
        options = (
            *("rollout.prompts_per_step=4", "warm_start.steps=0", "rollout.slots=null", "model.tie_embeddings=false"),
            f"rollout.source={{type: openai, {pool}, model: m, retries: 0}}",
        )
        ended = train(env, *options, "steps=3", f"output={tmp_path}", mesh="{data: 2}")
    for code, out, err in ended:
        assert code == 0, f"{out}\n{err}"
    assert [record["rollout_engines"] for record in records(tmp_path / "quickstart", "train")] == [2, 1, 1]
    assert [len(dict.fromkeys(engine.sampled)) for engine in engines] == [3, 1]
    assert [engine.calls.count("/finish_weight_update") for engine in engines] == [3, 1]


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", ["{data: 2}", "{tensor: 2}"])
def test_processes_run_the_episodes_of_their_own_prompts(env, tmp_path, mesh):
    """As one process does, also where both hold all rows; the last held-out prompt has the rows of one alone."""
    (tmp_path / "mine.py").write_text(
        "from train.data.environments.calculator import Calculator\n"
        "class Failing(Calculator):\n"
        "    def reset(self, prompt):\n"
        "        if sum(map(ord, prompt)) % 4 == 0:\n"
        "            raise ConnectionError('no answer')\n"
    )
    options = (
        *CALCULATOR,
        "model.kv_heads=2",
        "warm_start={steps: 30, batch_size: 8}",
        "rollout={prompts_per_step: 4, samples_per_prompt: 2}",
        "eval={every: 1, prompts: 5, batch_size: 4}",
        "data.arguments={problems: 40, held_out: 5, wrong: 0.5}",
        f"environment={{name: '{tmp_path}/mine.py:Failing', max_turns: 3, max_failures: 1.0}}",
    )
    sampling = "rollout.mesh={data: 2, tensor: 1}"
    arguments = (*options, f"mesh={mesh}", sampling, f"output={tmp_path}/two")
    for code, out, err in peers.run("train", *arguments, processes=2, devices=1, env=env):
        assert code == 0, f"{out}\n{err}"
    run_here(*options, f"output={tmp_path}/one").succeeded()
    failed = 0
    for phase in ("train", "eval"):
        one, two = (records(tmp_path / name / "calculator", phase) for name in ("one", "two"))
        names = [name for name in one[0] if name.startswith("episode")]
        for name in ("step", "reward" if phase == "train" else "accuracy", *names):
            assert [record[name] for record in one] == [record[name] for record in two], name
        failed += sum(record["episodes_failed_exception"] for record in one)
    assert failed


@pytest.mark.thorough
def test_processes_ask_servers_for_the_turns_of_their_own_episodes(env, tmp_path):
    (tmp_path / "mine.py").write_text(environment_of("{text}+", reward=0.25, steps=3))

    class NumberingServer(Talking):
        def _choice(self, body: dict) -> dict:
            choice = super()._choice(body)
            if not body["ignore_eos"]:
                choice["token_ids"][1] = ord(str(len(self.prompts) % 10))
            return choice

    engines = [NumberingServer(), NumberingServer()]
    with serving_all(engines) as urls:
        options = (
            *("rollout.prompts_per_step=4", "warm_start.steps=0", "rollout.slots=null", "model.tie_embeddings=false"),
            f"rollout.source={{type: openai, urls: [{', '.join(urls)}], model: m, retries: 0}}",
            f"environment={{name: '{tmp_path}/mine.py:Steps', max_turns: 3}}",
            *("data.max_completion_length=24", "eval.prompts=0", "steps=2"),
        )
        ended = train(env, *options, f"output={tmp_path}", mesh="{data: 2}")
    for code, out, err in ended:
        assert code == 0, f"{out}\n{err}"
    for record in records(tmp_path / "quickstart", "train"):
        assert (record["episode_turns"], record["rollout_engines"]) == (3, 2)
    assert [len(engine.prompts) for engine in engines] == [2 * 4 * 4 * 3 // 2] * 2


@pytest.mark.slow
def test_unchanged_config_continues_on_fewer_processes(env, tmp_path):
    """The axis of -1 has the two devices of two processes, and then the one device of one."""
    options = (*TINY, *LEAST, "mesh={data: -1}", "steps=2", "checkpoint={every: 1, keep: 10}", f"output={tmp_path}")
    options = (*options, "--resume-or-start")
    sizes = []
    for processes, more in ((2, ["steps=1"]), (1, [])):
        (code, out, err), *others = peers.run("train", *options, *more, processes=processes, devices=1, env=env)
        assert code == 0, f"{out}\n{err}"
        assert [other[0] for other in others] == [0] * (processes - 1)
        sizes += [line for line in out.splitlines() if line.startswith("mesh: ")]
    assert sizes == ["mesh: data=2 x fsdp=1 x tensor=1", "mesh: data=1 x fsdp=1 x tensor=1"]
    assert [record["step"] for record in records(tmp_path / "quickstart", "train")] == [1, 2]
