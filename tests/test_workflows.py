"""GitHub's workflows: what they call exists, every test is in one, and they may do little."""

from __future__ import annotations

import fnmatch
import re
import shlex
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".github" / "workflows"
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in FOLDER.glob("*.yml")}
MAKEFILE = (ROOT / "Makefile").read_text()
# What a job may do beyond reading the repository.
MORE = {
    ("wheels", "publish"): {"id-token": "write"},
    ("site", "publish"): {"pages": "write", "id-token": "write"},
}


def jobs():
    return [(w, name, job) for w, flow in WORKFLOWS.items() for name, job in flow["jobs"].items()]


def commands(*workflows):
    """What runs in steps, of their own or by the matrix."""
    for workflow, _, job in jobs():
        if workflow in workflows:
            rows = job.get("strategy", {}).get("matrix", {}).get("include", [])
            yield from (step["run"] for step in [*job["steps"], *rows] if "run" in step)


def makes(*workflows):
    """The words behind each `make`."""
    for command in commands(*workflows):
        for words in re.findall(r"\bmake (.*)", command):
            yield shlex.split(words)


def chosen(words):
    """The test files that `make test` runs with TESTS, none without `test`."""
    if "test" not in words:
        return set()
    [given] = [word for word in words if word.startswith("TESTS=")]
    paths, without = [], []
    for argument in given.removeprefix("TESTS=").split():
        option, _, pattern = argument.rpartition("=")
        if option:
            assert option in {"--ignore", "--ignore-glob", "--deselect"}
            without.append(pattern)
        else:
            paths.append(argument)
    found = set()
    for path in paths:
        there = [file for match in ROOT.glob(path) for file in (match, *match.rglob("test_*.py"))]
        assert there, f"{path}: expected files"
        found |= {file.relative_to(ROOT).as_posix() for file in there if file.is_file()}
    for pattern in without:
        left_out = {file for file in found if fnmatch.fnmatch(f"/{file}/", f"*{pattern}*")}
        assert left_out, f"{pattern}: expected to leave out a file"
        found -= left_out
    return found


def test_there_are_these():
    assert WORKFLOWS.keys() == {"ci", "nightly", "wheels", "site"}
    assert len(list(commands(*WORKFLOWS))) > 20


def test_targets_exist():
    named = {word for words in makes(*WORKFLOWS) for word in words if "=" not in word}
    assert {"lint", "wheelhouse", "demo", "test", "test-slow", "test-torch", "test-vllm"} <= named
    for target in named:
        assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE), target


def test_variables_exist():
    named = {word.partition("=")[0] for words in makes(*WORKFLOWS) for word in words if "=" in word}
    named |= {name for flow in WORKFLOWS.values() for name in flow.get("env", {})}
    assert {"TESTS", "ENGINES", "CUDA", "PACKAGE", "WERROR", "TORCH"} <= named
    for name in named - {"OMP_WAIT_POLICY"}:
        assert re.search(rf"^{name} \?=", MAKEFILE, re.MULTILINE), name


def test_every_test_file_runs_in_one():
    run = set().union(*map(chosen, makes("ci", "nightly")))
    every = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")}
    # These run in environments of their own.
    others = [
        {path for path in every if path.startswith(folder)}
        for folder in ("tests/engines/", "tests/cuda_build/")
    ]
    assert [x for x in makes("ci") if x[0].startswith("test-")] == [["test-vllm"], ["test-torch"]]
    assert ["test-cuda-build"] in list(makes("nightly"))
    assert all(others)
    assert run == every.difference(*others)


@pytest.mark.parametrize(("workflow", "name", "job"), jobs())
def test_a_job_ends_and_may_do_little(workflow, name, job):
    assert WORKFLOWS[workflow]["permissions"] == {"contents": "read"}
    assert "group" in WORKFLOWS[workflow]["concurrency"]
    assert job.get("permissions", {}) == MORE.get((workflow, name), {})
    assert 0 < job["timeout-minutes"] <= 120
    for step in job["steps"]:
        assert re.fullmatch(r"[\w./-]+@(v\d+|release/v1)", step.get("uses", "a/b@v1"))
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False


def test_only_a_tag_is_published_and_only_through_an_environment():
    [(workflow, job)] = [
        (workflow, job) for workflow, _, job in jobs() if "gh-action-pypi-publish" in str(job)
    ]
    assert workflow == "wheels"
    assert "github.ref_type == 'tag'" in job["if"]
    assert job["environment"]
    assert set(job["needs"]) == WORKFLOWS["wheels"]["jobs"].keys() - {"publish"}
    first = WORKFLOWS["wheels"]["jobs"]["sdist"]["steps"]
    assert any(step.get("run") == '.ci/release "$GITHUB_REF_NAME"' for step in first)


def test_a_release_compiles_cuda_as_its_wheels_do():
    pyproject = (ROOT / "pyproject.toml").read_text()
    (theirs,) = re.findall(r'"cmake\.define\.FUSEDRL_CUDA" = "(\w+)"', pyproject)
    (for_linux,) = re.findall(
        r"^\[tool\.cibuildwheel\.linux\]\n((?:.+\n)+)", pyproject, re.MULTILINE
    )
    assert f'config-settings = {{ "cmake.define.FUSEDRL_CUDA" = "{theirs}" }}' in for_linux
    (release,) = re.findall(r"^release:\n((?:\t.+\n)+)", MAKEFILE, re.MULTILINE)
    # Given, since CI compiles less; no isolated build, no nvcc of its own.
    assert f"\t$(MAKE) wheel CUDA={theirs} CUDA_ARCHS=\n" in release
    assert "python -m build $(if $(filter pypi,$(CUDA)),,--no-isolation)" in MAKEFILE
    assert ".ci/release-wheel wheelhouse/*.whl\n" in release
    assert theirs == "pypi"


def test_released_wheels_leave_out_what_ours_do_and_use_the_same_torch():
    pyproject = (ROOT / "pyproject.toml").read_text()
    ours, theirs = (re.findall(r"--exclude '(.*?)'", text) for text in (MAKEFILE, pyproject))
    assert ours
    assert ours == theirs
    (torch,) = re.findall(r"^TORCH \?= (\S+)", MAKEFILE, re.MULTILINE)
    assert pyproject.count(f"${{TORCH:-{torch}}}") == 2
    assert {flow["env"]["TORCH"] for w, flow in WORKFLOWS.items() if w != "site"} == {
        f"${{{{ vars.TORCH || '{torch}' }}}}"
    }
