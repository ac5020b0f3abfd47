"""How `make docs` builds the site: Sphinx with MyST and furo, from the pages as they lie in the
repository.

Sphinx is neither at the end of its maintenance (mkdocs-material) nor young (Zensical). The source
folder is the repository, so that links between pages, records and READMEs are the same here and on
a repository's web page.
"""

project = "raypipe"
author = "The raypipe authors"
extensions = ["myst_parser"]
root_doc = "docs/index"
include_patterns = [
    "docs/*.md",
    "infra/README.md",
    "infra/**/*.md",
    "benchmarks/results/*.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
]
exclude_patterns = ["docs/_build"]
html_theme = "furo"
html_title = "raypipe"
html_show_sourcelink = False
html_copy_source = False
myst_heading_anchors = 3
myst_enable_extensions = ["deflist"]  # the page of settings
