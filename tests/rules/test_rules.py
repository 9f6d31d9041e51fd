"""Every rule of docs/meaning.md has a test that names it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
MEANING = TESTS.parent / "docs" / "meaning.md"


def marked_rules() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for file in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef):
                for mark in node.decorator_list:
                    if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.rule":
                        for rule in mark.args:
                            found.setdefault(ast.literal_eval(rule), []).append(node.name)
    return found


def test_every_rule_has_a_test():
    rules = re.findall(r"^- \*\*(\d+\.\d+)\*\*", MEANING.read_text(), re.MULTILINE)
    assert len(rules) == len(set(rules)) >= 50
    marked = marked_rules()
    assert sorted(set(rules) - set(marked)) == [], "rules without a test"
    assert sorted(set(marked) - set(rules)) == [], "marks that name no rule"
