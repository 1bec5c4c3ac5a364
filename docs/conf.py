"""Sphinx configuration. The pages are Markdown; the API reference and the tables of the systems come from the code."""

import os
import pathlib
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the tables of numbers are small
sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

project = "kljax"
author = "the kljax authors"
copyright = "the kljax authors, Apache-2.0"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "docs._extension"]
exclude_patterns = ["_build"]

smartquotes = False  # "k3" in quotes is a string to pass

html_theme = "furo"
html_title = "kljax"
html_static_path = ["_static"]
html_css_files = ["widths.css"]
html_copy_source = False
html_show_sourcelink = False

myst_enable_extensions = ["dollarmath"]
html_math_renderer = "mathml"
myst_heading_anchors = 3

# Every reference resolves, or the build fails: `make docs` turns warnings into errors.
nitpicky = True
nitpick_ignore = [("py:exc", name) for name in ("ValueError", "TypeError", "FileNotFoundError", "KeyError")]

# Docstrings state shapes and types; the annotations would only repeat them.
autodoc_typehints = "none"
python_use_unqualified_type_names = True
napoleon_attr_annotations = False
napoleon_use_ivar = True
# As plain headings: the usual treatment of "Returns" takes the text before its first colon for a type.
napoleon_custom_sections = ["Returns", "Gradient"]
