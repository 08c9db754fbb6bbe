"""`.ci/release`: what it lets pass, and the sentence for each thing in the way."""

from __future__ import annotations

import os
import shutil
import subprocess
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
