"""Signatures that are read from source: equal to those of the imported functions, and without an import."""

import inspect
import subprocess
import sys
from typing import Literal, Optional, get_args

import optax
import optax.contrib
import optax.schedules
import pytest

import kljax
from train.config.algorithms import ADVANTAGES, CONTROLLERS, KL_SCHEDULES, LOSS_FUNCTIONS, OPTIMIZERS
from train.config.signatures import REQUIRED, load_function, read_signature
from train.process.console import run_command

TARGETS = [
    target for table in (LOSS_FUNCTIONS, ADVANTAGES, CONTROLLERS, KL_SCHEDULES, OPTIMIZERS) for target in table.values()
]


@pytest.mark.parametrize("target", TARGETS)
def test_source_agrees_with_the_function(target: str) -> None:
    function, read = load_function(target), read_signature(target)
    real = inspect.signature(function).parameters
    assert [p.name for p in read.parameters] == list(real)
    for parameter in read.parameters:
        expected = real[parameter.name]
        assert parameter.keyword == (expected.kind is expected.KEYWORD_ONLY), parameter.name
        if parameter.type is not None:
            assert parameter.default == expected.default or parameter.default is expected.default is REQUIRED
            assert parameter.doc, parameter.name
    assert read.doc == (inspect.getdoc(function) or "").partition("\n")[0].strip()


def test_types_are_types_of_a_config() -> None:
    ppo = {p.name: p for p in read_signature("kljax:ppo_clip_loss").parameters}
    assert ppo["clip_low"].type is float
    assert ppo["dual_clip"].type == Optional[float]  # noqa: UP045
    assert ppo["level"].type == kljax.typing.SurrogateLevel
    assert ppo["log_probs"].type is None
    assert ppo["log_probs"].shape == "*b T"
    assert ppo["log_probs"].required
    assert {p.name: p.type for p in read_signature("kljax:grpo_advantages").parameters}["ddof"] is int
    assert {p.name: p.type for p in read_signature("kljax:dppo_loss").parameters}["symmetric"] is bool
    muon = {p.name: p.type for p in read_signature("optax.contrib:muon").parameters}
    assert (muon["beta"], muon["ns_steps"], muon["ns_coeffs"]) == (float, int, None)
    assert "frobenius" in get_args(muon["preconditioning"])


def test_user_function_is_read_through_its_imports(tmp_path, monkeypatch) -> None:
    package = tmp_path / "mine_for_signatures"
    package.mkdir()
    (package / "__init__.py").write_text("from .deep import shout as loss\nraise RuntimeError('imported')\n")
    (package / "deep.py").write_text(
        "from typing import Literal\nimport jax\nfrom .names import Mode\n\n"
        "def shout(log_probs: jax.Array, mask, scale: float = 2, *, mode: Mode = 'a', other: Literal['x'] = 'x'):\n"
        '    """Shouts.\n\n    Args:\n      scale: how\n        loud.\n    """\n'
    )
    (package / "names.py").write_text("from typing import Literal\nMode = Literal['a', 'b']\n")
    monkeypatch.syspath_prepend(tmp_path)
    signature = read_signature("mine_for_signatures:loss")
    assert signature.doc == "Shouts."
    parameters = {p.name: (p.type, p.default, p.keyword) for p in signature.parameters}
    assert parameters["log_probs"] == (None, REQUIRED, False)
    assert parameters["scale"][1:] == (2, False)
    assert parameters["mode"] == (Literal["a", "b"], "a", True)
    assert next(p.doc for p in signature.parameters if p.name == "scale") == "how loud."
    assert [p.name for p in read_signature(f"{package / 'deep.py'}:shout").parameters] == list(parameters)


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("no_such_module_at_all:f", "there is no module 'no_such_module_at_all'"),
        ("kljax.nowhere:f", "there is no module 'kljax.nowhere'"),
        ("kljax:no_loss", "kljax has no function 'no_loss'"),
        ("kljax:Tile", "has no function 'Tile'"),
        ("no/such/file.py:f", "cannot read /.*/no/such/file.py: No such file or directory"),
    ],
)
def test_missing_target_is_named(target: str, reason: str) -> None:
    with pytest.raises(LookupError, match=reason):
        read_signature(target)


def test_unparsable_source_is_named(tmp_path) -> None:
    path = tmp_path / "bad.py"
    path.write_text("def f(:\n")
    with pytest.raises(LookupError, match=r"bad\.py, line 1: invalid syntax"):
        read_signature(f"{path}:f")


def test_nothing_is_imported() -> None:
    code = "import sys, train.config.schema; print(sorted({'jax', 'kljax', 'optax', 'numpy'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_imported_modules_equal_the_tables() -> None:
    assert optax.contrib.muon is load_function(OPTIMIZERS["muon"])
    assert optax.schedules.cosine_decay_schedule is load_function(KL_SCHEDULES["cosine"])


def test_functions_of_one_file_share_its_module(tmp_path) -> None:
    path = tmp_path / "shared_module.py"
    path.write_text("def loss(): pass\ndef advantage(): pass\n")
    loss, advantage = (load_function(f"{path}:{name}") for name in ("loss", "advantage"))
    assert loss.__globals__ is advantage.__globals__
    assert load_function(f"{path}:loss") is loss


def test_edited_file_is_read_by_the_next_command(tmp_path) -> None:
    path = tmp_path / "edited_module.py"
    target = f"{path}:loss"
    for name in ("mask", "advantages"):
        path.write_text(f"def loss({name}): return '{name}'\n")
        assert run_command(lambda: None) == 0
        assert [parameter.name for parameter in read_signature(target).parameters] == [name]
        assert load_function(target)(0) == name
        assert sys.modules["edited_module"].loss is load_function(target)
        # A later program of the same run has the functions of its start.
        path.write_text("def loss(log_probs, mask): return 'edited'\n")
        assert load_function(target)(0) == name
