"""The targets of whole models, and their results as Markdown."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.report import conditions, mebibytes, number, problems, table, targets
from benchmarks.harness.results import ALL, Check, Target, check, ratio
from benchmarks.suites.model.suite import OTHER, TITLES, WorkResults

PARTS = {"rollout": "Rollout", "update": "Update", ALL: "Rollout and update"}
LARGE_VOCAB = 32_768
TARGETS = {
    "rollout": (
        Target("speed", "kljax", "tunix", 2.0, part="rollout"),
        Target("speed", "kljax", "transformers", 3.0, part="rollout"),
    ),
    "step": (
        Target("speed", "kljax", "tunix", 1.5, 2.0, part="update"),
        Target("peak", "kljax", "tunix", 0.5, part="update"),
    ),
}
# Against another checkout, a change may cost 3 %.
AGAINST = {"speed": 0.97, "peak": 1.03, "compile": 1.03}
COLUMNS = "contender|wall s|tokens/s|kljax is faster by|CPU s|tokens/CPU s|kljax is faster by"


def markdown(report: Mapping[str, Any], sizes: Sequence[WorkResults], part: str) -> str:
    """Returns the conditions, and for each model its parts, problems and targets."""
    how = [f"{report['threads'] or 'all'} threads of each process"]
    lines = conditions(report, [*how, f"the fastest of {report['rounds']} interleaved rounds"])
    for one in sizes:
        work = one.work
        lines += [
            "",
            f"### V={work.vocab:,}",
            "",
            f"{work.layers} layers, width {work.width}, {work.heads} heads x {work.head_dim}, {work.kv_heads} KV "
            f"heads, MLP {work.mlp_width}, float32; {work.prompts} prompts x {work.samples} completions, "
            f"{work.prompt_length} + {work.completion_length} tokens.",
        ]
        for name in ("rollout",) if part == "rollout" else PARTS:
            lines += ["", f"{PARTS[name]}:", "", *_table(one, name)]
        lines += problems(one.results.values(), TITLES)
        lines += ["", *targets(checks(one, part), "by the other clock")]
    return "\n".join(lines) + "\n"


def checks(measured: WorkResults, part: str) -> list[Check]:
    """Compares the results of a model with the targets of a part."""
    large = measured.work.vocab >= LARGE_VOCAB
    found = [check(target, title(target), measured.results, large=large) for target in TARGETS[part]]
    if OTHER in measured.results:
        against = [
            Target(measure, "kljax", OTHER, limit, part=name)
            for name in (("rollout",) if part == "rollout" else ("rollout", "update"))
            for measure, limit in AGAINST.items()
        ]
        found += [check(target, title(target), measured.results, large=large, digits=3) for target in against]
    return found


def title(target: Target) -> str:
    """Describes a target."""
    names = {"speed": "speed", "peak": "peak memory", "compile": "time of the first run"}
    unit = "" if target.measure == "peak" else ", in CPU seconds"
    return f"{target.part}: {names[target.measure]} of kljax over {TITLES[target.against]}{unit}"


def _table(measured: WorkResults, part: str) -> list[str]:
    ours = measured.results["kljax"]
    tokens = measured.work.new_tokens if part == "rollout" else measured.work.tokens
    compared = {ALL: (), "rollout": ("log-probs",), "update": ("log-probs", "update")}[part]
    rows = []
    for result in measured.results.values():
        if result.problem is not None or result.best("wall", part) is None:
            continue
        cells = [TITLES[result.name]]
        for clock in ("wall", "cpu"):
            seconds = result.best(clock, part)
            faster = None if result is ours else ratio(seconds, ours.best(clock, part))
            cells += [number(seconds, ".3g"), number(ratio(tokens, seconds), ",.0f"), number(faster, ".2f")]
        if part != ALL:
            cells.append(mebibytes(result.peak_bytes.get(part)))
        forms = {"log-probs": ".0e", "update": ".1%"}
        rows.append([*cells, *(number(result.differences.get(name), forms[name]) for name in compared)])
    peak = [] if part == ALL else ["peak MiB"]
    return table([*COLUMNS.split("|"), *peak, *(f"{name} differ by" for name in compared)], rows)
