"""The site: `make docs`. How its pages are made, and why with Sphinx: docs/site.md."""

import sys
from importlib.metadata import version as version_of
from pathlib import Path


HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent)]

project = "fzero"
author = "the authors of fzero"
copyright = author  # Sphinx's name
release = version = version_of("fzero")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "site_pages",
]
exclude_patterns = ["_*", "**/_*"]
root_doc = "index"
myst_heading_anchors = 3
default_role = "literal"  # docstrings write `code` as Markdown does
highlight_language = "text"

autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
maximum_signature_line_length = 80
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_custom_sections = [("Source", "notes_style")]

html_theme = "furo"
html_title = "fzero"
html_favicon = "_static/icon.svg"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
