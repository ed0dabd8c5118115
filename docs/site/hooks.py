"""What the site has beside the pages of docs: files from elsewhere in the checkout, the notebook, the decisions.

MkDocs calls these functions while it builds the site; mkdocs.yml names this file.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
ELSEWHERE = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "tests/emulated_cuda/README.md": "emulated-device.md",
}
"""Files outside of docs that are pages of the site, and the pages' names."""
NOTEBOOK = "notebook.ipynb"
_LINK = re.compile(r"(?<!\\)\]\((?!\w+:|#)([^)\s#]+)(#[^)\s]*)?\)")
_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):<code>(~?)([\w.]+)</code>")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the decisions in the navigation: a new one needs no line there."""
    for section in config.nav or []:
        for entry in next(iter(section.values())):
            if isinstance(entry, dict) and "Decisions" in entry:
                entry["Decisions"] = [
                    f"decisions/{path.name}" for path in sorted((ROOT / "docs/decisions").glob("*.md"))
                ]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made of other files."""
    for source, name in ELSEWHERE.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=linked(text, source)))
    notebook = json.loads((ROOT / "docs" / NOTEBOOK).read_text(encoding="utf-8"))
    files.append(File.generated(config, "notebook.md", content=notebook_page(notebook)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Lead links that leave docs to the pages made of what they name."""
    if page.file.generated_by:
        return markdown
    return linked(markdown, f"docs/{page.file.src_uri}")


def on_page_content(html: str, **_: Any) -> str:
    """Show the roles of docstrings as the names that they stand for."""
    return _ROLE.sub(lambda role: f"<code>{role[2].rsplit('.', 1)[-1] if role[1] else role[2]}</code>", html)


def linked(markdown: str, source: str) -> str:
    """Return the text of a file with its links to files as the site needs them.

    Args:
        markdown: The text.
        source: Where it is, from the root of the checkout.
    """
    folder = (ROOT / source).parent

    def target(link: re.Match[str]) -> str:
        path = (folder / link[1]).resolve()
        if not path.is_relative_to(ROOT):
            return link[0]
        name = path.relative_to(ROOT).as_posix()
        depth = "../" * (source.count("/") - 1) if source.startswith("docs/") else ""
        if name == "README.md":
            found = "index.md"
        elif name in ELSEWHERE:
            found = ELSEWHERE[name]
        elif name.startswith("docs/") and not source.startswith("docs/"):
            found = name.removeprefix("docs/")
        else:
            return link[0]
        return f"]({depth}{found}{link[2] or ''})"

    return _LINK.sub(target, markdown)


def notebook_page(notebook: dict[str, Any]) -> str:
    """Return a notebook as a page: its texts, its code, and what that printed when it was stored."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        printed = "".join("".join(output.get("text", [])) for output in cell["outputs"])
        if printed:
            parts.append(f"```text\n{printed.rstrip()}\n```")
    return "\n\n".join(parts) + f"\n\n[The notebook]({NOTEBOOK}), to be run.\n"
