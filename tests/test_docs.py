"""The documentation: lines of readable length, code that runs, links and names that exist."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

import sparge
from floors import FLOORS
from sparge.synthetic import structured_qkv

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
AT_THE_ROOT = ("README", "DESIGN", "CONTRIBUTING", "CHANGELOG", "SECURITY", "LAB")
TEXTS = [*PAGES, *(ROOT / f"{name}.md" for name in AT_THE_ROOT)]
RUNNABLE = [page for page in PAGES if "```python\n" in page.read_text()]


def name_of(path: Path) -> str:
    return path.name


def prose(text: str) -> list[str]:
    """The lines of a page that are neither code nor table."""
    outside = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return [line for line in outside.splitlines() if not line.startswith("|")]


def tool(name: str):
    """A script of docs/tools, which is no package."""
    spec = importlib.util.spec_from_file_location(name, DOCS / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_prose_is_at_most_120_columns_wide(path):
    lines = prose(path.read_text())
    assert lines
    assert [line for line in lines if len(line) > 120] == []


@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_links_lead_to_files(path):
    for link in re.findall(r"\]\((?!https?:)([^)#\s]+)", path.read_text()):
        assert (path.parent / link).exists(), link


def test_there_are_pages_with_code():
    assert DOCS / "quickstart.md" in RUNNABLE


@pytest.mark.parametrize("page", RUNNABLE, ids=name_of)
def test_code_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        exec(code, names)
    if page.name == "quickstart.md":
        assert names["same"].equal(names["plan"])
        assert 0 < names["plan"].density < 1
        assert 0 < names["error"].max() < 0.1


def test_every_public_name_is_in_the_reference():
    text = (DOCS / "api.md").read_text()
    for name in sparge.__all__:
        assert re.search(rf"sparge\.{name}\b", text), name


def test_every_environment_variable_is_documented():
    source = "\n".join(file.read_text() for file in (ROOT / "src" / "sparge").rglob("*.py"))
    text = (DOCS / "backends.md").read_text()
    names = set(re.findall(r'"(SPARGE_[A-Z]+)"', source))
    assert {"SPARGE_BACKEND", "SPARGE_ISA", "SPARGE_CACHE"} <= names
    assert [name for name in sorted(names) if f"`{name}`" not in text] == []


def test_every_command_is_documented():
    from sparge.cli import COMMANDS

    text = (DOCS / "quickstart.md").read_text()
    assert [name for name in COMMANDS if f"`sparge {name}`" not in text] == []


def test_pictures_show_the_plans_of_this_code():
    pictures = tool("pictures")
    for name, recipes in pictures.PICTURES.items():
        assert (DOCS / "pictures" / f"{name}.svg").read_text() == pictures.draw(recipes), (
            "run python docs/tools/pictures.py"
        )


HOP = re.compile(r"^([ ├└│]*)([\w.]+) .*?  ?([\w/]+(?:\.py|/))(?: |$)")


def walks():
    """The pictures of calls in DESIGN.md: of every hop its depth, its function and its file."""
    text = (ROOT / "DESIGN.md").read_text()
    (chapter,) = re.findall(r"## A call, hop by hop\n(.*?)\n## ", text, re.DOTALL)
    pictures = re.findall(r"```\n(.*?)```", chapter, re.DOTALL)
    found = [[HOP.match(line).groups() for line in p.splitlines()] for p in pictures]
    return [[(len(depth), name, file) for depth, name, file in walk] for walk in found]


def hops():
    return [(name, file) for _, name, file in walks()[0]]


def test_every_walk_names_files_and_goes_down_the_folders():
    """A hop lies in the folder of the hop that makes it, or below."""
    source = Path(sparge.__file__).parent
    assert len(walks()) == 6
    for walk in walks():
        above = []
        for depth, name, file in walk:
            place = source / file.replace("NAME", "reference")
            assert place.exists(), file
            text = "".join(
                p.read_text() for p in ([place] if place.is_file() else place.glob("*.py"))
            )
            name = name.removeprefix("torch.ops.sparge.")
            assert re.search(rf"(def|class) {name}\b|\"{name}\"", text), (name, file)
            while above and above[-1][0] >= depth:
                above.pop()
            floor = FLOORS.index(file.removesuffix(".py").split("/")[0])
            assert not above or floor <= above[-1][1], (name, file)
            above.append((depth, floor))


def test_every_file_that_the_design_names_exists():
    text = (ROOT / "DESIGN.md").read_text()
    files = {
        path.as_posix()
        for folder in ("src/sparge", "tools", "csrc", "tests", "docs")
        for path in (ROOT / folder).rglob("*.*")
    }
    for name in set(re.findall(r"`([\w/]+\.(?:py|h|cpp|md|txt))`", text)):
        assert any(file.endswith(f"/{name}") for file in files), name


def test_a_call_takes_the_hops_of_the_picture():
    package = Path(sparge.__file__).parent
    seen: list[tuple[str, str]] = []

    def see(frame, event, _):
        file = Path(frame.f_code.co_filename)
        if event == "call" and package in file.parents:
            seen.append((frame.f_code.co_name, file.relative_to(package).as_posix()))

    query, key, value = structured_qkv(Hq=1, Hk=1, L=333)
    before = sys.getprofile()
    sys.setprofile(see)
    try:
        sparge.attention(query, key, value, is_causal=True, backend="reference")
    finally:
        sys.setprofile(before)
    here = iter(seen)  # each hop is looked for behind the one before it
    for name, file in hops():
        if file == "engine/ops.py" or name in ("attend_dense", "run_call"):
            assert (package / file).exists()  # other ways than that of this call
        else:
            file = file.replace("NAME", "reference")
            assert any(n == name and f.startswith(file) for n, f in here), (name, file)
    assert len(hops()) >= 12


def test_bench_output_becomes_a_table():
    case = "  8192 d64 full 2t      "
    output = f"""
{case}SDPA bf16       1.000   0.0015   0.0015     454       –       –    1.00x     4%    1.69
{case}cpu all         1.000   0.0028   0.0028     163    2.08    0.30    2.79x     7%   0.606
{case}cpu 40%         0.411   0.0068   0.0028   70.11    1.96    0.59    6.48x    56%   0.261
"""
    bench_table = tool("bench_table")
    *_, row = bench_table.table(output).splitlines()
    assert row.startswith(
        "| 8192, 64, full | 454 | 2.79x (1.00, 0.003) | 6.48x* (0.41, 0.007) | – |"
    )
    with pytest.raises(ValueError, match="no rows"):
        bench_table.table("{}")
