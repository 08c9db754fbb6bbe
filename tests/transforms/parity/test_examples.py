"""The examples of torchrl's docstrings, run with our class of the name."""

from __future__ import annotations

import copy
import doctest
import functools
from typing import Any

import pytest
import transformers

from .comparison import both


@pytest.fixture
def run(tokenizer, monkeypatch):
    """What a class's own example leaves behind, with another class in its place."""
    tiny = {"hidden_size": 16, "ffn_dim": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = functools.partial(transformers.OPTConfig, word_embed_proj_dim=16, **tiny)
    monkeypatch.setattr(transformers, "OPTConfig", config)
    monkeypatch.setattr(
        transformers.AutoTokenizer, "from_pretrained", lambda name: copy.deepcopy(tokenizer)
    )

    def run(cls: Any, documented: Any) -> dict[str, Any]:
        scope = {documented.__name__: cls}
        for example in doctest.DocTestParser().get_examples(documented.__doc__):
            exec(example.source, scope)
        return scope

    return run


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_kl_computation(run, capsys):
    """torchrl's own class refuses the names of arguments in it."""
    ours, theirs = both("KLComputation")
    with pytest.raises(TypeError):
        run(theirs, theirs)
    run(ours, theirs)
    assert "KL shape: torch.Size([2, 10])" in capsys.readouterr().out


def test_retrieve_log_prob(run):
    ours, theirs = both("RetrieveLogProb")
    log_probs = run(ours, theirs)["ref_log_probs"]
    assert log_probs.dim() == 2 and len(log_probs) == 2


def test_retrieve_kl(run):
    """One model in both roles, hence a KL of 0, which torchrl answers as a nested tensor."""
    ours, theirs = both("RetrieveKL")
    kl = run(ours, theirs)["kl"]
    assert kl.dim() == 2 and len(kl) == 2 and not kl.any()
