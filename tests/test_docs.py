"""What the documentation shows runs: docstrings, the README's Python, the examples."""

from __future__ import annotations

import ast
import doctest
import importlib
import json
import re
from operator import attrgetter
from pathlib import Path

import pytest
from programs import python
from shown import assert_prints, blocks, texts

import fusedrl
import fusedrl.models

# What a run in the tests is given, where the whole takes longer.
SHORT = {
    "grpo.py": ["3", "--steps", "3"],
    "trl_grpo.py": ["--patched", "--steps", "5", "--length", "6", "--classes", "500"],
}

ROOT = Path(__file__).parents[1]
# Pages with Python that runs; "py" is what a page shows without the names around it.
PAGES = [
    page.relative_to(ROOT).as_posix()
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if "```python\n" in page.read_text()
]
# page -> the package that its program imports
PAGE_NEEDS = {"docs/tutorials/grpo-with-trl.md": "trl"}
# Pages whose text is what a command prints -> the example, or the tests that run the command
COMMANDS = {
    "README.md": "tests/cli/test_demo.py",
    "docs/start/first-score.md": "tests/cli/test_demo.py",
    "docs/tutorials/score-your-chats.md": "tests/cli/test_score_said.py",
    "docs/tutorials/grpo-with-torchrl.md": "examples/grpo.py",
    "docs/tutorials/grpo-with-trl.md": "examples/trl_grpo.py",
}
# Pages of models, whose first weights may be others with another transformers.
FIGURES_VARY = {"docs/start/first-loss.md"}
# page -> the tests that run it
ELSEWHERE = {
    "docs/tutorials/weights-into-vllm.md": "tests/engines/test_docs.py",
    "docs/tutorials/ray-cluster.md": "tests/collectors/test_ray_llm_collector.py",
}
SECOND_NAMES = {"aSyncDataCollector"}  # of classes, which have the examples of the first
NAMES = [name for name in fusedrl.__all__ if name not in {"__version__", *SECOND_NAMES}]
NAMES += [f"models.{name}" for name in fusedrl.models.__all__]
# name -> the package that its example imports
NEEDS = {"patch_trl": "trl", "models.WithoutAdapters": "peft", "models.WithAdapter": "peft"}
# Shown where they are returned.
NO_EXAMPLE = {
    "TokenLogProbs",
    "ExactKL",
    "PolicyLoss",
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


def examples_run(documented, name):
    """Those of its methods and functions, too."""
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for test in doctest.DocTestFinder().find(documented, name, globs={}):
        runner.run(test)
    found = runner.summarize(verbose=False)
    assert found.failed == 0
    return found.attempted


@pytest.mark.heavy
@pytest.mark.parametrize("name", NAMES)
def test_docstring_examples(name):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    public = attrgetter(name)(fusedrl)
    assert public.__doc__
    examples_run(public, name)


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["ragged", "assistant_tokens"])
def test_examples_of_modules_that_others_are_made_of(name):
    assert examples_run(importlib.import_module(f"fusedrl.{name}"), name) > 0


@pytest.mark.parametrize("name", sorted(set(NAMES) - NO_EXAMPLE - ONLY_DEFINE))
def test_every_example_shows_an_answer(name):
    """One that only defines a function proves nothing when it runs."""
    examples = doctest.DocTestParser().get_examples(attrgetter(name)(fusedrl).__doc__)
    assert any(example.want for example in examples)


@pytest.mark.heavy
@pytest.mark.parametrize("page", sorted(set(PAGES) - ELSEWHERE.keys()))
def test_python_on_pages_runs(page, tmp_path):
    """All of a page as one program, as a reader saves it."""
    if page in PAGE_NEEDS:
        pytest.importorskip(PAGE_NEEDS[page])
    program = tmp_path / "page.py"
    program.write_text("\n".join(blocks(ROOT / page, "python")))
    done = python(program, cwd=tmp_path, taken_apart=True)
    assert done.returncode == 0, done.stderr
    if shown := texts(ROOT / page, "python"):
        assert_prints(shown, done.stdout, figures=page not in FIGURES_VARY)


