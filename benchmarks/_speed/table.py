"""What was measured as Markdown, held against the targets."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks._report import _table as table
from benchmarks._speed.race import OTHER, TITLES, Measured, Result

PARTS = {"rollout": "rollout", "update": "update", "all": "rollout and update"}
LARGE_VOCAB = 32_768


@dataclasses.dataclass(frozen=True)
class Target:
    """A bound of kljax over another contender.

    Attributes:
      part: of a run.
      against: the other contender.
      measure: "speed", tokens per CPU second, at least; "memory", peak, at most; or "compile", CPU seconds of the first
        run in a fresh process, at most.
      limit: the bound.
      large_limit: the bound at a vocabulary of 32,768 and more, where it is another one.
    """

    part: str
    against: str
    measure: str
    limit: float
    large_limit: float | None = None

    def limit_for(self, vocab: int) -> float | None:
        """The bound at a vocabulary; None: there is none."""
        return self.limit if self.large_limit is None or vocab < LARGE_VOCAB else self.large_limit


TARGETS = {
    "rollout": (Target("rollout", "tunix", "speed", 2.0), Target("rollout", "transformers", "speed", 3.0)),
    "step": (Target("update", "tunix", "speed", 1.5, 2.0), Target("update", "tunix", "memory", 0.5)),
}
# Another checkout: a change costs no more than the noise of a quiet machine.
AGAINST = {
    part: tuple(
        Target(name, OTHER, measure, limit)
        for name in names
        for measure, limit in (("speed", 0.97), ("memory", 1.03), ("compile", 1.03))
    )
    for part, names in {"rollout": ("rollout",), "step": ("rollout", "update")}.items()
}


def markdown(report: dict[str, Any], sizes: Sequence[Measured], part: str) -> str:
    """Where and how, and for each size its parts, its problems and its targets."""
    lines = _conditions(report)
    for measured in sizes:
        work = measured.work
        lines += [
            "",
            f"### V={work.vocab:,}",
            "",
            f"{work.layers} layers, width {work.width}, {work.heads} heads x {work.head_dim}, {work.kv_heads} of keys "
            f"and values, MLP {work.mlp_width}, float32; {work.prompts} prompts x {work.samples} completions, "
            f"{work.prompt_length} + {work.completion_length} tokens.",
        ]
        for name in ("rollout",) if part == "rollout" else PARTS:
            lines += ["", f"{PARTS[name][0].upper()}{PARTS[name][1:]}:", "", *_rows(measured, name)]
        for one in measured.results.values():
            if one.problem is not None:
                lines += ["", f"Not measured: {TITLES[one.name]}: {one.problem}."]
        lines += ["", *_targets(measured, part)]
    return "\n".join(lines) + "\n"


def _conditions(report: dict[str, Any]) -> list[str]:
    machine, load = report["machine"], report["load"]
    where = ", ".join(str(value) for name, value in machine.items() if value and name != "date")
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    how = (
        f"{report['threads'] or 'All'} threads of each process; {report['rounds']} interleaved rounds, of which the "
        f"fastest counts; load of the machine before and after {load[0]} and {load[1]}."
    )
    return [f"{machine['date']} on {where}; {versions}.", "", how]


def _tokens(measured: Measured, part: str) -> int:
    """What tokens per second count: the sampled ones, or all that an update goes over."""
    return measured.work.new_tokens if part == "rollout" else measured.work.tokens


def _rows(measured: Measured, part: str) -> list[str]:
    head = "contender|wall s|tokens/s|kljax is faster by|CPU s|tokens/CPU s|kljax is faster by|peak MiB"
    ours = measured.results["kljax"]
    compared = part != "all"
    checks = "|log-probs differ" + ("" if part == "rollout" else "|update differs") if compared else ""
    rows = [
        _row(one, ours, measured, part)[: None if compared else 7]
        for one in measured.results.values()
        if one.problem is None and one.best(part, False) is not None
    ]
    names = (head + checks).split("|")
    names = names if compared else names[:7]
    return table(names, [row[: len(names)] for row in rows])


def _row(one: Result, ours: Result, measured: Measured, part: str) -> list[str]:
    tokens = _tokens(measured, part)
    cells = [TITLES[one.name]]
    for cpu in (False, True):
        seconds = one.best(part, cpu)
        faster = ratio(seconds, ours.best(part, cpu))
        cells += [
            _number(seconds, ".3g"),
            _number(ratio(tokens, seconds), ",.0f"),
            "" if one is ours else _number(faster, ".2f"),
        ]
    peak = one.peaks.get(part)
    cells += [_number(None if peak is None else peak / 2**20, ",.0f")]
    return [*cells, "" if one is ours else _number(one.score, ".0e"), _number(one.learned, ".1%")]


@dataclasses.dataclass(frozen=True)
class Check:
    """A target, what was found, and "met", "missed" or "not measured"."""

    target: Target
    limit: float
    value: float | None
    wall: float | None
    verdict: str


def check(measured: Measured, part: str) -> list[Check]:
    """Every target of the part at this size."""
    found = []
    for target in (*TARGETS[part], *(AGAINST[part] if OTHER in measured.results else ())):
        limit = target.limit_for(measured.work.vocab)
        ours, theirs = measured.results.get("kljax"), measured.results.get(target.against)
        value = wall = None
        if limit is None:
            continue
        if ours is not None and theirs is not None and ours.problem is None and theirs.problem is None:
            if target.measure == "compile":
                value, wall = (
                    ratio(ours.compiling(target.part, cpu), theirs.compiling(target.part, cpu)) for cpu in (True, False)
                )
            elif target.measure == "memory":
                value = ratio(ours.peaks.get(target.part), theirs.peaks.get(target.part))
            else:
                value, wall = (
                    ratio(theirs.best(target.part, cpu), ours.best(target.part, cpu)) for cpu in (True, False)
                )
        good = value is not None and (value >= limit if target.measure == "speed" else value <= limit)
        verdict = "not measured" if value is None else "met" if good else "missed"
        found.append(Check(target, limit, value, wall, verdict))
    return found


def _targets(measured: Measured, part: str) -> list[str]:
    rows: Iterable[list[str]] = (
        [
            f"{one.target.part}: {one.target.measure} of kljax over {TITLES[one.target.against]}"
            + {"speed": ", per CPU second", "compile": ", CPU seconds"}.get(one.target.measure, ""),
            f"{'at least' if one.target.measure == 'speed' else 'at most'} {one.limit:g}",
            _number(one.value, ".3f" if one.target.against == OTHER else ".2f"),
            _number(one.wall, ".3f" if one.target.against == OTHER else ".2f"),
            one.verdict,
        ]
        for one in check(measured, part)
    )
    return table(["target", "bound", "found", "by the clock", ""], rows)


def ratio(above: float | None, below: float | None) -> float | None:
    """A quotient, None where one is unknown."""
    return None if above is None or not below else above / below


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
