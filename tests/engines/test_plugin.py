"""How engines find the backend."""

import sys

from fusedrl.vllm import plugin


def test_every_process_may_register_again():
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from fusedrl.vllm.worker import ChannelWeightTransferEngine

    plugin.register()
    plugin.register()
    assert WeightTransferEngineFactory._registry["fusedrl"]() is ChannelWeightTransferEngine


def test_a_vllm_without_weight_transfer_starts(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.factory", None)
    with caplog.at_level("INFO", logger="fusedrl"):
        plugin.register()
    assert "0.31 or later" in caplog.text
