"""What `make` would run for users and for developers, in a checkout of its own; nothing is run."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# What CI sets for itself, and what the make that runs the tests tells the makes that it calls.
GIVEN = ("CUDA", "CUDA_ARCHS", "PACKAGE", "WERROR", "MAKEFLAGS", "MAKELEVEL", "MFLAGS")
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="no make on PATH")
FOR_USERS, FOR_DEVELOPERS = "--editable '.[score]'", "--editable '.[dev]'"


class Checkout:
    """A Makefile, a source and an environment that is made of stamps."""

    def __init__(self, folder: Path):
        self.folder, self.path = folder, folder / "bin"
        for made in (".venv", "csrc/an_op", "bin"):
            (folder / made).mkdir(parents=True)
        shutil.copy(ROOT / "Makefile", folder)
        for source in ("pyproject.toml", "CMakeLists.txt", "csrc/an_op/cpu.cpp", "README.md"):
            self.touch(source, ago=100)
        self.touch(".venv/build-tools", ago=50)
        self.gpus("NVIDIA-SMI has failed", status=9)

    def touch(self, name: str, ago: float = 0, text: str = "\n") -> None:
        path = self.folder / name
        path.write_text(text)
        os.utime(path, (time.time() - ago,) * 2)

    def gpus(self, says: str, status: int = 0) -> None:
        """What nvidia-smi prints on this machine."""
        tool = self.path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\nprintf '{says}\\n'\nexit {status}\n")
        tool.chmod(0o755)

    def make(self, *arguments: str) -> str:
        environment = {name: value for name, value in os.environ.items() if name not in GIVEN}
        environment["PATH"] = f"{self.path}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["make", "--dry-run", *arguments],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


def test_a_demo_takes_what_users_need(checkout):
    planned = checkout.make("demo")
    assert FOR_USERS in planned
    assert "FUSEDRL_CUDA=off" in planned
    assert "[dev]" not in planned
    assert "auditwheel" not in planned


def test_the_first_target_makes_the_environment(checkout):
    (checkout.folder / ".venv" / "build-tools").unlink()
    assert "pip install" in checkout.make("demo").partition(FOR_USERS)[0]


@pytest.mark.parametrize("target", ["dev", "test", "test-slow", "bench", "lint"])
def test_developers_have_all_tools_and_cuda_where_there_is_nvcc(checkout, target):
    planned = checkout.make(target)
    assert FOR_DEVELOPERS in planned
    assert "FUSEDRL_CUDA=auto 'FUSEDRL_CUDA_ARCHS='" in planned.replace(
        " --config-settings=cmake.define.", " "
    )
    assert FOR_USERS not in planned


def test_a_demo_compiles_for_the_gpus_of_this_machine(checkout):
    checkout.gpus("9.0\\n8.9\\n9.0")
    planned = checkout.make("demo")
    assert "FUSEDRL_CUDA=auto" in planned
    assert "FUSEDRL_CUDA_ARCHS=89-real;90-real'" in planned


def test_a_demo_compiles_for_cuda_where_it_is_asked_to(checkout):
    planned = checkout.make("demo", "CUDA=on", "CUDA_ARCHS=80")
    assert "FUSEDRL_CUDA=on" in planned
    assert "FUSEDRL_CUDA_ARCHS=80'" in planned


def test_nothing_is_compiled_twice(checkout):
    checkout.touch(".venv/users-checkout")
    assert checkout.make("demo").strip() == "fusedrl demo --out demo-out"


def test_tools_of_developers_come_on_top_of_what_users_have(checkout):
    checkout.touch(".venv/users-checkout")
    planned = checkout.make("test")
    assert FOR_DEVELOPERS in planned
    assert "rm -f .venv/users-* .venv/dev-*" in planned


def test_a_demo_runs_in_what_developers_have(checkout):
    checkout.touch(".venv/dev-checkout")
    assert checkout.make("demo").strip() == "fusedrl demo --out demo-out"


@pytest.mark.parametrize(
    ("made", "command"), [("users", FOR_USERS), ("dev", FOR_DEVELOPERS)], ids=["users", "dev"]
)
def test_a_change_of_a_source_compiles_again_for_the_same_people(checkout, made, command):
    checkout.touch(f".venv/{made}-checkout", ago=10)
    checkout.touch("csrc/an_op/cpu.cpp")
    assert command in checkout.make("demo")


def test_demo_and_tests_at_once_install_once(checkout):
    planned = checkout.make("demo", "test")
    assert planned.count("--editable") == 1
    assert FOR_DEVELOPERS in planned


@pytest.mark.parametrize("made", ["users", "dev"])
def test_what_is_asked_for_replaces_what_is_there_once(checkout, made):
    checkout.touch(f".venv/{made}-checkout")
    assert "FUSEDRL_CUDA=on" in checkout.make("demo", "CUDA=on")
    checkout.touch(f".venv/{made}-checkout", text="CUDA=on\n")
    assert "--editable" not in checkout.make("demo", "CUDA=on")
    assert "--editable" not in checkout.make("demo")
    assert "FUSEDRL_CUDA=off" in checkout.make("demo", "CUDA=off")


@pytest.mark.parametrize(("target", "extra"), [("demo", "score"), ("test", "dev")])
def test_a_wheel_is_compiled_for_every_architecture_and_installed_for_either(
    checkout, target, extra
):
    planned = checkout.make(target, "PACKAGE=wheel")
    assert "FUSEDRL_CUDA=auto" in planned
    assert f"wheelhouse/*.whl)[{extra}]" in planned
    assert "--editable" not in planned


def test_ci_compiles_its_wheel_once(checkout):
    """Demo and tests run in what was installed of the wheel."""
    (checkout.folder / "wheelhouse").mkdir()
    checkout.touch(".venv/wheel-tools")
    checkout.touch("wheelhouse/made-cuda-auto-80", ago=20)
    checkout.touch(".venv/dev-wheel")
    ci = ("PACKAGE=wheel", "CUDA_ARCHS=80", "WERROR=ON")
    assert checkout.make("demo", *ci).strip() == "fusedrl demo --out demo-out"
    assert checkout.make("test", *ci).strip().startswith("pytest ")


def test_a_release_is_asked_about_before_anything_is_made_and_uploads_nothing(checkout):
    (checkout.folder / "wheelhouse").mkdir()
    checkout.touch(".venv/wheel-tools")
    planned = checkout.make("release")
    order = [".ci/release", "python -m build", "fusedrl check", "twine check --strict dist/"]
    places = [planned.index(step) for step in order]
    assert places == sorted(places)
    assert "twine upload" not in planned


def test_tests_can_be_chosen(checkout):
    checkout.touch(".venv/dev-checkout")
    assert checkout.make("test", "TESTS=tests/ops --lf").startswith("pytest tests/ops --lf -m")


def test_a_plan_for_a_gpu_needs_no_environment(checkout):
    planned = checkout.make("gpu", "MINUTES=3", "OUT=there", f"PY={sys.executable}")
    assert planned == f"{sys.executable} benchmarks/gpu.py --minutes 3 --out there\n"
    assert "--minutes 10 --out gpu-out" in checkout.make("gpu")


def test_wheels_for_a_gpu_are_what_the_package_asks_for_and_bring_no_torch(checkout):
    planned = checkout.make("gpu-wheels", "GPU_PYTHON=3.13", f"PY={sys.executable}")
    words = shlex.split(planned.replace("\\\n", " "))
    assert "--no-deps" in words and words[words.index("--python-version") + 1] == "3.13"
    named = words[words.index("--dest") + 2 :]
    for package in ("tensordict>=0.14,<0.15", "torchrl>=0.14,<0.15"):
        assert package in named
        assert f'"{package}"' in (ROOT / "pyproject.toml").read_text()
    assert not {name for name in named if re.match(r"torch(?!rl)|nvidia|triton", name)}
