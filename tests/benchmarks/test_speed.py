"""The races of whole models: kljax's side really runs, tiny; the tables and the verdicts are of made-up numbers."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from benchmarks import rollout, train_step
from benchmarks.harness import environments, instructions, measure
from benchmarks.harness.report import ALL, ContenderResult, Measured
from benchmarks.harness.worker import Worker
from benchmarks.suites.model import kljax, problem, suite
from train.models.sharding import make_mesh

V = problem.QUICK.vocab


@pytest.fixture(scope="module")
def worker(tmp_path_factory) -> tuple[Worker, object]:
    """The worker of kljax, in this process."""
    directory = tmp_path_factory.mktemp("weights")
    kljax.save_weights(problem.QUICK, directory)
    actual = Worker(kljax.load)
    fields = {name: getattr(problem.QUICK, name) for name in problem.QUICK.__dataclass_fields__}
    assert actual.ask(do="load", work=fields, directory=str(directory), threads=0) is None
    return actual, directory


def test_weights_match_checkpoint_and_decoder_shapes(worker):
    weights = problem.load_weights(worker[1])
    assert {array.dtype.name for array in weights.values()} == {"float32"}
    assert len(weights) == 2 + 11 * problem.QUICK.layers
    assert weights["model.embed_tokens.weight"].shape == (V, 32)
    assert weights["model.layers.0.self_attn.q_norm.weight"].shape == (16,)
    assert weights["model.layers.1.mlp.down_proj.weight"].shape == (32, 48)
    params = kljax.params_of(problem.QUICK, weights)
    expected = kljax.abstract_params(kljax.model_of(problem.QUICK), make_mesh(1, 1, 1))
    assert jax.tree.map(np.shape, params) == jax.tree.map(lambda x: x.shape, expected)
    kernel = params["layers"]["mlp"]["down_proj"]["kernel"][1]
    np.testing.assert_array_equal(kernel, weights["model.layers.1.mlp.down_proj.weight"].T)


def test_rewards_differ_where_parities_do_not():
    """As those of the tiny model, whose group with equal rewards had no advantage and no update to compare."""
    first, second = problem.rewards(np.array([[23, 109, 13, 38, 138], [23, 50, 53, 20, 36]]))
    assert first.dtype == np.float32
    assert first != second


def test_update_moves_the_policy_and_runs_report_parts(worker):
    contender, directory = worker
    contender.ask(do="score", path=str(directory / "kljax.npy"))
    before = np.load(directory / "kljax.npy")
    assert before.shape == (4, 5)
    assert (before < 0).all()
    # As another trainer leaves it: its batch, and the log-probs after its update, which here are nobody's.
    tokens = problem.make_sequences(problem.QUICK)
    np.savez(directory / "learn.npz", tokens=tokens, advantages=np.float32([1, -1, 1, -1]), score=before)
    contender.ask(do="learn", path=str(directory / "learn.npz"))
    with np.load(directory / "learn.npz") as file:
        moved = file["ours"] - before
    assert 1e-5 < np.abs(moved).max() < 1
    # The rows that are scored are the ones that were trained: those with an advantage of 1 became likelier.
    assert (moved.sum(1)[::2] > 0).all()
    assert (moved.sum(1)[1::2] < 0).all()
    assert set(contender.ask(do="run", part="rollout")) == {"rollout"}
    seconds = contender.ask(do="run", part="step")
    assert set(seconds) == {"rollout", "update"}
    assert all(wall > 0 and cpu >= 0 for wall, cpu in seconds.values())
    assert set(contender.ask(do="peak", part="step")) <= {"rollout", "update"}


def test_a_wrong_rollout_or_request_is_an_error(worker, monkeypatch):
    contender, _ = worker
    monkeypatch.setattr(contender.contender, "rollout", lambda: np.full((4, 5), V))
    with pytest.raises(ValueError, match="ids of the vocabulary"):
        contender.ask(do="run", part="rollout")
    with pytest.raises(ValueError, match="expected load or one of"):
        contender.ask(do="fly")


def test_nested_part_is_counted_once(monkeypatch):
    now = iter(range(100))
    monkeypatch.setattr(measure.time, "perf_counter", lambda: float(next(now)))
    monkeypatch.setattr(measure.time, "process_time", lambda: 10.0)
    clock = measure.Clock()
    with clock.part("update"), clock.part("rollout"):
        pass
    monkeypatch.undo()
    # The clock is read at 0, 1, 2 and 3.
    assert clock.parts == {"rollout": (1.0, 0.0), "update": (2.0, 0.0)}


def test_memory_of_a_nested_part_is_separate():
    grown = measure.Memory()
    with grown.part("update"):
        with grown.part("rollout"):
            large = np.ones(2**23)
        del large
    if grown.parts:
        assert grown.parts["rollout"] > 2**25
        assert grown.parts["update"] < 2**24


def measured(tunix: ContenderResult | None = None) -> Measured:
    """Numbers as a race leaves them: Tunix takes twice the CPU seconds of kljax for the update."""
    actual = ContenderResult(
        "kljax",
        seconds={"rollout": [(2.0, 1.0), (1.0, 2.0)], "update": [(1.0, 1.0), (3.0, 4.0)]},
        peak_bytes={"rollout": 2**20, "update": 2**20},
    )
    expected = tunix or ContenderResult(
        "tunix",
        seconds={"rollout": [(4.0, 1.5)] * 2, "update": [(1.0, 2.0)] * 2},
        peak_bytes={"rollout": 2**20, "update": 2**22},
        differences={"log-probs": 1e-5, "update": 0.001},
    )
    return Measured(problem.QUICK, {"kljax": actual, "tunix": expected})


def test_best_round_is_chosen_per_part_and_total():
    actual = measured().results["kljax"]
    assert actual.best("wall", "rollout") == 1
    assert actual.best("cpu", "rollout") == 1
    assert actual.best("wall", ALL) == 3
    assert actual.best("cpu", ALL) == 2
    assert ContenderResult("tunix").best("cpu", ALL) is None


def test_targets_have_verdicts():
    speed, memory, both = suite.checks(measured(), "step")
    assert (speed.value, speed.other, speed.verdict) == (2, 1, "missed")
    assert (memory.value, memory.verdict) == (0.25, "met")
    assert (both.value, both.other, both.verdict) == (1.75, 5 / 3, "missed")
    speed, other = suite.checks(measured(), "rollout")
    assert (speed.value, speed.verdict) == (1.5, "missed")
    assert other.verdict.startswith("not measured")
    assert speed.limit == 2


def test_table_reports_measured_and_missing_results():
    actual = {
        "machine": {"date": "2026-01-01 00:00 UTC", "processor": "a processor", "memory": None},
        "rounds": 2,
        "threads": 2,
        "versions": {"kljax": "0"},
        "load": [0.1, 0.2],
    }

    def text_of(one: Measured) -> str:
        return suite.report({**actual, "sizes": [dataclasses.asdict(one)]}, "step").text

    text = text_of(measured())
    assert "2026-01-01 00:00 UTC on a processor; kljax 0." in text
    assert "| Tunix | 1 | 44 | 1.00 | 2 | 22 | 2.00 | 4 | 1e-05 | 0.1% |" in text
    assert "| update: peak memory of kljax over Tunix | at most 0.25 | 0.25 |  | met |" in text
    missing = measured(ContenderResult("tunix", problem="no --envs was given"))
    assert "Not measured: Tunix: no --envs was given." in text_of(missing)


def test_different_results_fail_the_command():
    def wrong(tunix):
        return measured(tunix).failures(suite.TOLERANCES)

    first, second = wrong(ContenderResult("tunix", differences={"log-probs": 0.1, "update": 0.5}))
    assert (
        first == "V=160 tunix: got a difference of 1.0e-01 from the log-probs of the baseline, expected at most 1e-03"
    )
    assert second == "V=160 tunix: got a difference of 5.0e-01 from the update of the baseline, expected at most 5e-02"
    assert wrong(ContenderResult("tunix", problem="out of memory", failed=True)) == ["V=160 tunix: out of memory"]
    assert wrong(ContenderResult("tunix", problem="no --envs was given")) == []


@dataclasses.dataclass
class StubContender:
    """Stands in for the process of a contender, without JAX: what it is started with, and asked."""

    settings: dict
    requests: list[dict] = dataclasses.field(default_factory=list)

    def ask(self, **request):
        self.requests.append(request)
        if request["do"] == "score":
            np.save(request["path"], np.zeros((2, 2)))
        return {"versions": {"kljax": "0"}, "run": {"rollout": [1, 2]}, "peak": {"rollout": 3}}.get(request["do"])


@pytest.fixture
def started(monkeypatch) -> list[StubContender]:
    """The contenders that a command starts."""
    stubs: list[StubContender] = []

    def start(module, *, settings, **_):
        stubs.append(StubContender(settings))
        return suite.contextlib.nullcontext(stubs[-1])

    monkeypatch.setattr(suite, "start", start)
    return stubs


def test_processes_race_and_missing_ones_are_reported(tmp_path, started):
    """The driver: its requests, and their order."""
    files = tmp_path / "found.json", tmp_path / "found.md"
    arguments = ["--quick", "--threads", "0", "--envs", str(tmp_path), "--json", str(files[0])]
    assert rollout.main([*arguments, "--markdown", str(files[1])]) == 0
    # The race, and then memory in a process of its own: its first run compiles, the second is measured.
    race, memory = ([request["do"] for request in stub.requests] for stub in started)
    assert race == ["load", "versions", "score", "run", "run", "run"]
    assert memory == ["load", "run", "peak"]
    assert [suite.RETURN_AT_ONCE.items() <= stub.settings.items() for stub in started] == [False, True]
    (size,) = json.loads(files[0].read_text())["sizes"]
    actual, tunix, transformers = size["results"].values()
    assert actual["seconds"] == {"rollout": [[1, 2], [1, 2]]}
    assert actual["peak_bytes"] == {"rollout": 3}
    missing = environments.interpreter(tmp_path / "tunix")
    assert tunix["problem"] == f"{missing} is missing; make it with --make-envs {tmp_path}"
    assert transformers["problem"].endswith(f"make it with --make-envs {tmp_path}")
    assert [entry["verdict"] for entry in size["targets"]] == ["not measured, see above"] * 2
    assert "| kljax | 1 | 20 |" in files[1].read_text()


def test_races_run_under_each_instruction_set(tmp_path, monkeypatch, started):
    monkeypatch.setattr(instructions, "lacking", lambda names: [name for name in names if name == "avx512"])
    monkeypatch.setenv("XLA_FLAGS", "--a=b")
    path = tmp_path / "found.md"
    arguments = ["--quick", "--threads", "0", "--contenders", "kljax", "--isa", "avx2,avx512", "--markdown", str(path)]
    assert rollout.main(arguments) == 0
    text = path.read_text()
    assert "| kljax, AVX2 | 1 | 20 |" in text
    assert "without AVX-512, which it lacks" in text
    assert "### V=160, AVX2" in text
    assert {stub.settings["XLA_FLAGS"] for stub in started} == {"--a=b --xla_cpu_max_isa=AVX2"}
    assert {stub.settings["ATEN_CPU_CAPABILITY"] for stub in started} == {"avx2"}
    monkeypatch.setattr(instructions, "lacking", lambda names: [])
    fields = tmp_path / "found.json"
    assert rollout.main([*arguments, "--json", str(fields)]) == 0
    assert [size["size"]["isa"] for size in json.loads(fields.read_text())["sizes"]] == ["avx2", "avx512"]
    assert rollout.report(json.loads(fields.read_text())).text == path.read_text()
    assert [heading for heading in path.read_text().splitlines() if heading.startswith("###")] == [
        "### V=160, AVX2",
        "### V=160, AVX-512",
    ]


@pytest.mark.parametrize("main", [rollout.main, train_step.main])
def test_wrong_arguments(main, capsys):
    for arguments, message in (
        (["--contenders", "kljax,vllm"], "argument --contenders: got ['vllm'], expected some of"),
        (["--isa", "avx3"], "argument --isa: got ['avx3'], expected some of ['avx2', 'avx512']"),
        (["--vocab", "many"], "argument --vocab: got 'many', expected a positive number"),
    ):
        with pytest.raises(SystemExit) as error:
            main(arguments)
        assert error.value.code == 2
        assert message in capsys.readouterr().err


def test_environments_without_python_3_12_are_not_created(tmp_path, capsys):
    with pytest.raises(SystemExit):
        rollout.main(["--make-envs", str(tmp_path), "--python312", str(tmp_path / "python3.12")])
    assert "argument --python312: " in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(environments.MissingError, match="no --envs was given; make it with --make-envs DIR"):
        suite.ENVIRONMENTS["tunix"].find(None)


def test_the_sizes_of_the_targets():
    assert suite.VOCABS == (4096, 32_768)
    work = problem.ModelWork()
    assert work.rows * work.completion_length == 1024
    assert work.rows * work.length == 2048
