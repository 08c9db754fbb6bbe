"""What the documentation shows runs: docstrings, the README's Python, the examples."""

from __future__ import annotations

import doctest
import re
from operator import attrgetter
from pathlib import Path

import pytest
from programs import python

import fusedrl
import fusedrl.models

# What a run in the tests is given, where the whole takes longer.
SHORT = {"grpo.py": ["3"]}

ROOT = Path(__file__).parents[1]
PAGES = [
    *("README.md", "docs/channel.md", "docs/context_parallel.md", "docs/losses.md"),
    "docs/mismatch.md",
]
SECOND_NAMES = {"aSyncDataCollector"}  # of classes, which have the examples of the first
NAMES = [name for name in fusedrl.__all__ if name not in {"__version__", *SECOND_NAMES}]
NAMES += [f"models.{name}" for name in fusedrl.models.__all__]
# name -> the package that its example imports
NEEDS = {"patch_trl": "trl", "models.WithoutAdapters": "peft"}
# Shown where they are returned.
NO_EXAMPLE = {
    "TokenLogProbs",
    "TokenKL",
    "ImportanceWeights",
    "Mismatch",
    "VersionChange",
    "WeightHandle",
    "WeightReader",
}
ONLY_DEFINE = {
    "RayRetrieveKL",
    "RayKLRewardTransform",
    "RayLLMCollector",
}  # a cluster takes seconds to start


@pytest.mark.parametrize("name", NAMES)
def test_docstring_examples(name):
    """Those of methods, too."""
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    public = attrgetter(name)(fusedrl)
    assert public.__doc__
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for test in doctest.DocTestFinder().find(public, name, globs={}):
        runner.run(test)
    assert runner.summarize(verbose=False).failed == 0


@pytest.mark.parametrize("name", sorted(set(NAMES) - NO_EXAMPLE - ONLY_DEFINE))
def test_every_example_shows_an_answer(name):
    """One that only defines a function proves nothing when it runs."""
    examples = doctest.DocTestParser().get_examples(attrgetter(name)(fusedrl).__doc__)
    assert any(example.want for example in examples)


@pytest.mark.parametrize("page", PAGES)
def test_python_on_pages_runs(page):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert blocks
    scope: dict = {"__name__": "__main__"}
    for block in blocks:
        exec(compile(block, page, "exec"), scope)


def test_readme_commands_exist():
    text = (ROOT / "README.md").read_text() + (ROOT / "CONTRIBUTING.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"(?:^|`)make ([a-z]+)", text, re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_examples_run(path, tmp_path):
    if path.name.startswith("vllm"):
        pytest.importorskip("vllm", reason="tests/engines runs it")
    done = python(path, *SHORT.get(path.name, []), cwd=tmp_path, taken_apart=True)
    assert done.returncode == 0, done.stderr
