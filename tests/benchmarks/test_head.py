"""The head's benchmark in its quick form, in this process and without PyTorch: table, JSON, agreement, verdicts."""

import json

import jax.numpy as jnp
import pytest

from benchmarks import _jax_contenders, _rows, _torch_env, head
from benchmarks._inputs import QUICK, SIZES
from benchmarks._results import LARGE_VOCAB, TARGETS

HERE = [row for row in _rows.ROWS if "cpu" in row.devices]
JAX = [row.name for row in HERE if row.framework == "jax"]


@pytest.fixture(scope="module")
def quick(tmp_path_factory) -> dict:
    """One quick run with all contenders: its status and what it wrote."""
    directory = tmp_path_factory.mktemp("head")
    files = directory / "results" / "head.json", directory / "results" / "head.md"
    status = head.main(["--quick", "--threads", "0", "--json", str(files[0]), "--markdown", str(files[1])])
    return {"status": status, "json": json.loads(files[0].read_text()), "table": files[1].read_text()}


def test_all_contenders_of_jax_agree_and_are_timed(quick):
    assert quick["status"] == 0
    (size,) = quick["json"]["sizes"]
    rows = {row["row"]["name"]: row for row in size["rows"]}
    assert list(rows) == [row.name for row in HERE]
    for name in JAX:
        row = rows[name]
        assert row["problem"] is None
        assert len(row["wall"]) == len(row["cpu"]) == 2
        assert row["temp_bytes"] > 0
        assert row["agreement"]["loss_difference"] < 2e-6
        assert row["agreement"]["gradient_difference"] < 2e-6
    # One for each group, but a frozen head changes no loss: rows that compute the same by mistake would agree as well.
    assert len({rows[name]["agreement"]["loss"] for name in JAX if name.startswith("naive")}) == 5
    assert size["rates"]["mixed"] > 0
    assert size["rates"]["tile"] == [32, 256]


def test_rows_without_pytorch_say_why(quick):
    (size,) = quick["json"]["sizes"]
    for row in size["rows"]:
        if row["row"]["framework"] == "torch":
            assert "--make-torch-env" in row["problem"]
            assert not row["failed"]
    assert "verl `FusedLinearForPPO`, Liger GRPO: no --torch-env was given" in quick["table"]


def test_every_target_has_a_verdict_and_a_missed_one_is_said(quick):
    (size,) = quick["json"]["sizes"]
    assert [check["target"]["row"] for check in size["targets"]] == [target.row for target in TARGETS]
    verdicts = {(c["target"]["measure"], c["target"]["against"]): c["verdict"] for c in size["targets"]}
    # What the compiler assigns is the same in every run: at this size the tile is a quarter of the logits.
    assert verdicts["memory", "naive"] == "missed"
    assert verdicts["time", "verl"] == "not measured, as said above"
    (line,) = [line for line in quick["table"].splitlines() if line.startswith("| memory: kljax, over naive JAX |")]
    assert line.startswith("| memory: kljax, over naive JAX | at most 1/16 | 1/")
    assert line.endswith(" | missed |")
    assert "The targets below are meant for 2048x1024x32768 and 1024x1024x131072." in quick["table"]


def test_the_table_says_when_and_where(quick):
    machine = quick["json"]["machine"]
    first, second, *_ = quick["table"].splitlines()
    assert first.startswith(f"{machine['date']} on {machine['processor']}")
    assert "jax " in first
    assert "kljax " in first
    assert "2 interleaved rounds" in second
    assert quick["table"].count("| naive JAX |") == 6


def test_a_contender_that_computes_something_else_fails_the_command(monkeypatch, capsys):
    right = _jax_contenders.tunix_full

    def wrong(hidden, head, data):
        log_probs, entropies, _ = right(hidden, head, data)
        return log_probs, 1.01 * entropies, None

    monkeypatch.setattr(_jax_contenders, "tunix_full", wrong)
    assert head.main(["--quick", "--threads", "0", "--rounds", "0", "--contenders", "tunix_full"]) == 1
    printed = capsys.readouterr()
    assert f"ERROR {QUICK} tunix_full: differs from naive by" in printed.err
    assert "memory and agreement only" in printed.out
    assert "| kljax |" not in printed.out


def test_a_contender_that_fails_is_a_row_that_says_so(monkeypatch, capsys):
    def failing(hidden, head, data, **_):
        raise MemoryError("no room for\nthe logits")

    monkeypatch.setattr(_jax_contenders, "tiled", failing)
    assert head.main(["--quick", "--threads", "0", "--rounds", "1", "--contenders", "tile,tunix_full"]) == 1
    printed = capsys.readouterr()
    assert "ERROR 72x48x1000 tile: MemoryError: no room for the logits" in printed.err
    assert "Not measured: kljax: MemoryError: no room for the logits." in printed.out
    assert "| kljax | not measured |" in printed.out
    assert "| Tunix, full logits | 0" in printed.out


def test_bf16_agrees_within_its_rounding(capsys):
    arguments = ["--quick", "--threads", "0", "--rounds", "0", "--dtype", "bf16"]
    assert head.main([*arguments, "--contenders", "tile,tunix_chunk"]) == 0
    assert "bf16 hidden states and head" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--size", "2048x1024"],
            "argument --size: got '2048x1024', expected 3 positive numbers such as 2048x1024x32768",
        ),
        (["--tile", "0x4"], "argument --tile: got '0x4', expected 2 positive numbers such as 2048x1024"),
        (["--contenders", "tile,fast"], "contenders: got ['fast'], expected some of"),
        (["--contenders", "torch_chunk"], "contenders: got ['torch_chunk'], expected some of"),
    ],
)
def test_wrong_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as error:
        head.main(["--threads", "0", *arguments])
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_an_environment_that_is_not_there_is_said(tmp_path, capsys):
    arguments = ["--quick", "--threads", "0", "--rounds", "0", "--contenders", "liger", "--torch-env", str(tmp_path)]
    assert head.main(arguments) == 0
    missing = _torch_env.interpreter(tmp_path)
    assert f"Liger GRPO: {missing} is missing; make it with --make-torch-env {tmp_path}." in capsys.readouterr().out


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_temporary_memory_meets_its_targets(size):
    """At the sizes of the targets nothing runs; what the compiler assigns is the same every time."""
    temp = {name: _compiled_bytes(name, size) for name in ("tile", "naive", "tunix_full", "tunix_chunk")}
    limits = {"naive": 16, "tunix_full": 24, "tunix_chunk": 3}
    if size.vocab >= LARGE_VOCAB:
        limits = {"naive": 24, "tunix_full": 40, "tunix_chunk": 9}
    for name, limit in limits.items():
        assert limit * temp["tile"] <= temp[name], f"{temp['tile']} bytes, and {name} {temp[name]}"


def _compiled_bytes(name, size):
    import jax

    def shape(*sizes, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(sizes, dtype)

    tokens, width, vocab = size
    data = _jax_contenders.Data(
        targets=shape(tokens, dtype=jnp.int32),
        advantages=shape(tokens),
        old_log_probs=shape(tokens),
        mask=shape(tokens, dtype=bool),
        ref_hidden=shape(tokens, width),
    )
    lowered = jax.jit(_jax_contenders.build(name, None)).lower(shape(tokens, width), shape(width, vocab), data)
    return lowered.compile().memory_analysis().temp_size_in_bytes
