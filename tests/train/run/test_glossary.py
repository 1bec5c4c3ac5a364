"""Every metric of the trainer is in the glossary, and the glossary names fields that there are."""

import re
from pathlib import Path

import pytest

from train.config.help import field_help
from train.rl.kl_metrics import KL_METRICS, largest_of
from train.run import glossary

FIELDS = set(re.findall(r"^  ([a-z_.]+):", field_help(), re.MULTILINE))
SOURCES = "".join(path.read_text() for path in sorted(Path(glossary.__file__).parents[1].rglob("*.py")))


def test_numbered_metrics_have_their_entry():
    entries = {"mismatch_k3_part_2_of_16": "mismatch_k3_part_N_of_K", "routing_flips_layer_11": "routing_flips_layer_N"}
    for name, entry in entries.items():
        assert getattr(glossary.metric_of(name), "name", None) == entry
    assert glossary.metric_of("format") is None
    assert glossary.metric_of("kl_reference_maximum") is None


def test_name_is_matched_once(monkeypatch):
    entry = glossary.metric_of("grad_norm")
    monkeypatch.setattr(glossary, "GLOSSARY", ())
    assert glossary.metric_of("grad_norm") is entry


@pytest.mark.parametrize("metric", glossary.GLOSSARY, ids=lambda metric: metric.name)
def test_glossary_names_fields_and_metrics(metric):
    """Code in a text is a metric, or a field, which may have its value beside it."""
    metrics = {entry.name for entry in glossary.GLOSSARY}
    for code in re.findall(r"`([^`]+)`", f"{metric.meaning} {metric.healthy} {metric.sick}"):
        field = code.partition(":")[0]
        sections = any(name.startswith(f"{field}.") for name in FIELDS)
        assert code in metrics or field in FIELDS or sections, code


@pytest.mark.parametrize("metric", glossary.GLOSSARY, ids=lambda metric: metric.name)
def test_glossary_has_no_metric_nobody_logs(metric):
    """The name stands in the sources, or is made there from a shorter one."""
    stem = re.split(r"_[NK](?=_|$)", metric.name)[0]
    terms = ("policy", "kl", "value", "rollout_kl", "router_balance", "router_z")
    made = {f"{term}_loss": term for term in terms}
    made |= {largest_of(name): name for name in KL_METRICS}
    assert any(f'"{name}' in SOURCES for name in (stem, made.get(stem, stem)))


def test_groups_stand_together():
    groups = [metric.group for metric in glossary.GLOSSARY]
    assert groups == sorted(groups, key=groups.index)
    assert len({metric.name for metric in glossary.GLOSSARY}) == len(groups)
