"""Versions in modules: by alias, by copy, and for how long they are held."""

from __future__ import annotations

import copy
import gc
import threading

import pytest
import torch
from channel_workers import model_of_zeros, publish

from fusedrl.channel import WeightChannel


def test_loading_by_alias_copies_nothing_and_holds_the_version(channel, reader):
    model = model_of_zeros()
    publish(channel)
    assert reader.applied is None
    assert reader.load_into(model) == reader.applied == 1
    assert not model["a"].requires_grad
    address = model["a"].data_ptr()
    with reader.lease() as lease:
        assert address == lease.weights["a"].data_ptr()
    for _ in range(5):
        publish(channel)
    assert float(model["a"][0]) == 1
    assert reader.load_into(model) == 6
    assert float(model["a"][0]) == 6
    assert channel.readers()[0].leased == (6,)
    del model
    assert channel.readers()[0].leased == ()


def test_threads_load_into_one_module(channel, reader):
    model = model_of_zeros()
    publish(channel)
    ended, failed = threading.Event(), []

    def load() -> None:
        try:
            while not ended.is_set():
                reader.load_into(model)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=load) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(300):
        publish(channel)
    ended.set()
    for thread in threads:
        thread.join()
    assert not failed
    reader.load_into(model)
    assert float(model["a"][0]) == reader.applied == 301
    assert channel.readers()[0].leased == (301,)


def test_a_reader_that_is_dropped_stays_open_as_long_as_the_model_that_it_loaded(channel):
    model = model_of_zeros()
    publish(channel)
    channel.handle.open().load_into(model)
    gc.collect()
    for _ in range(5):
        publish(channel)
    assert float(model["a"][0]) == 1
    del model
    gc.collect()
    assert channel.readers() == []


def test_models_keep_their_weights_when_their_reader_closes(channel):
    model = model_of_zeros()
    publish(channel)
    with channel.handle.open() as reader:
        reader.load_into(model)
    for _ in range(5):
        publish(channel)
    assert {float(x) for p in model.values() for x in (p.min(), p.max())} == {1.0}


def test_a_module_that_another_channel_cannot_load_keeps_its_version(channel, reader):
    model = model_of_zeros()
    publish(channel)
    reader.load_into(model)
    with (
        WeightChannel.create(copy.deepcopy(model).double()) as other,
        other.handle.open() as theirs,
    ):
        other.publish()
        reader.load_into(model)
        with pytest.raises(ValueError, match="expected float64"):
            theirs.load_into(model)
        for _ in range(5):
            publish(channel)
        assert float(model["a"][0]) == 1
        assert theirs.load_into(model, "copy") == 1 and float(model["a"][0]) == 1
    assert channel.readers()[0].leased == ()


def test_a_version_is_held_as_long_as_a_part_of_what_was_loaded(channel, reader):
    """Also where the module that was loaded, such as a wrapper, is gone, or loaded by itself."""
    model, wrapped = model_of_zeros(), torch.compile(other := model_of_zeros())
    publish(channel)
    reader.load_into(torch.compile(model))
    reader.load_into(other)
    publish(channel)
    reader.load_into(wrapped)
    del wrapped
    gc.collect()
    assert channel.readers()[0].leased == (1, 2)
    reader.load_into(model)
    publish(channel)
    publish(channel)
    assert [float(x) for m in (model, other) for x in (m["a"][0], m["d"][0])] == [2] * 4
    del model, other
    gc.collect()
    assert channel.readers()[0].leased == ()
