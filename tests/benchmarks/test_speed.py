"""The races of whole models: kljax's side really runs, tiny; the tables and the verdicts are of made-up numbers."""

import json

import jax
import numpy as np
import pytest

from benchmarks import rollout, train_step
from benchmarks._speed import clock, command, environments, kljax_side, memory, profile, race, table, work
from benchmarks._speed.race import Measured, Result
from benchmarks._speed.worker import Worker

V = work.QUICK.vocab


@pytest.fixture(scope="module")
def worker(tmp_path_factory) -> tuple[Worker, object]:
    """What a process of kljax holds, in this one."""
    directory = tmp_path_factory.mktemp("weights")
    work.save(work.QUICK, directory)
    found = Worker("kljax")
    fields = {name: getattr(work.QUICK, name) for name in work.QUICK.__dataclass_fields__}
    assert found.answer({"do": "load", "work": fields, "directory": str(directory), "threads": 0}) is None
    return found, directory


def test_weights_have_the_names_and_shapes_of_a_checkpoint_and_of_the_decoder():
    weights = work.make_weights(work.QUICK)
    assert {name: array.shape for name, array in weights.items()} == work.shapes(work.QUICK)
    assert weights["model.layers.1.mlp.down_proj.weight"].shape == (32, 48)
    params = kljax_side.params_of(work.QUICK, weights)
    expected = kljax_side.abstract_params(kljax_side.model_of(work.QUICK), kljax_side.make_mesh(1, 1, 1))
    assert jax.tree.map(np.shape, params) == jax.tree.map(lambda x: x.shape, expected)
    kernel = params["layers"]["mlp"]["down_proj"]["kernel"][1]
    np.testing.assert_array_equal(kernel, weights["model.layers.1.mlp.down_proj.weight"].T)


def test_an_update_moves_the_policy_and_runs_have_their_parts(worker):
    held, directory = worker
    held.answer({"do": "score", "path": str(directory / "kljax.npy")})
    before = np.load(directory / "kljax.npy")
    assert before.shape == (4, 5)
    assert (before < 0).all()
    # As another trainer leaves it: its batch, and the log-probs after its update, which here are nobody's.
    tokens = work.make_sequences(work.QUICK)
    np.savez(directory / "learn.npz", tokens=tokens, advantages=np.float32([1, -1, 1, -1]), score=before)
    held.answer({"do": "learn", "path": str(directory / "learn.npz")})
    with np.load(directory / "learn.npz") as file:
        moved = file["ours"] - before
    assert 1e-5 < np.abs(moved).max() < 1
    # The rows that are scored are the ones that were trained: those with an advantage of 1 became likelier.
    assert (moved.sum(1)[::2] > 0).all()
    assert (moved.sum(1)[1::2] < 0).all()
    assert set(held.answer({"do": "run", "part": "rollout"})) == {"rollout"}
    seconds = held.answer({"do": "run", "part": "step"})
    assert set(seconds) == {"rollout", "update"}
    assert all(wall > 0 and cpu >= 0 for wall, cpu in seconds.values())
    assert set(held.answer({"do": "peak", "part": "step"})) <= {"rollout", "update"}


def test_a_wrong_rollout_or_request_is_an_error(worker, monkeypatch):
    held, _ = worker
    monkeypatch.setattr(held.side, "rollout", lambda: np.full((4, 5), V))
    with pytest.raises(ValueError, match="ids of the vocabulary"):
        held.answer({"do": "run", "part": "rollout"})
    with pytest.raises(ValueError, match="expected load, versions"):
        held.answer({"do": "fly"})


def test_a_part_within_another_is_counted_once(monkeypatch):
    now = iter(range(100))
    monkeypatch.setattr(clock.time, "perf_counter", lambda: float(next(now)))
    monkeypatch.setattr(clock.time, "process_time", lambda: 10.0)
    laps = clock.Laps()
    with laps.part("update"), laps.part("rollout"):
        pass
    monkeypatch.undo()
    # The clock is read at 0, 1, 2 and 3.
    assert laps.seconds == {"rollout": (1.0, 0.0), "update": (2.0, 0.0)}


def test_memory_of_a_part_within_another_is_that_parts():
    grown = memory.Laps()
    with grown.part("update"):
        with grown.part("rollout"):
            large = np.ones(2**23)
        del large
    if grown.peaks:
        assert grown.peaks["rollout"] > 2**25
        assert grown.peaks["update"] < 2**24


def measured(tunix: Result | None = None) -> Measured:
    """Numbers as a race leaves them: Tunix takes twice the CPU seconds of kljax for the update."""
    ours = Result(
        "kljax",
        seconds={"rollout": [(2.0, 1.0), (1.0, 2.0)], "update": [(1.0, 1.0), (3.0, 4.0)]},
        peaks={"rollout": 2**20, "update": 2**20},
        score=0.0,
    )
    theirs = tunix or Result(
        "tunix",
        seconds={"rollout": [(4.0, 1.5)] * 2, "update": [(1.0, 2.0)] * 2},
        peaks={"rollout": 2**20, "update": 2**22},
        score=1e-5,
        learned=0.001,
    )
    return Measured(work.QUICK, {"kljax": ours, "tunix": theirs})


