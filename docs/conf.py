"""Sphinx settings. Build with `python -m sphinx -W --keep-going -b html docs docs/_build/html`.

RINGSPEC_EXECUTED_NOTEBOOKS names a folder of notebooks with outputs, which are then shown as they
are. Without it the notebooks are executed during the build.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import generate
import generate_api
import generate_bugs
import generate_errors
import generate_explore
import generate_vectors
import verdicts

import ringspec

project = "ringspec"
author = "the ringspec authors"
copyright = "the ringspec authors, Apache-2.0"
release = ringspec.__version__
version = release

extensions = [
    "mathml",
    "source_links",
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
]
exclude_patterns = [
    "_build",
    "_extra",
    "nki/official_suite_table.md",
    "reference/generated",
]
# Texts for issues; docs/verdicts.py copies them beside the matrix.
exclude_patterns += ["conform/reproducers"]

# 'zigzag' in a docstring is a value; curly quotes would make it prose.
smartquotes = False

html_theme = "furo"
html_title = f"ringspec {release}"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_js_files = [("browse.js", {"defer": "defer"})]

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
html_math_renderer = "mathml"

executed_notebooks = os.environ.get("RINGSPEC_EXECUTED_NOTEBOOKS")
nb_execution_mode = "off" if executed_notebooks else "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88

generate.notebooks(executed_notebooks)
generate.specification()
generate.reference()
generate_api.lists()
generate_errors.pages()
generate_vectors.pages()
generate_bugs.pages()
# Pages that are no Sphinx pages: they are copied to the root as they are.
html_extra_path = ["_extra"]
generate.example_report()
generate_explore.explore_pages()
verdicts.pages()


def setup(app):
    app.connect("autodoc-process-docstring", generate.prepare_docstring)
    app.connect("autodoc-process-signature", generate.signature_as_written)
    app.connect("doctree-read", generate_api.give_anchors)
    app.connect("html-page-context", generate.correct_back_links)
    app.connect("build-finished", generate_api.fold_index)
