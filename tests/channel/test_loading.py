"""Loading: whose memory a module computes with, and which modules are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fusedrl.channel.layout import Layout
from fusedrl.channel.loading import Target

from .test_layout import Tied


class Net(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.head = nn.Linear(3, 2, bias=False)
        self.to(dtype)

    def forward(self, x):
        return self.head(self.body(x))


def published(model: Any, layout: Layout | None = None) -> tuple[Layout, list[torch.Tensor]]:
    layout = layout or Layout.of(model)
    views = layout.views(torch.zeros(layout.nbytes, dtype=torch.uint8))
    torch._foreach_copy_(views, list(layout.named(model).values()))
    return layout, views


def same(a: nn.Module, b: nn.Module) -> bool:
    other = b.state_dict()
    return all(torch.equal(tensor, other[name]) for name, tensor in a.state_dict().items())


def test_alias_computes_with_the_views_and_trains_nothing():
    trained, model = Net(), Net()
    layout, views = published(trained)
    params = dict(model.named_parameters())
    Target(model, layout).alias(views)
    assert same(model.eval(), trained)
    for name, param in model.named_parameters():
        assert param is params[name] and not param.requires_grad
        assert param.data_ptr() == views[layout.view_of[name]].data_ptr()


def test_buffers_are_copied_since_a_forward_writes_to_them():
    trained, model = Net(), Net()
    trained.body[1].running_mean.fill_(3)
    layout, views = published(trained)
    Target(model, layout).alias(views)
    assert model.body[1].running_mean.tolist() == [3, 3, 3]
    model.train()(torch.randn(8, 3))
    assert views[layout.view_of["body.1.running_mean"]].tolist() == [3, 3, 3]


def test_copy_keeps_addresses_gradients_and_dtypes():
    trained, model = Net(), Net(torch.bfloat16)
    layout, views = published(trained)
    before = [(p, p.data_ptr(), p.requires_grad) for p in model.parameters()]
    Target(model, layout).copy(views)
    after = [(p, p.data_ptr(), p.requires_grad) for p in model.parameters()]
    assert all(x[0] is y[0] and x[1:] == y[1:] for x, y in zip(before, after, strict=True))
    assert torch.equal(model.head.weight, trained.head.weight.bfloat16())
    views[0].zero_()
    assert same(model.float(), trained.bfloat16().float())


@pytest.mark.parametrize("same_target", [True, False])
def test_a_copy_after_an_alias_does_not_write_into_the_views(same_target):
    model = Net()
    layout, views = published(Net())
    target = Target(model, layout)
    target.alias(views)
    kept = [view.clone() for view in views]
    trained = Net()
    target = target if same_target else Target(model, layout)
    target.copy(published(trained)[1])
    assert same(model, trained)
    assert all(torch.equal(view, old) for view, old in zip(views, kept, strict=True))
    addresses = [p.data_ptr() for p in model.parameters()]
    target.copy(published(trained)[1])
    assert [p.data_ptr() for p in model.parameters()] == addresses


def test_tied_parameters_stay_tied():
    trained, model = Tied(), Tied()
    layout, views = published(trained)
    target = Target(model, layout)
    for load in (target.alias, target.copy):
        load(views)
        assert model.head.weight is model.embed.weight
        assert torch.equal(model.head.weight, trained.head.weight)


def published_copies(trained: nn.Module) -> tuple[Layout, list[torch.Tensor]]:
    """As if its tied weights were two tensors."""
    return published({n: x.clone() for n, x in trained.state_dict().items()})


@pytest.mark.parametrize("load", [Target.alias, Target.copy])
def test_a_module_that_ties_what_is_stored_twice_gets_it_where_the_values_are_equal(load):
    trained, model = Tied(), Tied()
    layout, views = published_copies(trained)
    assert layout.view_of["head.weight"] != layout.view_of["embed.weight"]
    load(Target(model, layout), views)
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.embed.weight, trained.embed.weight)

    views[layout.view_of["head.weight"]][4, 2] += 1
    before = [(p.data_ptr(), p.clone()) for p in model.parameters()]
    message = r"module: .*\n  head.weight: expected the values of embed.weight, .* got others"
    with pytest.raises(ValueError, match=message):
        load(Target(model, layout), views)
    for parameter, (address, values) in zip(model.parameters(), before, strict=True):
        assert parameter.data_ptr() == address
        assert load is Target.alias or torch.equal(parameter, values)


@pytest.mark.parametrize("load", [Target.alias, Target.copy])
def test_a_module_may_have_another_name_for_a_tensor_that_is_stored(load):
    trained, model = Tied(), Tied()
    state = trained.state_dict()
    del state["head.weight"]
    layout, views = published(state)
    load(Target(model, layout), views)
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.head.weight, trained.embed.weight)
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
    with pytest.raises(ValueError, match=r"head.weight: expected no such entry"):
        Target(model, layout)


def _replace_parameter(model: Net) -> None:
    model.head.weight = nn.Parameter(torch.zeros(2, 3))


def _replace_module(model: Net) -> None:
    model.head = nn.Linear(3, 2, bias=False)


def _replace_buffer(model: Net) -> None:
    model.body[1].running_mean = torch.ones(3)


@pytest.mark.parametrize("replace", [_replace_parameter, _replace_module, _replace_buffer])
@pytest.mark.parametrize("mode", ["alias", "copy"])
def test_what_was_replaced_in_the_module_is_found(replace, mode):
    trained, model = Net(), Net()
    layout, views = published(trained)
    target = Target(model, layout)
    load = getattr(target, mode)
    load(views)
    replace(model)
    load(views)
    assert same(model, trained)


def test_an_alias_of_another_dtype_is_refused_with_all_differences_before_anything_changes():
    model = Net(torch.bfloat16)
    layout, views = published(Net())
    target = Target(model, layout)
    before = [(p, p.data_ptr(), p.requires_grad) for p in model.parameters()]
    with pytest.raises(ValueError, match=r"module: 5 differences.*mode='copy'") as error:
        target.alias(views)
    assert "head.weight: expected float32 (2, 3) on cpu, got bfloat16 (2, 3) on cpu" in str(
        error.value
    )
    after = [(p, p.data_ptr(), p.requires_grad) for p in model.parameters()]
    assert all(x[0] is y[0] and x[1:] == y[1:] for x, y in zip(before, after, strict=True))


@pytest.mark.parametrize("mode", ["alias", "copy"])
def test_parameters_that_changed_their_shape_are_refused(mode):
    model = Net()
    layout, views = published(Net())
    target = Target(model, layout)
    model.head.weight.data = torch.zeros(2, 7)
    with pytest.raises(ValueError, match=r"head.weight: expected.*\(2, 3\).*got.*\(2, 7\)"):
        getattr(target, mode)(views)


def test_an_alias_that_is_interrupted_is_undone():
    def interrupted(requires_grad: bool = True) -> None:
        del model.head.weight.requires_grad_
        raise KeyboardInterrupt

    model = Net()
    layout, views = published(Net())
    target = Target(model, layout)
    before = [(p, p.data_ptr(), p.requires_grad) for p in model.parameters()]
    model.head.weight.requires_grad_ = interrupted
    with pytest.raises(KeyboardInterrupt):
        target.alias(views)
    after = [(p, p.data_ptr(), p.requires_grad) for p in model.parameters()]
    assert all(x[0] is y[0] and x[1:] == y[1:] for x, y in zip(before, after, strict=True))


def test_a_module_of_other_names_is_refused_with_the_differences_of_both_sides():
    with pytest.raises(ValueError, match="module: 7 differences") as error:
        Target(nn.Sequential(nn.Linear(3, 3)), Layout.of(Net().body[1]))
    assert "  running_var: expected float32 (3,), got no such entry" in str(error.value)
    assert "  0.weight: expected no such entry, got float32 (3, 3)" in str(error.value)


def test_loading_within_inference_mode_leaves_a_module_that_works_outside():
    trained, model = Net(), Net().eval()
    layout, views = published(trained)
    target = Target(model, layout)
    for load in (target.alias, target.copy):
        with torch.inference_mode():
            load(views)
        x = torch.randn(2, 3, requires_grad=True)
        model(x).sum().backward()
        assert x.grad is not None