def test_the_fastest_round_counts_and_the_whole_is_that_of_one_round():
    ours = measured().results["kljax"]
    assert ours.best("rollout", cpu=False) == 1
    assert ours.best("rollout", cpu=True) == 1
    assert ours.best("all", cpu=False) == 3
    assert ours.best("all", cpu=True) == 2
    assert Result("tunix").best("all", cpu=True) is None


def test_targets_have_verdicts():
    found = {(one.target.part, one.target.measure): one for one in table.check(measured(), "step")}
    assert found["update", "speed"].value == 2
    assert found["update", "speed"].wall == 1
    assert found["update", "speed"].verdict == "met"
    assert found["update", "memory"].value == 0.25
    assert found["update", "memory"].verdict == "met"
    speed, other = table.check(measured(), "rollout")
    assert (speed.value, speed.verdict) == (1.5, "missed")
    assert other.verdict == "not measured"
    assert table.TARGETS["step"][0].limit_for(32_768) == 2
    assert table.TARGETS["step"][0].limit_for(4096) == 1.5


def test_the_table_says_what_was_found_and_what_is_missing():
    report = {
        "machine": {"date": "2026-01-01 00:00 UTC", "processor": "a processor", "memory": None},
        "rounds": 2,
        "threads": 2,
        "versions": {"kljax": "0"},
        "load": [0.1, 0.2],
    }
    text = table.markdown(report, [measured()], "step")
    assert "2026-01-01 00:00 UTC on a processor; kljax 0." in text
    assert "| Tunix | 1 | 44 | 1.00 | 2 | 22 | 2.00 | 4 | 1e-05 | 0.1% |" in text
    assert "| update: memory of kljax over Tunix | at most 0.5 | 0.25 |  | met |" in text
    missing = measured(Result("tunix", problem="no --envs was given"))
    assert "Not measured: Tunix: no --envs was given." in table.markdown(report, [missing], "step")
    assert json.dumps(race.as_json(missing))


def test_what_computes_something_else_fails_the_command():
    wrong = measured(Result("tunix", score=0.1, learned=0.5))
    first, second = race.errors(wrong)
    assert first == "tunix: log-probs differ from kljax's by 1.0e-01, allowed are 1e-03"
    assert second == "tunix: its update differs from kljax's by 50.0% of its effect"
    (failed,) = race.errors(measured(Result("tunix", problem="out of memory", failed=True)))
    assert failed == "tunix: out of memory"
    assert race.errors(measured(Result("tunix", problem="no --envs was given"))) == []


def test_processes_race_and_what_is_missing_says_so(tmp_path, monkeypatch):
    """The driver with a stub of kljax's process, without JAX: what is asked, and in which order."""
    asked = []

    class Remote:
        def ask(self, **request):
            asked.append(request["do"])
            if request["do"] == "score":
                np.save(request["path"], np.zeros((2, 2)))
            return {"versions": {"kljax": "0"}, "run": {"rollout": [1, 2]}, "peak": {"rollout": 3}}.get(request["do"])

    real = race.process

    def process(name, *arguments):
        if name != "kljax":
            return real(name, *arguments)
        asked.append("start" if arguments[-1] is not race.RETURNED_AT_ONCE else "start for memory")
        return race.contextlib.nullcontext(Remote())

    monkeypatch.setattr(race, "process", process)
    files = tmp_path / "found.json", tmp_path / "found.md"
    arguments = ["--quick", "--threads", "0", "--envs", str(tmp_path), "--json", str(files[0])]
    assert rollout.main([*arguments, "--markdown", str(files[1])]) == 0
    # The race, and then memory in a process of its own: its first run compiles, the second is measured.
    assert asked == ["start", "versions", "score", "run", "run", "run", "start for memory", "run", "peak"]
    (size,) = json.loads(files[0].read_text())["sizes"]
    ours, tunix, transformers = size["results"]
    assert ours["seconds"] == {"rollout": [[1, 2], [1, 2]]}
    assert ours["peaks"] == {"rollout": 3}
    missing = environments.interpreter(tmp_path, "tunix")
    assert tunix["problem"] == f"{missing} is missing; make it with --make-envs {tmp_path}"
    assert transformers["problem"].endswith(f"make it with --make-envs {tmp_path}")
    assert [one["verdict"] for one in size["targets"]] == ["not measured", "not measured"]
    assert "| kljax | 1 | 20 |" in files[1].read_text()


