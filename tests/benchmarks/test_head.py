"""The head's benchmark in its quick form, in this process and without PyTorch: table, JSON, agreement, verdicts."""

import json

import jax.numpy as jnp
import pytest

from benchmarks import head
from benchmarks.harness import environments
from benchmarks.suites.head import forms, jax_forms
from benchmarks.suites.head.forms import QUICK, SIZES
from tests import xla

HERE = forms.choose("cpu")
JAX = [name for name, form in HERE.items() if form.framework == "jax"]


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
    results = size["results"]
    assert list(results) == list(HERE)
    for name in JAX:
        result = results[name]
        assert result["problem"] is None
        assert [len(seconds) for seconds in result["seconds"]["run"]] == [2, 2]
        assert result["temp_bytes"] > 0
        assert result["differences"]["loss"] < 2e-6
        assert result["differences"]["gradients"] < 2e-6
    # One for each group, but a frozen head changes no loss: forms that are equal by mistake would agree as well.
    assert len({results[name]["loss"] for name in JAX if name.startswith("naive")}) == 5


def test_rows_without_pytorch_say_why(quick):
    (size,) = quick["json"]["sizes"]
    for name, result in size["results"].items():
        if HERE[name].framework == "torch":
            assert "--make-torch-env" in result["problem"]
            assert not result["failed"]
    assert "verl `FusedLinearForPPO`, Liger GRPO: no --torch-env was given" in quick["table"]


def test_every_target_has_a_verdict_even_if_missed(quick):
    (size,) = quick["json"]["sizes"]
    verdicts = {check["title"]: check["verdict"] for check in size["targets"]}
    assert list(verdicts) == [*map(head.title, head.TARGETS["cpu"])]
    # The compiler assigns the same memory in every run: at this size the tile is a quarter of the logits.
    assert verdicts["memory: kljax, over naive JAX"] == "missed"
    assert verdicts["time: kljax, over verl `FusedLinearForPPO`"] == "not measured, see above"
    (line,) = [line for line in quick["table"].splitlines() if line.startswith("| memory: kljax, over naive JAX |")]
    assert line.startswith("| memory: kljax, over naive JAX | at most 1/16 | 1/")
    assert line.endswith(" | missed |")
    assert "The targets below are meant for 2048x1024x32768 and 1024x1024x131072." in quick["table"]


def test_the_table_says_when_and_where(quick):
    machine = quick["json"]["machine"]
    first, _, second, *_ = quick["table"].splitlines()
    assert first.startswith(f"{machine['date']} on {machine['processor']}")
    assert "jax " in first
    assert "kljax " in first
    assert "the fastest of 2 interleaved rounds" in second
    assert quick["table"].count("| naive JAX |") == 7


def test_contender_with_different_results_fails_the_command(monkeypatch, capsys):
    right = jax_forms.tunix_full

    def wrong(hidden, head, data):
        log_probs, entropies, _ = right(hidden, head, data)
        return log_probs, 1.01 * entropies, None

    monkeypatch.setattr(jax_forms, "tunix_full", wrong)
    assert head.main(["--quick", "--threads", "0", "--rounds", "0", "--contenders", "tunix_full"]) == 1
    printed = capsys.readouterr()
    assert f"ERROR {QUICK} tunix_full: got a difference of" in printed.err
    assert "memory and agreement only" in printed.out
    assert "| kljax |" not in printed.out


def test_failing_contender_becomes_a_row_with_the_error(monkeypatch, capsys):
    def failing(hidden, head, data, **_):
        raise MemoryError("no room for\nthe logits")

    monkeypatch.setattr(jax_forms, "tiled", failing)
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
        (["--contenders", "tile,fast"], "argument --contenders: got ['fast'], expected some of"),
        (["--contenders", "torch_chunk"], "argument --contenders: got ['torch_chunk'], expected some of"),
    ],
)
def test_wrong_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as error:
        head.main(["--threads", "0", *arguments])
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_missing_environment_is_reported(tmp_path, capsys):
    arguments = ["--quick", "--threads", "0", "--rounds", "0", "--contenders", "liger", "--torch-env", str(tmp_path)]
    assert head.main(arguments) == 0
    missing = environments.interpreter(tmp_path / "venv")
    assert f"Liger GRPO: {missing} is missing; make it with --make-torch-env {tmp_path}." in capsys.readouterr().out


@pytest.mark.skipif(xla.multiplies_with_eigen(), reason="targets are those of the default library of matrix products")
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_temporary_memory_meets_its_targets(size):
    """At the sizes of the targets nothing runs; what the compiler assigns is the same every time."""
    temp = {name: _compiled_bytes(name, size) for name in ("tile", "fused", "naive", "tunix_full", "tunix_chunk")}
    limits = {"naive": 16, "tunix_full": 24, "tunix_chunk": 3}
    if size.vocab >= head.LARGE_VOCAB:
        limits = {"naive": 24, "tunix_full": 40, "tunix_chunk": 9}
    for name, limit in limits.items():
        assert limit * temp["tile"] <= temp[name], f"{temp['tile']} bytes, and {name} {temp[name]}"
    assert 5 * temp["fused"] <= temp["naive"], f"{temp['fused']} bytes"


def _compiled_bytes(name, size):
    import jax

    def shape(*sizes, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(sizes, dtype)

    tokens, width, vocab = size.tokens, size.width, size.vocab
    data = jax_forms.TokenConstants(
        targets=shape(tokens, dtype=jnp.int32),
        advantages=shape(tokens),
        old_log_probs=shape(tokens),
        mask=shape(tokens, dtype=bool),
        ref_hidden=shape(tokens, width),
    )
    lowered = jax.jit(jax_forms.build(name, None)).lower(shape(tokens, width), shape(width, vocab), data)
    return lowered.compile().memory_analysis().temp_size_in_bytes
