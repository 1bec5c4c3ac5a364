"""Mistakes in configs and on the command line: each names the field or the place, before JAX has work to do."""

import pathlib

from tests.faults.case import Fault, refused, run_command
from train.__main__ import main

AREA = "configs"
SMOKE = "configs/smoke.yaml"
TOO_LONG = "9" * 10_000
# The text of a file, and words of the message.
FILES = {
    "steps: !!int abc": ("'abc' cannot be read as int", "line 1"),
    "kl: {loss: {coef: !!float abc}}": ("'abc' cannot be read as float", "line 1"),
    "name: !!timestamp 2020-99-01": ("cannot be read as timestamp", "line 1"),
    f"steps: {TOO_LONG}": ("(10000 characters) cannot be read as int",),
    "steps: 1__0_": ("steps", "'1__0_'"),
    "steps: 10_": ("steps", "'10_'"),
    "data: datasets::::": ("line 1",),
    "steps: 2\nsteps: 3": ("steps", "given twice"),
    "a: &a [*a]": ("a",),
    "[" * 20_000: ("nested too deeply",),
    "!!python/object:os.system {}": ("line 1",),
    "steps: 2\nstpes: 3": ("stpes", "steps"),
    "- 1": ("mapping of fields",),
    "": ("mapping of fields",),
}
# Overrides, and words of the message.
OVERRIDES = {
    "=1": ("'=1'", "key=value"),
    "=": ("'='", "key=value"),
    "steps=1__0_": ("steps", "'1__0_'"),
    "steps=!!int abc": ("steps", "'abc' cannot be read as int"),
    f"steps={TOO_LONG}": ("steps", "(10000 characters)"),
    "datasets::::": ("datasets::::", "key=value"),
    "data.train=datasets::::": ("data.train", "quote"),
    "optim.learning_rate=1e308": ("optim.learning_rate", "infinite in float32"),
    "optim.learning_rate=.nan": ("optim.learning_rate", "finite"),
    "optim.learning_rate=1e-50": ("optim.learning_rate", "0 in float32"),
    "temperature=1e-60": ("temperature", "0 in float32"),
    "kl.loss={coef: 0.1, controller: {type: pi, target: 1, kp: 0, ki: 0}}": ("kl.loss.controller", "never moves"),
    "loss=subprocess:run": ("loss.function", "reads no array of the batch"),
    "advantage=os:getcwd": ("advantage.function", "os"),
    "correction=[{type: user, function: shutil:rmtree}]": ("correction",),
    "kl.loss.coef=-1": ("kl.loss.coef", ">= 0"),
    "model.width=1000000000": ("model.width", "1_000_000"),
    "data.max_prompt_length=1000000000": ("data.max_prompt_length", "10_000_000"),
    "rollout.policy_lag=1000000000": ("rollout.policy_lag", "1_000"),
    "rollout.prompts_per_step=1000000000": ("rollout.prompts_per_step", "1_000_000"),
    "loss=verl/vanila": ("loss.type", "did you mean 'vanilla'"),
    "loss=cispoo": ("loss", "cispo"),
    "optim.optimizer=adamW": ("optim.optimizer", "adamw"),
    "loss=nowhere:function": ("loss.function", "nowhere"),
    "preset=trl/grpoo": ("preset", "trl/grpo"),
    "name=../x": ("name", "letters"),
    "guard.max_kl=1": ("guard.max_kl", "reference.monitor"),
    "checkpoint={every: 2, keep_every: 7}": ("checkpoint.keep_every", "multiple of checkpoint.every"),
}


def _in_file(text: str, words: tuple[str, ...]) -> Fault:
    def run(place: pathlib.Path) -> str:
        (place / "config.yaml").write_text(text)
        return refused(run_command(main, str(place / "config.yaml"), f"output={place}"), "config.yaml", *words)

    return Fault(AREA, f"a file with {text[:40]!r}", run)


def _override(text: str, words: tuple[str, ...]) -> Fault:
    overrides = (text, "kl.loss.coef=0") if text.startswith("guard") else (text,)
    return Fault(
        AREA, text[:60], lambda place: refused(run_command(main, SMOKE, f"output={place}", *overrides), *words)
    )


def _binary(place: pathlib.Path) -> str:
    (place / "config.yaml").write_bytes(b"\xff\xfes\x00t\x00")
    return refused(run_command(main, str(place / "config.yaml")), "not a text file")


FAULTS = [
    *(_in_file(text, words) for text, words in FILES.items()),
    *(_override(text, words) for text, words in OVERRIDES.items()),
    Fault(AREA, "a file in UTF-16", _binary),
    Fault(AREA, "no file", lambda place: refused(run_command(main, str(place / "no.yaml")), "no.yaml")),
    Fault(AREA, "no config", lambda place: refused(run_command(main, "steps=1"), "no file or recipe of this name")),
    Fault(
        AREA,
        "--resume of no run",
        lambda place: refused(run_command(main, SMOKE, f"output={place}", "--resume"), "there is no run at"),
    ),
]
