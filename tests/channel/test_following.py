"""Follower: every call of a module computes with one version, the newest when it began."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import threading
import weakref

import pytest
import torch
from torch import nn

from fusedrl.channel import WeightChannel
from fusedrl.channel.following import Follower, version_of


def filled(version: float) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with torch.no_grad():
        for x in model.state_dict().values():
            x.fill_(version)
    return model


def content(model: nn.Module) -> set[float]:
    return {float(n) for x in [*model.parameters(), *model.buffers()] for n in x.detach().flatten()}


@pytest.fixture
def channel():
    with WeightChannel.create(filled(0), timeout=5) as channel:
        channel.publish(filled(1))
        yield channel


@pytest.fixture
def reader(channel):
    with channel.handle.open() as reader:
        yield reader


@pytest.fixture
def reader_of_none():
    with WeightChannel.create(filled(0)) as channel, channel.handle.open() as reader:
        yield reader


@pytest.fixture(params=["alias", "copy"])
def followed(request, reader):
    model = filled(0)
    follower = Follower(reader, model, request.param)
    yield model, follower
    follower.close()


def test_a_call_has_the_newest_version_and_holds_it_alone(channel, followed):
    model, follower = followed
    assert version_of(model) is None
    for version in (1, 3, 5):
        with follower as got:
            assert got == version == version_of(model)
            assert content(model) == {version}
            channel.publish(filled(version + 1))
            channel.publish(filled(version + 2))
            assert content(model) == {version}
            assert channel.readers()[0].leased == (version,)
        assert channel.readers()[0].leased == ()


def test_many_versions_pass_between_two_calls(channel, followed):
    model, follower = followed
    for version in range(2, 10):
        channel.publish(filled(version))
    for _ in range(2):
        with follower as version:
            assert version == 9 and content(model) == {9}


def test_what_is_loaded_is_held_until_the_next_call_has_ended(channel, followed):
    model, follower = followed
    assert follower.load() == 1
    for version in range(2, 6):
        channel.publish(filled(version))
    assert content(model) == {1}
    assert channel.readers()[0].leased == (1,)
    with follower:
        pass
    assert channel.readers()[0].leased == ()


def test_calls_within_a_call_and_of_other_threads_share_its_version(channel, followed):
    model, follower = followed
    seen = []

    def call() -> None:
        with follower as version:
            seen.append((version, content(model)))

    with follower as outer:
        channel.publish(filled(2))
        other = threading.Thread(target=call)
        other.start()
        other.join()
        call()
        assert follower.load() == outer == 1
        assert channel.readers()[0].leased == (1,)
    call()
    assert seen == [(1, {1}), (1, {1}), (2, {2})]


def test_a_call_that_raises_holds_nothing(channel, followed):
    _, follower = followed
    with pytest.raises(KeyError), follower:
        raise KeyError
    assert channel.readers()[0].leased == ()


def test_state_dicts_are_copies_of_one_version_and_loaded_ones_are_overruled(
    channel, followed, caplog
):
    model, follower = followed
    with follower:
        pass
    channel.publish(filled(2))
    parent = nn.ModuleDict({"policy": model})
    saved = parent.state_dict()
    assert {float(n) for x in saved.values() for n in x.flatten()} == {2}
    pickle.dumps(saved)
    for x in saved.values():
        x.fill_(9)
    parent.load_state_dict(saved)
    parent.load_state_dict(saved)
    assert caplog.text.count("load_state_dict: expected weights through the channel") == 1
    with follower as version:
        assert version == 2 and content(model) == {2}
    with channel.handle.open() as other, other.lease() as lease:
        assert lease.weights["0", "weight"].unique().tolist() == [2]


def test_a_state_dict_that_is_loaded_in_a_call_leaves_its_version_and_ends_nothing(
    channel, followed
):
    model, follower = followed
    with follower:
        channel.publish(filled(2))
        model.load_state_dict(filled(9).state_dict())
        with follower as inner:
            assert inner == 1
    assert channel.readers()[0].leased == ()
    with follower as version:
        assert version == 2 and content(model) == {2}


def test_a_state_dict_of_a_part_does_not_write_the_channel(channel, followed):
    model, follower = followed
    with follower:
        pass
    model[0].load_state_dict(filled(9)[0].state_dict())
    assert model[0].weight.unique().tolist() == [9]
    with follower:
        assert content(model) == {1}


def test_a_follower_that_is_closed_during_a_call_leaves_its_version(channel, followed):
    model, follower = followed
    with follower:
        channel.publish(filled(2))
        follower.close()
        assert content(model) == {1}


def test_a_follower_that_is_dropped_goes(reader):
    model = filled(0)
    dropped = weakref.ref(model), weakref.ref(Follower(reader, model))
    del model
    gc.collect()
    assert [reference() for reference in dropped] == [None, None]


def test_weights_before_the_first_version_that_somebody_writes_are_not_version_0(reader_of_none):
    for mode in ("alias", "copy"):
        model = filled(0)
        follower = Follower(reader_of_none, model, mode)
        for _ in range(2):
            with follower as version:
                assert version is None
        with torch.no_grad():
            model[0].weight.add_(1)
        with pytest.raises(RuntimeError, match="weights of version 0, "), follower:
            pass
        follower.close()


@pytest.mark.parametrize("published", [True, False], ids=["a version", "before the first"])
def test_weights_that_somebody_else_writes_have_no_version(published):
    """As a step of an optimiser does that trains the module itself, and is not published."""
    model = filled(0)
    step = torch.optim.SGD(model.parameters(), lr=1.0)
    with WeightChannel.create(model) as channel, channel.handle.open() as reader:
        if published:
            channel.publish(version=4)
        follower = Follower(reader, model, "copy")
        for _ in range(2):
            with follower as version:
                assert version == (4 if published else None)
        for parameter in model.parameters():
            parameter.requires_grad_(True).grad = torch.ones_like(parameter)
        step.step()
        told = f"policy: expected the weights of version {4 if published else 0}, "
        for _ in range(2):
            with pytest.raises(RuntimeError, match=told), follower:
                pass
        assert channel.readers()[0].leased == () and follower.running == 0
        channel.publish(version=5)
        with follower as version:
            assert version == 5 and model[0].weight.unique().tolist() == [-1]
        model.load_state_dict(filled(7).state_dict())  # is overruled
        with follower as version:
            assert version == 5 and model[0].weight.unique().tolist() == [-1]
        follower.close()


@pytest.mark.parametrize("rounds", [60, pytest.param(5000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", ["alias", "copy"])
def test_steps_and_publishes_in_any_order_never_reach_a_turn_without_their_version(mode, rounds):
    chance = random.Random(rounds)
    trained = filled(0)
    policy = trained if mode == "copy" else filled(0)
    truth, refused = {}, 0
    with WeightChannel.create(trained) as channel, channel.handle.open() as reader:
        follower = Follower(reader, policy, mode)
        for _ in range(rounds):
            what = chance.choice(["step", "publish", "turn", "turn"])
            if what == "step":
                with torch.no_grad():
                    for x in [*trained.parameters(), *trained.buffers()]:
                        x.add_(1)
            elif what == "publish":
                truth[channel.publish(trained)] = trained[0].weight.detach().clone()
            else:
                try:
                    with follower as version:
                        if version is not None:
                            assert torch.equal(policy[0].weight, truth[version])
                except RuntimeError as error:
                    refused += "not published" in str(error)
        assert (refused > 0) == (mode == "copy")
        follower.close()


def test_parameters_have_one_follower(channel, reader, followed):
    model, _ = followed
    with (
        WeightChannel.create(model[0]) as other,
        other.handle.open() as theirs,
        pytest.raises(ValueError, match="parameters that nothing else loads"),
    ):
        Follower(theirs, nn.Sequential(model[0])[0])


def test_copies_of_a_module_do_not_follow(channel, followed):
    model, follower = followed
    with follower:
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    channel.publish(filled(2))
    for other in copies:
        assert version_of(other) is None
        state = other.state_dict()
        assert {float(n) for x in state.values() for n in x.flatten()} == {1}
        other.load_state_dict(filled(7).state_dict())
        assert content(other) == {7}
    assert follower.version == 1


@pytest.mark.parametrize("mode", ["alias", "copy"])
def test_a_closed_follower_leaves_the_module_its_own_memory(channel, reader, mode):
    model = filled(0)
    follower = Follower(reader, model, mode)
    follower.load()
    follower.close()
    for version in range(2, 6):
        channel.publish(filled(version))
    assert content(model) == {1}
    with torch.no_grad():
        model[0].weight.fill_(3)
    assert version_of(model) is None
    assert not model._state_dict_hooks and not model._load_state_dict_pre_hooks


def test_modules_that_do_not_fit_are_refused(reader):
    with pytest.raises(ValueError, match="differences from the channel's layout"):
        Follower(reader, nn.Linear(1, 1))
    assert version_of(lambda: None) is None
