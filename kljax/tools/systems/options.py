"""Finds what an option of a system does: the names that it takes, or the argument that it sets."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from kljax.systems._entry import Entry
from kljax.systems._table import ENTRIES, SYSTEMS

WORD = re.compile(r"(?:--)?[A-Za-z][\w.-]*\w")


class OptionUse(NamedTuple):
    """One use of an option.

    Attributes:
      system: key of the system.
      option: the option as the system spells it.
      alias: the spelling that was asked for, where the option is now called otherwise or sets this argument.
      argument: the argument of the calls that it sets; empty where it takes the names of the entries.
      source: how the argument follows from the option; empty without an argument.
      entries: the names that it takes, or whose call has the argument.
    """

    system: str
    option: str
    alias: str
    argument: str
    source: str
    entries: tuple[Entry, ...]


def find_option(text: str) -> list[OptionUse]:
    """Lists the uses of an option in the order of the table, the names that it takes before the arguments that it sets.

    Args:
      text: the option or its last part, with or without dashes, as `--kl-loss-type` or `kl_loss_type`; case, hyphens
        and underscores do not matter. Flags of older releases are known where `System.aliases` has them.
    """
    uses: dict[tuple[str, str, str, str, str], list[Entry]] = {}
    for entry in ENTRIES:
        for alias, wanted in _spellings(entry.system, text):
            for option in _matches(entry.option, wanted):
                uses.setdefault((entry.system, option, alias, "", ""), []).append(entry)
            for argument, source in entry.sources.items():
                for option in _matches(source, wanted):
                    uses.setdefault((entry.system, option, alias, argument, source), []).append(entry)
    ordered = sorted(uses.items(), key=lambda item: bool(item[0][3]))
    return [OptionUse(*key, tuple(entries)) for key, entries in ordered]


def _spellings(system: str, text: str) -> Iterator[tuple[str, str]]:
    """Yields the option asked for, and options that it is another spelling of, each behind that spelling."""
    yield "", _normalized(text)
    for alias, options in SYSTEMS[system].aliases.items():
        if _is_option(alias.lstrip("-"), _normalized(text)):
            yield from ((alias, _normalized(option)) for option in options)


def _matches(written: str, wanted: str) -> list[str]:
    """Lists the options in a text of the table that are the wanted one, each once."""
    options = []
    for part in written.split(", "):
        words = WORD.findall(part.removeprefix("else "))
        # A word without a separator is an option where nothing else is said: `delta`, but not `old log-probs`.
        options += [word for word in words if len(words) == 1 or re.search("[._-]", word)]
    return list(dict.fromkeys(option for option in options if _is_option(option, wanted)))


def _is_option(option: str, wanted: str) -> bool:
    name = _normalized(option)
    return name == wanted or name.endswith(f".{wanted}")


def _normalized(text: str) -> str:
    return text.lstrip("-").casefold().replace("-", "_")
