"""Formulas of the pages."""

import re

from latex2mathml.converter import convert


def to_mathml(latex: str, display: str) -> str:
    """Translates a formula, which browsers then show without a script or a network."""
    words = re.sub(r"\\text\{[^}]*\}", lambda text: text[0].replace(r"\_", "_"), latex)  # text needs no escape
    mathml = convert(words, display=display)
    if "\\" in mathml:  # a command that the translator does not know passes as text
        raise ValueError(f"a formula that MathML cannot show: {latex}")
    return mathml
