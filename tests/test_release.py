"""`.ci/release` and `.ci/release-wheel`: what they let pass, and what they say is in the way."""

from __future__ import annotations

import os
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="no git on PATH")
CHANGES = "# Changelog\n\n## [Unreleased]\n\n## [1.2.0]\n\n- More.\n\n## [1.1.0]\n\n- Less.\n"


class Checkout:
    def __init__(self, folder):
        self.folder = folder
        (folder / ".ci").mkdir()
        shutil.copy(ROOT / ".ci/release", folder / ".ci")
        self.write("python/fusedrl/__init__.py", '__version__ = "1.2.0"\n')
        self.write("CHANGELOG.md", CHANGES)
        self.git("init", "--quiet")
        self.commit()

    def write(self, path, text):
        path = self.folder / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def run(self, *command):
        own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        return subprocess.run(
            command, cwd=self.folder, env=own, capture_output=True, text=True, check=False
        )

    def git(self, *arguments):
        done = self.run("git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments)
        assert done.returncode == 0, done.stderr

    def commit(self):
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", "A change")

    def refused(self, *tag):
        """The sentences about what is in the way."""
        done = self.run(".ci/release", *tag)
        lines = done.stderr.splitlines()
        assert done.returncode == bool(lines)
        assert done.stdout == ""
        return [line.removeprefix("release of 1.2.0: ") for line in lines]


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


def test_what_is_ready_passes_before_its_tag_and_with_it(checkout):
    assert checkout.refused() == []
    checkout.git("tag", "v1.1.0")
    assert checkout.refused() == []
    checkout.git("tag", "v1.2.0")
    assert checkout.refused("v1.2.0") == []


def test_a_tag_that_is_there_is_refused(checkout):
    checkout.git("tag", "v1.2.0")
    assert checkout.refused() == [
        "expected no tag v1.2.0 yet, got one; give __version__ the next number"
    ]


def test_a_tag_of_another_version_is_refused(checkout):
    assert checkout.refused("v1.1.0") == [
        "expected the tag v1.2.0, got v1.1.0; tag the commit that has this __version__"
    ]


@pytest.mark.parametrize("section", ["", "## [1.2.0]\n\n", "## [1.2.01]\n\n- More.\n"])
def test_a_version_without_changes_is_refused(checkout, section):
    checkout.write("CHANGELOG.md", CHANGES.replace("## [1.2.0]\n\n- More.\n", section))
    checkout.commit()
    (line,) = checkout.refused()
    assert line.startswith("CHANGELOG.md: expected a section [1.2.0] with what changed, got none")


def test_changes_that_no_version_has_are_refused(checkout):
    checkout.write("CHANGELOG.md", CHANGES.replace("[Unreleased]\n", "[Unreleased]\n\n- New.\n"))
    checkout.commit()
    (line,) = checkout.refused()
    assert line.startswith("CHANGELOG.md: expected nothing under [Unreleased], got changes; move")


def test_everything_in_the_way_is_said_at_once(checkout):
    checkout.git("tag", "v1.2.0")
    checkout.write("CHANGELOG.md", "# Changelog\n")
    checkout.write("a new file", "")
    found = checkout.refused()
    assert len(found) == 3
    assert "expected a clean checkout, got 2 changed files; commit them" in found


CODE = "ELF sm_80", "ELF sm_90", "ELF sm_100", "PTX sm_100"


@pytest.fixture
def check_wheel(tmp_path):
    """Runs the check on a wheel whose library has these files, twice each, as of two sources."""

    def check(code=CODE, content=b"code", name="fusedrl/_C_cuda.abi3.so"):
        files = [(*kind.split(), source) for kind in code for source in (1, 2)]
        lines = [f"echo {kind} file {n}: a.{n}.{arch}.x" for kind, arch, n in files]
        cuobjdump = tmp_path / "cuobjdump"
        cuobjdump.write_text("\n".join(["#!/bin/sh", 'test -s "$3" || exit 9', *lines, ""]))
        cuobjdump.chmod(0o755)
        with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
            wheel.writestr(name, content)
        environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
        command = [str(ROOT / ".ci/release-wheel"), str(tmp_path / "a.whl")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == bool(done.stderr)
        return done.stdout, done.stderr

    return check


def test_a_wheel_for_all_architectures_passes_and_says_what_it_has(check_wheel):
    said, refused = check_wheel()
    assert refused == ""
    counts = [line.split() for line in said.splitlines()[1:5]]
    assert sorted(counts) == sorted(["2", *kind.split()] for kind in CODE)
    assert "4 of _C_cuda" in said.splitlines()[-1]


@pytest.mark.parametrize("without", CODE)
def test_a_wheel_that_lacks_an_architecture_or_ptx_is_refused(check_wheel, without):
    has = sorted(set(CODE) - {without})
    _, refused = check_wheel(has)
    expected = " ".join(sorted(CODE))
    assert f"_C_cuda: expected {expected}, got {' '.join(has)}; build with CUDA_ARCHS=" in refused


def test_a_wheel_with_more_code_than_is_named_is_refused(check_wheel):
    _, refused = check_wheel([*CODE, "PTX sm_90"])
    assert "_C_cuda: expected" in refused


def test_a_wheel_one_of_whose_sources_lacks_an_architecture_is_refused(check_wheel):
    _, refused = check_wheel([*CODE, *CODE[:-1]])
    assert "_C_cuda: expected as many files of each kind" in refused


def test_a_wheel_without_cuda_is_refused(check_wheel):
    _, refused = check_wheel(name="fusedrl/_C.abi3.so")
    assert refused == "a.whl: expected the library _C_cuda, got none; build with CUDA=pypi\n"


def test_a_wheel_that_is_too_large_is_refused(check_wheel):
    _, refused = check_wheel(content=bytes(15_000_000))
    assert "expected at most 15000000 bytes, got 15000" in refused
    assert len(refused.splitlines()) == 1
