"""MkDocs hooks: show the repository's own files (README, DESIGN, examples …) on the site.

Links in those files, and links from docs/ to them, are written for the repository. They are
rewritten here to the pages of the site; the strict build then checks every one.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent.parent
PAGES = {
    "README.md": "index.md",
    "DESIGN.md": "design.md",
    "LAB.md": "lab.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "CITATION.cff": "citation.md",
    "examples": "examples/index.md",
}
INCLUDE = re.compile(r"<!-- include (\S+\.py) -->")
LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)(#[^)]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    pages = {
        PAGES[name]: _links((ROOT / name).read_text(), Path())
        for name in PAGES
        if name.endswith(".md")
    }
    citation = (ROOT / "CITATION.cff").read_text()
    intro = "# Citation\n\nThe method is the paper's; please cite it.\n"
    pages["citation.md"] = intro + _code(citation, "yaml")
    pages["examples/index.md"] = _examples()
    for page, text in pages.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.generated_by is not None:
        return markdown
    return INCLUDE.sub(_included, _links(markdown, Path("docs")))


def _included(match: re.Match[str]) -> str:
    """The file that a comment of a page names, as code; a file that is missing fails the build."""
    return _code((ROOT / match[1]).read_text(), "python")


def _examples() -> str:
    parts = ["# Examples\n\nEach script runs in seconds; the test suite runs them all.\n"]
    for script in sorted((ROOT / "examples").glob("*.py")):
        parts.append(f"## {script.name}\n{_code(script.read_text(), 'python')}")
    return "\n".join(parts)


def _code(text: str, language: str) -> str:
    return f"\n```{language}\n{text.rstrip()}\n```\n"


def _links(markdown: str, folder: Path) -> str:
    """Links of a file in `folder` of the repository, as links between pages of the site."""

    def page_of(match: re.Match[str]) -> str:
        parts = [part for part in (folder / match[1]).parts if part != "."]
        while ".." in parts:
            i = parts.index("..")
            del parts[i - 1 : i + 1]
        target, anchor = "/".join(parts), match[2] or ""
        if target.startswith("examples/"):
            target, anchor = "examples", f"#{Path(target).name.replace('.', '').lower()}"
        return f"]({PAGES.get(target, target.removeprefix('docs/'))}{anchor})"

    return LINK.sub(page_of, markdown)
