"""Conversations, texts and tokens as wrappers read them, and once for models that read alike."""

from __future__ import annotations

import copy

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from transformers import AutoTokenizer

from fusedrl import RetrieveKL, RetrieveLogProb

from .dialogs import CHATS, conversations, rows

KEY = ("gen_log_probs", "full")
TOKENS, ATTENTION = ("tokens", "full"), ("masks", "all_attention_mask")


@pytest.fixture
def template_calls(tokenizer, monkeypatch):
    """The number of conversations that a chat template was applied to, for their tokens."""
    calls: list[int] = []
    original = type(tokenizer).apply_chat_template

    def counting(self, *args, **kwargs):
        if kwargs.get("tokenize"):
            calls.append(1)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(type(tokenizer), "apply_chat_template", counting)
    return calls


def loaded_again(tokenizer):
    return AutoTokenizer.from_pretrained(tokenizer.name_or_path)


def test_the_template_is_applied_once_for_models_with_one_tokenizer(
    policy, reference, template_calls
):
    RetrieveKL(policy(), reference())(conversations())
    assert len(template_calls) == len(CHATS)


@pytest.mark.parametrize("how", ["chat template", "token", "template argument", "loaded again"])
def test_models_that_read_differently_read_for_themselves(
    policy, reference, tokenizer, template_calls, how
):
    other = loaded_again(tokenizer)
    options = {"tokenizer": other}
    if how == "chat template":
        other.chat_template = "{{ messages }}"
    elif how == "token":
        other.add_tokens(["unheard-of"])
    elif how == "template argument":
        options["chat_template_name"] = "qwen"
    transform = RetrieveKL(policy(), reference(**options), assistant_only=False)
    first, second, _ = transform
    batch = first.read(conversations())
    assert second.read(conversations(), shared=batch) is not batch


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("same", [False, True])
def test_dense_tokens_end_where_their_sequence_ends(
    wrap, policy, policy_model, tokenizer, side, masked, same
):
    """With ``pad == eos`` too, where torchrl loses the end of every sequence."""
    own = copy.deepcopy(tokenizer)
    if same:
        own.pad_token = own.eos_token
    ids = [torch.cat((row, row.new_tensor([own.eos_token_id]))) for row in _ids(policy)]
    options = {"batch_first": True, "padding_side": side}
    dense = torch.nn.utils.rnn.pad_sequence(ids, padding_value=own.pad_token_id, **options)
    attended = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in ids], **options)
    data = TensorDict({TOKENS: dense}, batch_size=len(ids))
    if masked:
        data[ATTENTION] = attended.bool()
    wrapper = wrap(
        policy_model, "gen_log_probs", input_mode="tokens", tokenizer=own, pad_output=True
    )
    transform = RetrieveLogProb(wrapper, assistant_only=False)
    if same and side == "left" and not masked:
        with pytest.raises(ValueError, match="pass an attention mask"):
            transform(data)
        return
    out = transform(data)[KEY]
    assert out.shape == dense.shape
    for i, row in enumerate(ids):
        alone = policy_model(row[None]).logits[0, :-1].log_softmax(-1)
        expected = alone.gather(-1, row[1:, None]).squeeze(-1)
        own_row = out[i][attended[i].bool()]
        torch.testing.assert_close(own_row[1:], expected, rtol=1e-4, atol=1e-5)
    assert not out[~attended.bool()].any()


def _ids(policy):
    return rows(policy()(conversations()), TOKENS)


def test_a_mask_that_one_sample_lacks_is_refused(wrap, policy, policy_model):
    """The others would be told by their padding, as if there were no mask."""
    made = [TensorDict({TOKENS: row, ATTENTION: row > 0}) for row in _ids(policy)]
    del made[1][ATTENTION]
    transform = RetrieveLogProb(wrap(policy_model, input_mode="tokens"), assistant_only=False)
    with pytest.raises(ValueError, match=r"'all_attention_mask'.* got none in sample 1"):
        transform(lazy_stack(made))
