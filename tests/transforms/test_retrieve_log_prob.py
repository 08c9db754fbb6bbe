"""``RetrieveLogProb``: the assistant's tokens scored in float32, in every mode of the wrapper."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from accuracy import product_rounding
from torchrl.envs.llm.transforms import RetrieveLogProb as TorchrlRetrieveLogProb
from torchrl.modules.llm import TransformersWrapper
from watching import Watch

from fusedrl import RetrieveLogProb

from .dialogs import CHATS, assert_rows_equal, conversations, rows

KEY = ("gen_log_probs", "full")
MASK = ("masks", "all_assistant_mask")


def definition(model, wrapper) -> list[torch.Tensor]:
    """Log-probs of each conversation alone, through log_softmax, and 0 outside the assistant's."""
    scored = wrapper(conversations())
    expected = []
    for tokens, mask in zip(
        rows(scored, ("tokens", "full")), rows(scored, ("masks", "all_assistant_mask")), strict=True
    ):
        with torch.no_grad():
            log_probs = model(tokens[None]).logits.float().log_softmax(-1)[0, :-1]
        picked = log_probs.gather(-1, tokens[1:, None]).squeeze(-1)
        expected.append(torch.cat((picked.new_zeros(1), picked)).masked_fill(~mask, 0))
    return expected


@pytest.mark.parametrize("stacked", [False, True])
def test_log_probs_are_those_of_the_model(policy, policy_model, stacked):
    transform = RetrieveLogProb(policy())
    assert isinstance(transform, TorchrlRetrieveLogProb)
    out = rows(transform(conversations(stacked=stacked)), KEY)
    assert_rows_equal(out, definition(policy_model, policy()))
    assert all((row != 0).any() for row in out)


def test_padded_output_is_dense_and_on_the_side_asked_for(policy):
    """``padding_side`` does nothing in torchrl, where the wrapper has padded already."""
    unpadded = rows(RetrieveLogProb(policy())(conversations()), KEY)
    left = RetrieveLogProb(policy(pad_output=True))(conversations()).get(KEY)
    right = RetrieveLogProb(policy(pad_output=True), padding_side="right")(conversations()).get(KEY)
    assert left.shape == right.shape == (len(CHATS), max(map(len, unpadded)))
    for i, row in enumerate(unpadded):
        torch.testing.assert_close(left[i, -len(row) :], row, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(right[i, : len(row)], row, rtol=1e-5, atol=1e-5)
        assert not left[i, : -len(row) or None].any() or len(row) == left.shape[1]
        assert not right[i, len(row) :].any()


WHOLE_TURN = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{% generation %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endgeneration %}"
    "{% else %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endif %}"
    "{% endfor %}"
)


@pytest.mark.parametrize("pad_output", [False, True])
@pytest.mark.parametrize("source", ["tokenizer", "tokenizer_kwargs"])
def test_the_mask_may_come_from_another_template(
    policy, policy_model, tokenizer, pad_output, source
):
    """torchrl stores ``tokenizer`` and ``tokenizer_kwargs`` and never reads them."""
    if source == "tokenizer":
        options = {"tokenizer": copy.deepcopy(tokenizer)}
        options["tokenizer"].chat_template = WHOLE_TURN
    else:
        options = {"tokenizer_kwargs": {"chat_template": WHOLE_TURN}}
    wrapper = policy(pad_output=pad_output)
    narrow = rows(RetrieveLogProb(wrapper)(conversations()), KEY)
    wide = rows(RetrieveLogProb(wrapper, **options)(conversations()), KEY)
    everything = rows(RetrieveLogProb(wrapper, assistant_only=False)(conversations()), KEY)
    same = functools.partial(
        torch.testing.assert_close, rtol=0, atol=product_rounding(policy_model)
    )
    for few, more, whole in zip(narrow, wide, everything, strict=True):
        same(more[few != 0], few[few != 0])
        assert (few != 0).sum() < (more != 0).sum() < (whole != 0).sum(), "the whole turn counts"
        same(more[more != 0], whole[more != 0])


@pytest.mark.parametrize("other", ["", "<|im_end|>"])
def test_a_mask_over_other_tokens_is_refused(policy, tokenizer, other):
    template = {"chat_template": WHOLE_TURN.replace("<|im_start|>", other)}
    with pytest.raises(ValueError, match="tokenizer: sample 0: expected the model's"):
        RetrieveLogProb(policy(), tokenizer_kwargs=template)(conversations())


class SelfScoring(TransformersWrapper):
    """A user's subclass, whose own scoring must be respected."""

    calls = 0

    def _compute_log_probs_from_model_output(self, *args, **kwargs):
        type(self).calls += 1
        return super()._compute_log_probs_from_model_output(*args, **kwargs)


@pytest.mark.parametrize("pad_output", [False, True])
def test_other_wrappers_score_by_themselves(policy, policy_model, tokenizer, pad_output):
    """As torchrl has it; what torchrl would ignore is refused."""
    SelfScoring.calls = 0
    wrapper = SelfScoring(
        policy_model,
        tokenizer=tokenizer,
        generate=False,
        return_log_probs=True,
        pad_output=pad_output,
        log_probs_key="gen_log_probs",
    )
    out = rows(RetrieveLogProb(wrapper, tokenizer=tokenizer)(conversations()), KEY)
    assert SelfScoring.calls == 1
    assert_rows_equal(
        out, rows(RetrieveLogProb(policy(pad_output=pad_output))(conversations()), KEY)
    )
    for ignored in ({"tokenizer": copy.deepcopy(tokenizer)}, {"padding_side": "right"}):
        with pytest.raises(ValueError, match="which computes its log-probs itself"):
            RetrieveLogProb(wrapper, **ignored)


@pytest.mark.parametrize("limit", [1, 10_000])
def test_a_bound_of_a_forward_does_not_change_the_answer(wrap, policy, policy_model, limit):
    expected = rows(RetrieveLogProb(policy())(conversations()), KEY)
    sizes = []
    model = copy.deepcopy(policy_model)
    watch = Watch(lambda module, args, output: sizes.append(args[0].numel()))
    model.get_input_embeddings().register_forward_hook(watch)
    bounded = RetrieveLogProb(wrap(model, "gen_log_probs"), max_tokens_per_forward=limit)
    bounded(conversations())  # the first call compares
    sizes.clear()
    assert_rows_equal(rows(bounded(conversations()), KEY), expected)
    assert len(sizes) == (len(CHATS) if limit == 1 else 1)


def test_bad_arguments_are_refused(policy):
    with pytest.raises(ValueError, match="padding_side: expected 'left' or 'right', got 'both'"):
        RetrieveLogProb(policy(), padding_side="both")
    with pytest.raises(ValueError, match="max_tokens_per_forward: expected a positive number"):
        RetrieveLogProb(policy(), max_tokens_per_forward=0)
    two = conversations(stacked=True).unsqueeze(0)
    with pytest.raises(ValueError, match=r"tensordict: expected one batch dimension or none, got"):
        RetrieveLogProb(policy())(two)
