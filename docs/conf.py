"""The configuration of Sphinx: `make docs` builds the site."""

import re
import typing
from pathlib import Path

import numpy.typing
from sphinx.application import Sphinx

# Signatures show the name, not the union behind it.
numpy.typing.ArrayLike = typing.NewType("ArrayLike", object)

import cgx_ops  # noqa: E402

project = "cgx_ops"
author = "The cgx_ops authors"
copyright = f"2026, {author}"  # noqa: A001  (Sphinx's name)
version = release = cgx_ops.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinxarg.ext",
]

html_theme = "furo"
html_title = "cgx_ops"
html_theme_options = {"navigation_with_keys": True}
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
myst_ref_domains = ["py", "std"]

default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
# The packages of trainers are not installed where the site is built.
autodoc_mock_imports = ["lightning", "torchft", "transformers"]
autosummary_generate = False
maximum_signature_line_length = 88
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
python_use_unqualified_type_names = True


def link_repository_pages(app: Sphinx, document: str, source: list[str]) -> None:
    """Turn links to Markdown files outside docs/, which are not pages, into downloads."""
    folder = Path(app.srcdir, document).parent

    def link(found: re.Match[str]) -> str:
        is_page = (folder / found[1]).resolve().is_relative_to(app.srcdir)
        return found[0] if is_page else f"](path:{found[1]})"

    source[0] = re.sub(r"\]\(((?:\.\./)+[^)#]+\.md)(?:#[^)]*)?\)", link, source[0])


def setup(app: Sphinx) -> None:
    """Register the hooks of this file."""
    app.connect("source-read", link_repository_pages)
