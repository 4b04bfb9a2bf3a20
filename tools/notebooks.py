"""Notebooks of the documentation as Markdown, for the site and for the tests."""

from __future__ import annotations

import json
from pathlib import Path


def as_markdown(path: Path) -> str:
    """Return a notebook as a page: its cells in order, and after each what it printed."""
    parts: list[str] = []
    continued = ""
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python{continued}\n{source}\n```")
        continued = ' title="continued"'
        parts += [f"```text\n{''.join(each['text'])}```" for each in cell["outputs"]]
    return "\n\n".join(parts) + "\n"
