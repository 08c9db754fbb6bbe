"""Names with and without what is before them: read where that can mean one thing only."""

from __future__ import annotations

import pytest

from fusedrl.channel.sources import PrefixChange, match_prefixes

MODEL = ["model.embed.weight", "model.norm.weight", "lm_head.weight"]


def before(prefix: str, names: list[str] = MODEL) -> list[str]:
    return [prefix + name for name in names]


@pytest.mark.parametrize(
    ("given", "known", "reading"),
    [
        (MODEL, MODEL, PrefixChange()),
        ([*MODEL, "more"], MODEL, PrefixChange()),
        (MODEL, before("model."), PrefixChange(added="model.")),
        (before("model."), MODEL, PrefixChange("model.")),
        (MODEL, before("policy.model."), PrefixChange(added="policy.model.")),
        (before("module."), before("model."), PrefixChange("module.", "model.")),
        (before("model.module."), before("model."), PrefixChange("model.module.", "model.")),
        (["weight"], ["model.weight", "model.bias"], PrefixChange(added="model.")),
        ([], MODEL, PrefixChange()),
        (MODEL, [], PrefixChange()),
    ],
)
def test_names_are_read_as_another_module_around_them_has_them(given, known, reading):
    assert match_prefixes(given, known) == reading


@pytest.mark.parametrize(
    ("given", "known"),
    [
        (before("critic."), before("actor.")),
        (["other.weight"], MODEL),
        (["submodule.weight"], ["model.weight"]),
        ([*before("model."), "value.weight"], MODEL),
        (MODEL, [*before("actor."), *before("critic.")]),
    ],
    ids=["another model", "unknown", "a part named so", "more than the model", "two models"],
)
def test_names_that_may_mean_another_model_stay(given, known):
    assert not match_prefixes(given, known)


def test_names_that_can_be_read_in_two_ways_are_refused():
    known = ["a.a.a.w", "a.a.w"]
    with pytest.raises(ValueError, match=r"weights: .*with 'a.' before them or with 'a.a.' before"):
        match_prefixes(["a.w"], known)
