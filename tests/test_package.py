"""The package as a whole: what an import costs, what is public, what is shipped."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from importlib import metadata, resources
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from private_names import NEEDED

import fusedrl

ROOT = Path(__file__).parents[1]
FORMER = {"aSyncDataCollector": "AsyncCollector"}  # a second name of a class
PUBLIC = [name for name in fusedrl.__all__ if name != "__version__"]


def modules_after(statement: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{statement}\nimport sys\nprint(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return set(done.stdout.split())


@pytest.mark.heavy
def test_import_loads_nothing_heavy():
    heavy = {"torch", "numpy", "tensordict", "torchrl", "transformers", "triton"}
    assert not heavy & modules_after("import fusedrl")


@pytest.mark.heavy
def test_ops_load_torch_alone():
    loaded = modules_after("from fusedrl import token_kl, token_log_probs")
    assert "torch" in loaded
    assert not {"tensordict", "torchrl", "transformers"} & loaded


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_resolves(name):
    value = getattr(fusedrl, name)
    assert value.__name__ == FORMER.get(name, name)
    assert name in dir(fusedrl)


def test_unknown_name_is_refused():
    with pytest.raises(AttributeError, match="module 'fusedrl' has no attribute 'token_lk'"):
        _ = fusedrl.token_lk


@pytest.mark.heavy
def test_a_traceback_suggests_the_nearest_public_name():
    command = [sys.executable, "-c", "import fusedrl; fusedrl.patch_torchlr"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "has no attribute 'patch_torchlr'. Did you mean: 'patch_torchrl'?" in done.stderr


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_has_a_docstring_of_its_own(name):
    value = getattr(fusedrl, name)
    doc = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
    assert doc
    assert doc.strip().splitlines()[0].endswith(".")


def test_types_are_shipped():
    assert (resources.files("fusedrl") / "py.typed").is_file()


def test_version_has_one_source():
    from fusedrl import _host

    assert metadata.version("fusedrl") == fusedrl.__version__
    assert _host.build_info()["version"] == fusedrl.__version__


def test_only_libraries_whose_private_names_are_used_have_an_upper_bound():
    """torch is chosen for a GPU and a driver, and accelerate is no requirement of ours."""
    bounded = set()
    for requirement in map(Requirement, metadata.requires("fusedrl") or ()):
        if requirement.name != "fusedrl":
            operators = {bound.operator for bound in requirement.specifier}
            assert ">=" in operators and operators <= {">=", "<"}, requirement
            bounded |= {requirement.name} if "<" in operators else set()
    # mkdocs' next major version is of another make
    assert bounded == NEEDED.keys() - {"torch", "accelerate"} | {"mkdocs", "mkdocs-material"}


def test_every_torch_that_is_promised_was_tried():
    """By `make test-cuda-build`, which writes the install page's table."""
    page = (ROOT / "docs" / "start" / "install.md").read_text()
    rows = dict(re.findall(r"^\| (\d+\.\d+\.\d+)\S* \| (.*) \|$", page, re.MULTILINE))
    makefile = (ROOT / "Makefile").read_text()
    [named] = re.findall(r"^CUDA_TORCHES \?= (.*)$", makefile, re.MULTILINE)
    assert rows.keys() == set(named.split())
    assert {cell for row in rows.values() for cell in row.split(" | ")[4:]} == {"yes"}
    [newest] = re.findall(r"^CUDA_TORCH \?= torch==(.*)$", makefile, re.MULTILINE)
    requirements = [Requirement(line) for line in metadata.requires("fusedrl") or []]
    [torch] = [one.specifier for one in requirements if one.name == "torch"]
    assert f"{torch}.0" == f">={min(rows, key=version_of)}"
    assert newest == max(rows, key=version_of)


def version_of(text: str) -> list[int]:
    return [int(number) for number in text.split(".")]
