"""Run torchrl's own tests without and with ``fusedrl.patch_torchrl()``, and compare them.

    python tests/torchrl_suite.py DIR [pytest arguments]

``DIR`` is a directory of tests from a checkout of torchrl, such as ``rl/test/llm``. Every test that
passes without the patch must pass with it; the exit code is 1 if one does not. Tests that fail
without it, for want of a model hub or a GPU, are counted and otherwise left alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

OUTCOMES = ("failure", "error", "skipped")


def pytest_configure(config):
    """As a plugin: patch before the tests are imported."""
    if os.environ.get("TORCHRL_SUITE") == "patched":
        import fusedrl

        config.stash["report"] = fusedrl.patch_torchrl()


def pytest_report_header(config):
    return str(config.stash.get("report", "torchrl as it is")).splitlines()


def run(directory: str, arguments: list[str], patched: bool) -> dict[str, tuple[str, str]]:
    """Outcome and message of every test."""
    here = Path(__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "results.xml"
        environment = os.environ | {
            "TORCHRL_SUITE": "patched" if patched else "plain",
            "PYTHONPATH": os.pathsep.join([str(here), os.environ.get("PYTHONPATH", "")]),
        }
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            Path(__file__).stem,
            "-p",
            "no:cacheprovider",
        ]
        command += [f"--rootdir={directory}", f"--junitxml={result}", *arguments, directory]
        subprocess.run(command, env=environment, check=False)
        if not result.is_file():
            raise SystemExit(f"{directory}: pytest gave no results; see its output above")
        return {
            f"{case.get('classname')}::{case.get('name')}": outcome_of(case)
            for case in ElementTree.parse(result).iter("testcase")
        }


def outcome_of(case: ElementTree.Element) -> tuple[str, str]:
    for outcome in OUTCOMES:
        found = case.find(outcome)
        if found is not None:
            return outcome, (found.get("message") or "").partition("\n")[0]
    return "passed", ""


def main(directory: str, *arguments: str) -> int:
    plain, patched = (run(directory, list(arguments), patched) for patched in (False, True))
    broken = 0
    for name, (outcome, _) in plain.items():
        now, message = patched.get(name, ("missing", ""))
        if now != outcome:
            broken += outcome == "passed"
            print(f"{name}: {outcome} -> {now} {message}")
    for title, results in (("torchrl", plain), ("patched", patched)):
        print(title, dict(Counter(outcome for outcome, _ in results.values())))
    print(f"{broken} tests pass without the patch and not with it")
    return 1 if broken or not plain else 0


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    raise SystemExit(main(*sys.argv[1:]))
