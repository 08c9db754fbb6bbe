"""patch_torchrl: where torchrl's names lead under it, and that all is as before after it."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys

import pytest
import torchrl.envs.llm.transforms.kl as torchrl_kl

import fusedrl
from fusedrl.integrations import torchrl as integration

HomeOfKL = torchrl_kl.KLComputation  # a user's import from before the patch


def everywhere() -> dict[tuple[str, str], object]:
    return {
        (module, name): value
        for module, loaded in list(sys.modules.items())
        if module.split(".")[0] == "torchrl"
        for name, value in list(vars(loaded).items())
    }


@pytest.mark.parametrize("name", integration.HOMES)
def test_each_name_leads_to_ours(name):
    with fusedrl.patch_torchrl() as report:
        home = importlib.import_module(integration.HOMES[name])
        assert getattr(home, name) is getattr(fusedrl, name)
        places = {change.module for change in report if change.name == name}
        for module in ("torchrl.envs.llm", "torchrl.envs.llm.transforms"):
            exported = getattr(sys.modules[module], name, None)
            assert exported in (None, getattr(fusedrl, name))
            assert (module in places) == (exported is not None)


def test_revert_restores_every_global_of_torchrl():
    before = everywhere()
    report = fusedrl.patch_torchrl()
    changed = {k for k, v in everywhere().items() if before.get(k) is not v}
    assert changed == {(change.module, change.name) for change in report}
    report.revert()
    after = everywhere()
    assert after.keys() == before.keys()
    assert all(after[k] is before[k] for k in before)


@pytest.mark.parametrize("name", integration.FORMER)
def test_names_that_torchrl_dropped_are_there_again(name):
    """Programs written for its first LLM API import them from either module."""
    homes = [importlib.import_module(module) for module in integration.FORMER[name]]
    assert not any(hasattr(home, name) for home in homes)
    with fusedrl.patch_torchrl([name]) as report:
        assert all(getattr(home, name) is getattr(fusedrl, name) for home in homes)
        assert [change.added for change in report] == [True, True]
        assert fusedrl.patch_torchrl([name]).already == (name,)
    assert not any(hasattr(home, name) for home in homes)


def test_unknown_names_are_refused_before_anything_changes():
    before = torchrl_kl.KLComputation
    with pytest.raises(ValueError, match=r"expected some of KLComputation, .*, got 'KLPenalty'"):
        fusedrl.patch_torchrl(["KLComputation", "KLPenalty"])
    with pytest.raises(TypeError, match=r"pass \['KLComputation'\]"):
        fusedrl.patch_torchrl("KLComputation")
    assert torchrl_kl.KLComputation is before


def test_stored_transforms_of_torchrl_load_under_the_patch():
    stored = pickle.dumps(HomeOfKL(coeff=0.25))
    with fusedrl.patch_torchrl():
        loaded = pickle.loads(stored)
    assert type(loaded) is fusedrl.KLComputation and loaded.coeff == 0.25


@pytest.mark.heavy
def test_a_fresh_program_can_patch_first():
    """Before torchrl or a class of ours was imported."""
    script = (
        "import fusedrl\n"
        "report = fusedrl.patch_torchrl()\n"
        "from torchrl.envs.llm import KLComputation, RetrieveKL\n"
        "from torchrl.envs.llm.transforms.kl import RetrieveLogProb\n"
        "assert KLComputation is fusedrl.KLComputation and RetrieveKL is fusedrl.RetrieveKL\n"
        "assert RetrieveLogProb is fusedrl.RetrieveLogProb\n"
        "assert not report.held, report.held\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