@pytest.mark.parametrize(("page", "tests"), (ELSEWHERE | COMMANDS).items())
def test_other_pages_run_elsewhere(page, tests):
    """A page names the example that it shows, and tests name the page that they run."""
    name, where = (tests, page) if tests.startswith("examples/") else (Path(page).name, tests)
    assert name in (ROOT / where).read_text()


def test_what_pages_show_is_compared():
    """With what their own Python prints, or with what the command before it does."""
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        page, compared = path.relative_to(ROOT).as_posix(), texts(path, "python")
        compared += texts(path, "console") if page in {*COMMANDS, *ELSEWHERE} else ""
        assert len("".join(blocks(path, "text"))) == len(compared), page


SUBMODULES = (
    "fusedrl.ops",
    "fusedrl.transforms",
    "fusedrl.objectives",
    "fusedrl.models",
    "fusedrl.channel",
    "fusedrl.weights",
    "fusedrl.collectors",
    "fusedrl.vllm",
    "fusedrl.integrations.trl",
    "fusedrl.scoring",
    "fusedrl.demo",
)


def exported(module):
    """``__all__`` as it is written, without an import of what the module needs."""
    path = ROOT / "python" / module.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return ast.literal_eval(node.value)
    raise AssertionError(f"{module} has no __all__")


def test_every_public_name_is_in_the_reference():
    pages = "".join(page.read_text() for page in (ROOT / "docs/reference").glob("*.md"))
    entries = set(re.findall(r"^::: (\S+)$|\{: #(\S+) \}", pages, re.MULTILINE))
    entries = {"".join(entry) for entry in entries}
    top = set(fusedrl.__all__) - {"__version__"}
    assert {f"fusedrl.{name}" for name in top} <= entries
    for module in SUBMODULES:
        for name in exported(module):
            assert f"fusedrl.{name}" in entries or f"{module}.{name}" in entries, (module, name)


