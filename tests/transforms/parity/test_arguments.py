"""Names, order, kinds and defaults of arguments; every name that torchrl's own examples use."""

from __future__ import annotations

import inspect
import re

import pytest

from .comparison import both

NAMES = ["KLComputation", "RetrieveLogProb", "RetrieveKL"]


@pytest.mark.parametrize("name", NAMES)
def test_signatures(name):
    """Ours only adds keywords that may be left out, and the collector of unknown ones."""
    ours, theirs = (dict(inspect.signature(cls.__init__).parameters) for cls in both(name))
    for parameters in (ours, theirs):
        for unnamed in [k for k, p in parameters.items() if p.kind is p.VAR_KEYWORD]:
            del parameters[unnamed]
    for added in [ours.pop(key) for key in set(ours) - set(theirs)]:
        assert added.kind is added.KEYWORD_ONLY and added.default is not added.empty
    assert list(ours) == list(theirs)
    for key, parameter in theirs.items():
        assert ours[key].default == parameter.default
        assert ours[key].kind == parameter.kind


@pytest.mark.parametrize("name", NAMES)
def test_arguments_of_the_examples(name):
    """torchrl's docstring of ``KLComputation`` calls it with names that its class refuses."""
    ours, theirs = both(name)
    used = {
        argument
        for call in re.findall(rf"= {name}\((.*?)\.\.\. \)", theirs.__doc__, re.DOTALL)
        for argument in re.findall(r"(\w+)=", call)
    }
    assert used
    older = {"gen_log_probs_key", "ref_log_probs_key", "coef"}
    assert used <= set(inspect.signature(ours.__init__).parameters) | older


@pytest.mark.parametrize("name", NAMES)
def test_instances_are_torchrl_instances(name):
    ours, theirs = both(name)
    assert issubclass(ours, theirs) and ours is not theirs
