"""The documentation: its Python runs as it stands, its commands and links exist."""

import ast
import re

import pytest
from launching import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def body_of(source: str, name: str) -> str:
    """The code of a function without its docstring and comments."""
    function = next(n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef) and n.name == name)
    if ast.get_docstring(function):
        function.body = function.body[1:]
    return ast.unparse(function.body)


def test_the_python_of_the_guide_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "guide.md").read_text(), flags=re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "guide.md", "exec"), {})  # our own text, not a model's


def test_the_recipe_in_the_readme_is_the_recipe():
    blocks = re.findall(r"```(?:python|py)\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    shown = [block for block in blocks if "def train(r" in block]
    assert len(shown) == 1
    recipe = (ROOT / "experiments" / "ladder" / "grpo.py").read_text()
    assert body_of(shown[0], "train") == body_of(recipe, "train")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_links_or_runs_exist(page):
    text = page.read_text()
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if not link.startswith("http")]
    missing = [link for link in links if link and not (page.parent / link).exists()]
    scripts = re.findall(r"python (?:-m pytest )?((?:experiments|tools|tests)/[\w/]+\.py)", text)
    missing += [script for script in scripts if not (ROOT / script).exists()]
    assert not missing
