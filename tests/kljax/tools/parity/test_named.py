"""Planted faults are named: a few of each stage here, all of them with `make test-thorough`."""

import re
from typing import Any

import pytest

from tests import parity

STAGES = (
    *(
        "verl-mask-prompt",
        "verl-log-probs-temperature-missing",
        "verl-log-probs-bfloat16",
        "verl-log-probs-adapter-off",
    ),
    *("verl-reference-off-by-one", "verl-ratio-swapped", "verl-weights-uncapped", "verl-kl-abs", "verl-kl-detached"),
    *("verl-ddof-0", "verl-no-dual-clip", "verl-2-micro-batches", "verl-loss-mask-no-eos", "verl-gradient-times-4"),
    *("trl-loss-type-grpo", "openrlhf-kl-kl-estimator-k3", "trl-recorder", "art-clean"),
    *("slime-recorder", "prime-rl-recorder", "tunix-recorder"),
)


def named(dump: dict[str, Any], detail: str = "full") -> parity.Outcome:
    return parity.judge(dump, parity.report_of(dump, detail=detail))


def by_name(names: tuple[str, ...]) -> list[dict[str, Any]]:
    dumps = {dump["name"]: dump for dump in parity.dumps()}
    return [dumps[name] for name in names]


@pytest.mark.parametrize("dump", by_name(STAGES), ids=lambda dump: dump["name"])
def test_a_fault_of_every_stage_is_named(dump: dict[str, Any]) -> None:
    outcome = named(dump)
    assert outcome.tied
    assert not outcome.extra


@pytest.mark.thorough
@pytest.mark.parametrize("dump", parity.dumps(), ids=lambda dump: dump["name"])
def test_every_dump_in_full(dump: dict[str, Any]) -> None:
    outcome = named(dump)
    assert outcome.tied
    if not dump["planted"]:
        assert not outcome.extra


def test_a_fault_is_named_from_loss_and_gradient() -> None:
    for dump in by_name(("verl-clean-token-mean", "verl-kl-k2", "verl-sequence-mean")):
        outcome = named(dump, "loss")
        assert outcome.tied
        assert not outcome.extra


def test_the_recorders_on_the_page_are_short() -> None:
    page = (parity.DIRECTORY.parents[2] / "docs/parity.md").read_text()
    recorders = re.findall(r"^### (.+?)\n.*?^```py\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(recorders) == 10  # the shared part, eight systems and Tunix
    # The first three see all stages.
    longest = {"Shared by all PyTorch systems": 25, "TRL": 80, "verl": 60}
    for title, code in recorders:
        assert len(code.splitlines()) <= longest.get(title, 15), title
    recorded = {dump["name"] for dump in parity.dumps()}
    for system in ("verl", "trl", "openrlhf", "skyrl", "trinity", "art", "slime", "prime-rl", "tunix"):
        assert f"{system}-recorder" in recorded
