"""Other seeds change what tests draw and their order, and nothing that is recorded; flags reach started processes."""

import itertools
import types

import pytest

from tests import other_seeds, xla


def test_seed_is_shifted_for_callers_in_tests_alone(monkeypatch):
    monkeypatch.setenv("KLJAX_TEST_SEED", "2")
    draw = other_seeds._shifted(lambda first=None: first)
    shift = 2 * other_seeds.STRIDE
    for file, seed, expected in (
        (other_seeds.TESTS / "kljax/test_kl.py", 3, 3 + shift),
        (other_seeds.TESTS / "tiny.py", [3, 4], [3, 4, 2]),
        (other_seeds.TESTS / "tiny.py", None, None),
        (other_seeds.RECORDED / "cases.py", 3, 3),
        (other_seeds.TESTS.parent / "train/rl/keys.py", 3, 3),
        (other_seeds.__file__, 3, 3),
    ):
        assert eval(compile("draw(seed)", str(file), "eval"), {"draw": draw, "seed": seed}) == expected


def test_order_depends_on_the_seed_alone(monkeypatch):
    items = [types.SimpleNamespace(path=path, name=name) for path in "abcde" for name in range(8)]
    orders = {}
    for seed in (0, 1, 1, 2):
        monkeypatch.setenv("KLJAX_TEST_SEED", str(seed))
        shuffled = list(items)
        other_seeds.shuffle(shuffled)
        order = [(item.path, item.name) for item in shuffled]
        assert orders.setdefault(seed, order) == order
        assert sorted(order) == [(item.path, item.name) for item in items]
        # The tests of a file stay together, as they share fixtures.
        assert sum(first[0] != other[0] for first, other in itertools.pairwise(order)) == 4
    assert len(set(map(tuple, orders.values()))) == 3
    assert orders[0] == sorted(orders[0])


@pytest.mark.parametrize(("isa", "compiles"), [("SSE4_2", False), ("AVX", False), ("AVX2", True), (None, True)])
def test_instruction_set_reaches_started_processes(monkeypatch, isa, compiles):
    flag = [] if isa is None else [f"--xla_cpu_max_isa={isa}"]
    monkeypatch.setenv("XLA_FLAGS", " ".join(["--xla_force_host_platform_device_count=8", *flag]))
    assert xla.compiles_float16() == compiles
    flags = xla.flags(devices=4).split()
    assert flags[0] == "--xla_force_host_platform_device_count=4"
    assert [item for item in flags if item.startswith("--xla_cpu_max_isa")] == flag


def test_drawn_examples_know_no_constants_of_the_sources():
    # Those are of what is imported: a test on its own would draw other examples than among others.
    constants = pytest.importorskip("hypothesis.internal.conjecture.providers")._get_local_constants()
    assert len(constants) == 0
