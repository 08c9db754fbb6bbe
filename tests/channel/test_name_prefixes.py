"""Names with and without what is before them: read where that can mean one thing only."""

from __future__ import annotations

import pytest

from fusedrl.channel.tensors import read_as

MODEL = ["model.embed.weight", "model.norm.weight", "lm_head.weight"]
AS_THEY_ARE = ("", "")


def before(prefix: str, names: list[str] = MODEL) -> list[str]:
    return [prefix + name for name in names]


@pytest.mark.parametrize(
    ("given", "known", "reading"),
    [
        (MODEL, MODEL, AS_THEY_ARE),
        ([*MODEL, "more"], MODEL, AS_THEY_ARE),
        (MODEL, before("model."), ("", "model.")),
        (before("model."), MODEL, ("model.", "")),
        (MODEL, before("policy.model."), ("", "policy.model.")),
        (before("module."), before("model."), ("module.", "model.")),
        (before("model.module."), before("model."), ("model.module.", "model.")),
        (["weight"], ["model.weight", "model.bias"], ("", "model.")),
        ([], MODEL, AS_THEY_ARE),
        (MODEL, [], AS_THEY_ARE),
    ],
)
def test_names_are_read_as_another_module_around_them_has_them(given, known, reading):
    assert read_as(given, known) == reading


@pytest.mark.parametrize(
    ("given", "known"),
    [
        (before("critic."), before("actor.")),
        (["other.weight"], MODEL),
        (["submodule.weight"], ["model.weight"]),
        ([*before("model."), "value.weight"], MODEL),
        (MODEL, [*before("actor."), *before("critic.")]),
        (["a.w"], ["a.a.a.w", "a.a.w"]),
    ],
    ids=["another", "unknown", "a part named so", "more than the model", "two models", "two ways"],
)
def test_names_that_may_mean_another_model_stay(given, known):
    assert read_as(given, known) == AS_THEY_ARE
