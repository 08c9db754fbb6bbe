"""Loading: whose memory a module computes with, and which modules are refused."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fusedrl.channel.follow import Target
from fusedrl.channel.layout import Layout

from .test_layout import Tied, values_of


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
    torch._foreach_copy_(views, values_of(layout, model))
    return layout, views


def target_of(module: nn.Module, layout: Layout, mode: str) -> Target:
    """That of a reader on the CPU."""
    reader = SimpleNamespace(layout=layout, session="", device=torch.device("cpu"))
    return Target(module, reader, mode)


def facts(model: nn.Module) -> list[tuple[int, int, bool]]:
    return [(id(p), p.data_ptr(), p.requires_grad) for p in model.parameters()]


def same(a: nn.Module, b: nn.Module) -> bool:
    other = b.state_dict()
    return all(torch.equal(tensor, other[name]) for name, tensor in a.state_dict().items())


def test_alias_computes_with_the_views_and_trains_nothing():
    trained, model = Net(), Net()
    layout, views = published(trained)
    params = dict(model.named_parameters())
    target_of(model, layout, "alias").load(views)
    assert same(model.eval(), trained)
    for name, param in model.named_parameters():
        assert param is params[name] and not param.requires_grad
        assert param.data_ptr() == views[layout.view_of[name]].data_ptr()


def test_buffers_are_copied_since_a_forward_writes_to_them():
    trained, model = Net(), Net()
    trained.body[1].running_mean.fill_(3)
    layout, views = published(trained)
    target_of(model, layout, "alias").load(views)
    assert model.body[1].running_mean.tolist() == [3, 3, 3]
    model.train()(torch.randn(8, 3))
    assert views[layout.view_of["body.1.running_mean"]].tolist() == [3, 3, 3]


def test_copy_keeps_addresses_gradients_and_dtypes():
    trained, model = Net(), Net(torch.bfloat16)
    layout, views = published(trained)
    before = facts(model)
    target_of(model, layout, "copy").load(views)
    assert facts(model) == before
    assert torch.equal(model.head.weight, trained.head.weight.bfloat16())
    views[0].zero_()
    assert same(model.float(), trained.bfloat16().float())


def test_a_copy_after_an_alias_does_not_write_into_the_views():
    model = Net()
    layout, views = published(Net())
    target_of(model, layout, "alias").load(views)
    kept = [view.clone() for view in views]
    trained = Net()
    target = target_of(model, layout, "copy")
    target.load(published(trained)[1])
    assert same(model, trained)
    assert all(torch.equal(view, old) for view, old in zip(views, kept, strict=True))
    addresses = [p.data_ptr() for p in model.parameters()]
    target.load(published(trained)[1])
    assert [p.data_ptr() for p in model.parameters()] == addresses


def test_tied_parameters_stay_tied():
    trained, model = Tied(), Tied()
    layout, views = published(trained)
    for mode in ("alias", "copy"):
        target_of(model, layout, mode).load(views)
        assert model.head.weight is model.embed.weight
        assert torch.equal(model.head.weight, trained.head.weight)


def test_parameters_that_got_the_memory_of_one_are_refused_other_values():
    model = Net()
    layout, views = published(Net())
    target = target_of(model, layout, "copy")
    target.load(views)
    norm = model.body[1]
    norm.weight.data = norm.bias.data
    with pytest.raises(ValueError, match="since the module has one tensor for both"):
        target.load(views)


REPLACED: dict[str, Callable[[], Any]] = {
    "head.weight": lambda: nn.Parameter(torch.zeros(2, 3)),
    "head": lambda: nn.Linear(3, 2, bias=False),
    "body.1.running_mean": lambda: torch.ones(3),
}


@pytest.mark.parametrize("name", REPLACED)
@pytest.mark.parametrize("mode", ["alias", "copy"])
def test_what_was_replaced_in_the_module_is_found(name, mode):
    trained, model = Net(), Net()
    layout, views = published(trained)
    target = target_of(model, layout, mode)
    target.load(views)
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, REPLACED[name]())
    target.load(views)
    assert same(model, trained)


def test_an_alias_of_another_dtype_is_refused_with_all_differences_before_anything_changes():
    model, layout = Net(torch.bfloat16), Layout.of(Net())
    before = facts(model)
    with pytest.raises(ValueError, match=r"module: 5 differences.*mode='copy'") as error:
        target_of(model, layout, "alias")
    assert "head.weight: expected float32 (2, 3) on cpu, got bfloat16 (2, 3) on cpu" in str(
        error.value
    )
    assert facts(model) == before


@pytest.mark.parametrize("mode", ["alias", "copy"])
def test_parameters_that_changed_their_shape_and_new_ones_are_refused(mode):
    model = Net()
    layout, views = published(Net())
    target = target_of(model, layout, mode)
    model.head.weight.data = torch.zeros(2, 7)
    with pytest.raises(ValueError, match=r"head.weight: expected.*\(2, 3\).*got.*\(2, 7\)"):
        target.load(views)
    model.head = Net().head
    model.body.more = nn.Linear(1, 1)
    with pytest.raises(ValueError, match=r"body.more.weight: expected no such entry, got float32"):
        target.load(views)


def test_a_module_of_other_names_is_refused_with_the_differences_of_both_sides():
    with pytest.raises(ValueError, match="module: 7 differences") as error:
        target_of(nn.Sequential(nn.Linear(3, 3)), Layout.of(Net().body[1]), "copy")
    assert "  running_var: expected float32 (3,), got no such entry" in str(error.value)
    assert "  0.weight: expected no such entry, got float32 (3, 3)" in str(error.value)


def test_loading_within_inference_mode_leaves_a_module_that_works_outside():
    trained, model = Net(), Net().eval()
    layout, views = published(trained)
    for mode in ("alias", "copy"):
        with torch.inference_mode():
            target_of(model, layout, mode).load(views)
        x = torch.randn(2, 3, requires_grad=True)
        model(x).sum().backward()
        assert x.grad is not None


@pytest.mark.parametrize("mode", ["alias", "copy"])
def test_a_module_that_was_made_in_inference_mode_is_loaded_there_or_refused(mode):
    layout, views = published(trained := Net())
    with torch.inference_mode():
        model = Net()
    with pytest.raises(RuntimeError, match="inference tensor"):
        target_of(model, layout, mode).load(views)
    with torch.inference_mode():
        target_of(model, layout, "copy").load(views)
        assert same(model, trained)
