"""Follower: every call of a module computes with one version, the newest when it began."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from fusedrl.channel import WeightChannel
from fusedrl.channel.follow import followers_of


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


@pytest.fixture(params=["alias", "copy"])
def followed(request, reader):
    model = filled(0)
    follower = reader.follow(model, request.param)
    yield model, follower
    follower.close()


def test_a_call_has_the_newest_version_and_holds_it_alone(channel, followed):
    model, follower = followed
    assert followers_of(model[0]) == [follower] and follower.version is None
    for version in (1, 3, 5):
        with follower.call() as got:
            assert got == version == follower.version
            assert content(model) == {version}
            channel.publish(filled(version + 1))
            channel.publish(filled(version + 2))
            assert content(model) == {version}
            assert channel.readers()[0].leased == (version,)
        assert channel.readers()[0].leased == ()


def test_what_is_loaded_is_held_until_the_next_call_has_ended(channel, followed):
    model, follower = followed
    assert follower.load() == 1
    for version in range(2, 6):
        channel.publish(filled(version))
    assert content(model) == {1}
    assert channel.readers()[0].leased == (1,)
    with follower.call():
        pass
    assert channel.readers()[0].leased == ()


def test_calls_within_a_call_and_of_other_threads_share_its_version(channel, followed):
    model, follower = followed
    seen = []

    def call() -> None:
        with follower.call() as version:
            seen.append((version, content(model)))

    with follower.call() as outer:
        channel.publish(filled(2))
        other = threading.Thread(target=call)
        other.start()
        other.join()
        call()
        assert follower.load() == outer == 1
        assert channel.readers()[0].leased == (1,)
    call()
    assert seen == [(1, {1}), (1, {1}), (2, {2})]


def test_state_dicts_are_copies_of_one_version_and_loaded_ones_are_overruled(
    channel, followed, caplog
):
    model, follower = followed
    with follower.call():
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
    with follower.call() as version:
        assert version == 2 and content(model) == {2}
    with channel.handle.open() as other, other.lease() as lease:
        assert lease.weights["0", "weight"].unique().tolist() == [2]


REFUSED = "module: expected weights that this process does not train, got those that it publishes"


def replaced(trained: nn.Module) -> nn.Module:
    """Another module, with parameters of its own over the same memory."""
    other = filled(0)
    for parameter, memory in zip(other.parameters(), trained.parameters(), strict=True):
        parameter.data = memory.data
    return other


@pytest.mark.parametrize("mode", ["alias", "copy"])
@pytest.mark.parametrize("weights", [lambda m: m, nn.Module.state_dict, TensorDict.from_module])
@pytest.mark.parametrize("follows", [lambda m: m, replaced, torch.compile])
def test_what_is_trained_here_does_not_load_its_own_versions(mode, weights, follows):
    """However it is written between two publishes, nothing could tell."""
    trained = filled(1)
    with WeightChannel.create(weights(trained)) as channel, channel.handle.open() as reader:
        channel.publish()
        with pytest.raises(ValueError, match=f"{REFUSED}.*copy.deepcopy"):
            reader.follow(follows(trained), mode)
        with pytest.raises(ValueError, match=REFUSED):
            reader.load_into(follows(trained), mode)
        assert trained[0].weight.requires_grad
        follower = reader.follow(copy.deepcopy(trained), mode)
        vector = nn.utils.parameters_to_vector(trained.parameters())
        nn.utils.vector_to_parameters(vector + 1, trained.parameters())
        with follower.call() as version:
            assert version == 1 and content(follower.module) == {1}
        follower.close()


@pytest.mark.parametrize("mode", ["alias", "copy"])
def test_what_follows_a_channel_is_published_as_it_is(mode):
    with WeightChannel.create(filled(0)) as channel, channel.handle.open() as reader:
        channel.publish(filled(5))
        follower = reader.follow(policy := filled(0), mode)
        with follower.call():
            assert channel.publish(policy) == 2
        with follower.call() as version:
            assert version == 2 and content(policy) == {5}
        follower.close()


def data_twice(model: nn.Module) -> None:
    """The second time, it may get the address of what it had first."""
    for value in (5.0, 6.0):
        model[0].weight.data = torch.full((2, 2), value)


REPLACE = {
    "data": data_twice,
    "parameter": lambda m: setattr(m[0], "weight", nn.Parameter(torch.ones(2, 2) * 5)),
    "module": lambda m: setattr(m, "0", filled(5)[0]),
}


@pytest.mark.parametrize("replace", REPLACE.values(), ids=REPLACE)
def test_a_parameter_that_is_replaced_gets_the_version_back_at_the_next_call(followed, replace):
    model, follower = followed
    for _ in range(2):
        with follower.call():
            pass
        replace(model)
        with follower.call() as version:
            assert version == 1 and content(model) == {1}
        assert not any(p.requires_grad for p in model.parameters())
    model[0].weight = nn.Parameter(torch.zeros(3, 2))
    with pytest.raises(ValueError, match=r"got float32 \(3, 2\)"):
        follower.call()
    follower.reader.close()
    assert not follower.reader.is_open


@pytest.mark.parametrize("mode", ["alias", "copy"])
def test_parts_that_are_exchanged_or_new_have_the_version_at_the_next_call(mode):
    def exchange(model):
        model[0], model[1] = model[1], model[0]

    def load(model):
        model[1] = nn.Linear(2, 2)
        with follower.call():
            pass
        model[1].load_state_dict(nn.Linear(2, 2).state_dict())

    trained, model = (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2))
    with WeightChannel.create(trained) as channel, channel.handle.open() as reader:
        channel.publish()
        follower = reader.follow(model, mode)
        for change in (exchange, load):
            with follower.call():
                pass
            change(model)
            with follower.call() as version:
                assert version == 1
                assert all(map(torch.equal, model.parameters(), trained.parameters()))
        model[0].weight = model[1].weight
        with pytest.raises(ValueError, match="since the module has one tensor for both"):
            follower.call()
        follower.close()


@pytest.mark.parametrize("mode", ["alias", "copy"])
def test_a_module_that_follows_cannot_be_trained(reader, mode):
    """Also where nobody sees that it is what is trained: a clone of it is published."""
    model = filled(0)
    follower = reader.follow(model, mode)
    with pytest.raises(RuntimeError, match="does not require grad"):
        model(torch.ones(3, 2)).sum().backward()
    follower.close()


def test_parameters_have_one_follower(channel, reader, followed):
    model, follower = followed
    assert reader.follow(model, follower.mode) is follower
    others = [(reader, model, {"alias": "copy", "copy": "alias"}[follower.mode])]
    with WeightChannel.create(model[0]) as other, other.handle.open() as theirs:
        others += [(theirs, model[0], "copy"), (theirs, nn.Sequential(model[0])[0], "copy")]
        for by, module, mode in others:
            with pytest.raises(ValueError, match="parameters that nothing else loads"):
                by.follow(module, mode)
        for module in (model, model[0], nn.Sequential(model)):
            with pytest.raises(ValueError, match="parameters that nothing else loads"):
                reader.load_into(module)
    with pytest.raises(ValueError, match="mode: expected 'alias' or 'copy', got 'both'"):
        reader.follow(filled(0), "both")


@pytest.mark.parametrize("mode", ["alias", "copy"])
@pytest.mark.parametrize("closed", ["follower", "reader"])
def test_who_closes_leaves_the_module_its_own_memory(channel, mode, closed):
    model, reader = filled(0), channel.handle.open()
    follower = reader.follow(model, mode)
    follower.load()
    {"follower": follower, "reader": reader}[closed].close()
    for version in range(2, 6):
        channel.publish(filled(version))
    assert content(model) == {1}
    with torch.no_grad():
        model[0].weight.fill_(3)
    assert followers_of(model) == []
    with pytest.raises(RuntimeError, match=r"got one that is closed"):
        follower.call()
    assert not model._state_dict_hooks and not model._load_state_dict_pre_hooks
    reader.close()
