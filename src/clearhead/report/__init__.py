"""A look as one self-contained HTML file that needs no network and runs nothing but its own script.

`render` gives the page as a string, `write` puts it into a file. The text of the prompt, the names and the
notes may come from anywhere, so they travel as data beside the page and never as markup.
"""

from clearhead.report.html import render, write

__all__ = ["render", "write"]