@pytest.mark.heavy
def test_commands_on_pages_have_such_options():
    """Every option that a page gives to ``fusedrl COMMAND`` is in the help of that command."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    given: dict[str, set[str]] = {}
    for page in pages:
        for block in re.findall(r"```console\n(.*?)```", page.read_text(), re.DOTALL):
            for command, rest in re.findall(r"^fusedrl (\w+)(.*)", block, re.MULTILINE):
                options = re.findall(r"--[\w-]+", rest.partition("#")[0])
                given.setdefault(command, set()).update(options)
    assert {"score", "demo", "check", "bench", "info"} <= given.keys()
    for command, options in given.items():
        shown = python("-c", f"from fusedrl.cli import main; main(['{command}', '--help'])")
        assert shown.returncode == 0, shown.stderr
        assert options <= set(re.findall(r"--[\w-]+", shown.stdout)), command


CHATS = "8 x ~270 tokens, 30% kept, hidden {}"
OTHERS = ("torchrl", "TRL", "two log_softmax + sum")
# What a row of the README begins with -> the file, and how its op, setting and rival begin.
README_ROWS = {
    "Rewards with a KL penalty": ("models", "RetrieveKL", CHATS.format(128)),
    "The same with two larger": ("models", "RetrieveKL", CHATS.format(512)),
    "Exact KL of two models": ("bench", "exact_kl", "[256, 151936] float32, reverse"),
    "The same, against `torch.compile`": ("bench", "exact_kl", "[256, 151936] float32, reverse"),
    "Log-probs and entropy": (
        "trl",
        "trl: selective_log_softmax_and_entropy",
        "[4, 256, 32000] bf",
    ),
    "GRPO's head": ("trl", "trl: fused LM head", "GRPO, 1024 tokens, hidden 512, V 32000 float32"),
    "1 GB of new weights": ("channel", "channel: update to computing", "1 GB"),
    "Frames with a wrong": ("channel", "channel: mis-tagged frames", "800 frames"),
}


def readme_rows():
    lines = re.findall(r"^\|(.+)\|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    rows = [[cell.strip() for cell in line.split("|")] for line in lines]
    return {text: (faster, memory) for text, faster, memory in rows[2:]}


@pytest.mark.parametrize("start", README_ROWS)
def test_readme_has_the_figures_that_were_measured(start):
    file, op, setting = README_ROWS[start]
    path = ROOT / f"benchmarks/results/epyc-2-cores/{file}.json"
    rows = [r for r in json.loads(path.read_text())["rows"] if r["op"].startswith(op)]
    rows = [r for r in rows if r["setting"].startswith(setting)]
    [ours] = [r for r in rows if r["contender"] == "fusedrl"]
    rivals = ("torch.compile",) if "compile" in start else OTHERS
    rival = next(r for r in rows if r["contender"] in rivals)
    [(faster, memory)] = [row for text, row in readme_rows().items() if text.startswith(start)]
    assert faster == (f"{rival['speedup']:.2g}x" if rival["speedup"] else "")
    if op.endswith("frames"):
        assert memory == f"{ours['error']:.0f}, torchrl {rival['error']:.0f}"
    elif memory:
        assert memory == f"{mib(ours)} instead of {mib(rival)}"


def mib(row):
    taken = row["peak_extra_mib"]
    if taken < 1:
        return "under 1 MiB"
    return f"{taken:.0f} MiB" if taken < 1000 else f"{taken / 1024:.1f} GiB"


def test_readme_is_read_in_thirty_seconds():
    assert len((ROOT / "README.md").read_text().split()) <= 700
    assert len(readme_rows()) <= 8


def test_every_link_of_the_readme_leads_somewhere():
    text = (ROOT / "README.md").read_text()
    targets = re.findall(r"\]\(([^)#]+)|(?:src|srcset)=\"([^\"]+)", text)
    for target in ("".join(pair) for pair in targets):
        assert (ROOT / target).exists(), target


PICTURE = re.compile(
    r'<picture>\n  <source media="\(prefers-color-scheme: dark\)" srcset="(\S+)-dark(\.\w+)">\n'
    r'  <img alt="[^"]{10,}" src="\1-light\2">\n</picture>\n'
)


@pytest.mark.parametrize("path", [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")], ids=str)
def test_a_repository_viewer_shows_each_picture_once(path):
    """What ends in ``#only-dark`` is hidden by the theme of the site and by nothing else."""
    text = path.read_text()
    assert "#only-" not in text
    pictures = PICTURE.findall(text)
    assert len(pictures) == text.count("<picture>")
    for stem, ending in pictures:
        for scheme in ("light", "dark"):
            assert (path.parent / f"{stem}-{scheme}{ending}").is_file(), (stem, scheme)


def test_readme_commands_exist():
    text = (ROOT / "README.md").read_text() + (ROOT / "CONTRIBUTING.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"(?:^|`)make ([a-z]+)", text, re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.heavy
@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_examples_run(path, tmp_path):
    if path.name.startswith("vllm"):
        pytest.importorskip("vllm", reason="tests/engines runs it")
    if path.name.startswith("trl"):
        pytest.importorskip("trl")
    done = python(path, *SHORT.get(path.name, []), cwd=tmp_path, taken_apart=True)
    assert done.returncode == 0, done.stderr
    for page, command in COMMANDS.items():
        if command == f"examples/{path.name}":
            assert_prints(texts(ROOT / page, "console"), done.stdout, figures=False)


@pytest.mark.heavy
@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.ipynb")), ids=lambda p: p.name)
def test_notebooks_run(path, tmp_path):
    """From top to bottom, with the outputs that they store."""
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    program = tmp_path / "notebook.py"
    program.write_text("\n".join("".join(cell["source"]) for cell in cells))
    done = python(program, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    stored = [line for cell in cells for output in cell["outputs"] for line in output["text"]]
    assert_prints("".join(stored), done.stdout)
