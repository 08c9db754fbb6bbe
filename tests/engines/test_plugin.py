"""How engines find the backend, and what they say where it does not work."""

import sys

import pytest

from fusedrl.vllm import plugin


@pytest.mark.parametrize("version", ["0.30.0", "0.30.2rc1", "0.9.1+cpu", "0.22.3.dev4+g1234"])
def test_an_older_vllm_is_told_which_ones_work(version, monkeypatch):
    monkeypatch.setattr("vllm.__version__", version)
    with pytest.raises(RuntimeError, match=rf"expected 0\.31 or 0\.32 .*, got {version[:4]}"):
        plugin.transfer_engine("what", "older ones", "are given")


@pytest.mark.parametrize("version", ["0.31.0", "0.32.1+cpu", "0.33.0", "1.0", "dev", "main.g12"])
def test_a_vllm_that_may_work_is_tried(version):
    plugin.check_version(version)


def test_every_process_may_register_again():
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    plugin.register()
    plugin.register()
    assert WeightTransferEngineFactory._registry["fusedrl"]() is plugin.transfer_engine


def test_a_vllm_without_weight_transfer_starts(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.factory", None)
    with caplog.at_level("INFO", logger="fusedrl"):
        plugin.register()
    assert "0.31 or later" in caplog.text