def test_another_checkout_races_and_has_targets(tmp_path, monkeypatch):
    """Both checkouts run in processes; what is asked, and which numbers the verdicts are of."""
    asked = []

    class Remote:
        def __init__(self, name):
            self.name = name

        def ask(self, **request):
            asked.append((self.name, request["do"]))
            match request["do"]:
                case "score":
                    np.save(request["path"], np.zeros((2, 2)))
                case "learn":
                    with np.load(request["path"]) as file:
                        np.savez(request["path"], score=file["score"], ours=np.ones((2, 2)))
                case "run":
                    rollout = [1.0, 1.0 if self.name == "kljax" else 0.9]
                    return {"rollout": rollout, "update": [2.0, 2.0]}
            return {"versions": {"kljax": self.name}, "peak": {"rollout": 3, "update": 4}}.get(request["do"])

    monkeypatch.setattr(race, "process", lambda name, *_: race.contextlib.nullcontext(Remote(name)))
    path = tmp_path / "found.json"
    arguments = ["--quick", "--threads", "0", "--contenders", "kljax", "--no-profile", "--json", str(path)]
    assert train_step.main([*arguments, "--against", str(race.ROOT)]) == 0
    found = json.loads(path.read_text())
    assert found["versions"] == {"kljax": "kljax", "kljax (other)": "other"}
    (size,) = found["sizes"]
    assert size["results"][1]["learned"] == 0
    verdicts = {(one["target"]["part"], one["target"]["measure"]): one for one in size["targets"][2:]}
    assert verdicts["rollout", "speed"]["verdict"] == "missed"
    assert verdicts["rollout", "speed"]["value"] == 0.9
    assert {one["verdict"] for key, one in verdicts.items() if key[0] == "update"} == {"met"}
    assert verdicts["rollout", "compile"]["verdict"] == "missed"
    # A rollout needs no compiled update, and compiling is timed in processes that have compiled nothing.
    assert asked.count(("other", "learn")) == 1
    assert asked.count(("other", "run")) == 3 + race.STARTS + 1


def test_a_path_that_is_no_checkout_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        rollout.main(["--quick", "--against", str(tmp_path)])
    assert "expected a checkout of this repository" in capsys.readouterr().err


def test_the_long_tail_is_a_section_of_its_own():
    one = {"tokens_per_second": 100.0, "tokens_per_cpu_second": 90.0, "steps": 12, "occupancy": 0.5}
    found = {"continuous": one, "static": one, "target": 1.5}
    lines = rollout.long_tail_lines(found | {"gain": {"tokens_per_second": 1.4, "tokens_per_cpu_second": 1.6}})
    assert "| slots that are refilled | 100 | 90 | 12 | 50% |" in lines
    assert lines[-1].endswith("faster by 1.60 in CPU seconds and 1.40 by the clock; at least 1.5 is wanted: met.")


@pytest.mark.parametrize("main", [rollout.main, train_step.main])
def test_wrong_arguments(main, capsys):
    for arguments, message in (
        (["--contenders", "kljax,vllm"], "argument --contenders: got ['vllm'], expected some of"),
        (["--vocab", "many"], "argument --vocab: got 'many', expected a positive number"),
    ):
        with pytest.raises(SystemExit) as error:
            main(arguments)
        assert error.value.code == 2
        assert message in capsys.readouterr().err


def test_without_python_3_12_the_environments_are_not_begun(tmp_path, monkeypatch):
    monkeypatch.setattr(environments.sys, "version_info", (3, 11, 0))
    monkeypatch.setattr(environments, "_is_python312", lambda python: False)
    with pytest.raises(FileNotFoundError, match="--python312"):
        environments.make(tmp_path, python312=None, torch_index=None)
    assert list(tmp_path.iterdir()) == []
    assert environments.why_not(None, "tunix") == "no --envs was given; make them with --make-envs DIR"


def test_the_sizes_of_the_targets():
    assert command.VOCABS == (4096, 32_768)
    assert work.Work().new_tokens == 1024
    assert work.Work().tokens == 2048


@pytest.mark.thorough
def test_the_parts_of_an_update_add_up_to_it(capsys):
    """The profile really runs, tiny; what is left of the update without its layers and AdamW is its head."""
    assert profile.main(["--quick", "--rounds", "1"]) == 0
    text = capsys.readouterr().out
    assert "| policy: layers, forward and gradient |" in text
    seconds = {"score": 3.0, "layers": 1.0, "update": 9.0, "layers, gradient": 4.0, "AdamW": 0.5, "product": 1.0}
    found = profile.rows(work.Work(), seconds)
    assert [float(spent) for _, spent, *_ in found] == [1.0, 2.0, 4.0, 4.5, 0.5, 12.0]
    # Counted by hand: 1,280 tokens of 786,432 weights in each of 4 layers, 589,824 pairs that attend, and 1,024 x V.
    layers, head = profile.operations(work.Work())
    assert layers == 4 * (2 * 1280 * 786_432 + 4 * (2 * 128**2 + 1024 * 256) * 256)
    assert head == 2 * 1024 * 256 * 4096
