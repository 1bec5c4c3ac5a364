"""`python -m kljax parity` on recorded dumps: what it prints, writes and returns."""

import json
import pathlib
import re
from typing import Any

import jax
import numpy as np
import pytest

from kljax.__main__ import main
from tests import parity
from tests.parity import write_dump

CLEAN = [dump for dump in parity.dumps() if not dump["planted"]]


def dump_named(name: str) -> dict[str, Any]:
    (dump,) = [dump for dump in parity.dumps() if dump["name"] == name]
    return dump


@pytest.mark.parametrize("dump", CLEAN, ids=lambda dump: dump["name"])
def test_clean_dumps_agree(dump: dict[str, Any], tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    parity.write(dump, tmp_path / "dump.npz")
    assert main(["parity", str(tmp_path / "dump.npz")]) == 0
    printed = capsys.readouterr().out
    assert f"The compared fields agree within the rounding of {dump['header']['dtype']}." in printed
    assert "differs" not in printed
    if dump["name"].startswith("verl-clean"):
        # The log-probs of the first update were not recorded.
        assert re.findall(r"^(.+): not compared", printed, re.MULTILINE) == ["old log-probs", "sampler"]
    assert re.search(r"^\d of \d stages compared(: |; not: )", printed.splitlines()[-1])
    assert max(map(len, printed.splitlines())) <= 120


def test_text_json_and_page_of_a_fault(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    parity.write(dump_named("verl-kl-k2"), tmp_path / "dump.npz")
    page = tmp_path / "page.html"
    assert main(["parity", str(tmp_path / "dump.npz"), "--html", str(page)]) == 1
    printed = capsys.readouterr().out
    assert "kl: the KL is k2\n    [kl: estimator k2]; recorded" in printed
    assert "at (row, token) (" in printed
    assert "<td>differs</td>" in page.read_text()
    assert "http" not in page.read_text()
    assert main(["parity", str(tmp_path / "dump.npz"), "--json"]) == 1
    written = json.loads(capsys.readouterr().out)
    assert not written["agrees"]
    assert [finding["field"] for finding in written["findings"]] == ["kl"]
    assert [cause["name"] for cause in written["findings"][0]["causes"][0]] == ["estimator k2"]
    fields = {field["field"]: field["agrees"] for field in written["fields"]}
    # The scalar follows from their own KL; the gradient is that of k2 as well, with the same cause.
    assert fields["kl"] is False
    assert fields["loss"] is True


def test_unknown_causes_name_the_deciding_field(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    dump = dump_named("verl-clean-token-mean")
    recorded = np.load(parity.DIRECTORY / "dumps.npz")
    arrays = {name: recorded[key] for name, key in dump["arrays"].items() if name not in parity.LOSS_ONLY}
    arrays["loss"] = np.float32(0.123)
    write_dump(tmp_path / "dump.npz", dump["header"], arrays)
    assert main(["parity", str(tmp_path / "dump.npz")]) == 1
    printed = capsys.readouterr().out
    assert "loss: cause unknown; recorded 0.123" in printed
    assert "to decide: record token_loss, kl, weights" in printed
    assert "    by the factor " in printed
    assert "note: tried: " in printed


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"system": "varl"}, "header.system: got 'varl'"),
        ({"dtype": "float8"}, "header.dtype: got 'float8', expected one of float64"),
        ({"system": "verl", "loss": {"name": "vanila"}}, "did you mean 'vanilla'?"),
        ({"system": "verl", "loss": {"name": "vanilla", "clip_hi": 0.2}}, "header.loss: got 'clip_hi'"),
        ({"system": "verl", "kl": {"name": "k3", "cof": 1.0}}, "header.kl: got 'cof'"),
        ({"loss": {"name": "vanilla"}}, "names need a system; set header.system, or pass --system"),
        ({"loss": 3}, "header.loss: got 3, expected an object of arguments"),
    ],
)
def test_mistakes_in_the_header(
    header: dict[str, Any], message: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_dump(tmp_path / "dump.npz", header, {"log_probs": np.zeros((1, 2)), "mask": np.ones((1, 2))})
    assert main(["parity", str(tmp_path / "dump.npz")]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: ")
    assert message in printed


def test_non_finite_inputs_and_nothing_to_compare(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    arrays = {"log_probs": np.zeros((1, 2)), "mask": np.array([[0, 1]])}
    write_dump(tmp_path / "dump.npz", {}, arrays)
    assert main(["parity", str(tmp_path / "dump.npz")]) == 1
    assert "Nothing was compared" in capsys.readouterr().out
    write_dump(tmp_path / "dump.npz", {}, {**arrays, "log_probs": np.array([[np.nan, np.inf]])})
    assert main(["parity", str(tmp_path / "dump.npz")]) == 2
    assert "log_probs: got inf at (row, token) (0, 1), expected a finite number" in capsys.readouterr().err


def test_command_restores_the_precision_of_jax(tmp_path: pathlib.Path) -> None:
    before = jax.config.jax_enable_x64
    parity.report_of(CLEAN[0])
    assert jax.config.jax_enable_x64 == before
