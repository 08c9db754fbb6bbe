"""Losses and log-probs over the support of a truncated sampler, and without stale tokens."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict, set_list_to_stack

from fusedrl import GRPOLoss, RetrieveLogProb, sampling_support, token_log_probs

from .policies import actor_of, batch_of, model_of, rows

STACK, PADDED = ("history", "stack", False), ("tokens", "padded", True)
SCORED = ("next", "log_probs", "full")


def support_of(tokens, model):
    """The 9 likeliest classes of each token of a sequence, and its own; all of every fifth."""
    with torch.no_grad():
        logits = model(tokens[None]).logits[0]
    ids, offsets = sampling_support(
        logits, top_k=9, shift=True, offsets=torch.tensor([0, len(tokens)])
    )
    found = []
    for n, token in enumerate(tokens.tolist()):
        own = set(ids[offsets[n] : offsets[n + 1]].tolist()) | {token}
        found.append([] if n % 5 == 0 else sorted(own))
    flat = [id for row in found for id in row]
    return torch.tensor(flat, dtype=torch.int64), torch.tensor([len(row) for row in found])


def with_support(form, model):
    """A batch with the support of its tokens in the form of the tokens."""
    data, supports = batch_of(form), [support_of(row.tokens, model) for row in rows()]
    if form[1] == "padded":
        width = data["tokens", "full"].shape[1]
        counts = torch.zeros(len(supports), width, dtype=torch.int64)
        attended = data["masks", "all_attention_mask"]
        counts[attended] = torch.cat([x for _, x in supports])
        ids = torch.nn.utils.rnn.pad_sequence([x for x, _ in supports], batch_first=True)
        data["sampling_support"] = TensorDict(ids=ids, counts=counts, batch_size=len(ids))
    else:
        for sample, (ids, counts) in zip(data.tensordicts, supports, strict=True):
            sample["sampling_support"] = TensorDict(ids=ids, counts=counts)
    return data, supports


def log_probs_of(model, supports):
    """The definition, from the logits of one sequence after the other."""
    found = []
    for row, (ids, counts) in zip(rows(), supports, strict=True):
        options = {"offsets": torch.tensor([0, len(row.tokens)]), "shift": True}
        support = ids, torch.cat((counts[:1] * 0, counts.cumsum(0)))
        logits = model(row.tokens[None]).logits[0]
        found.append(
            token_log_probs(logits, row.tokens, support=support, **options, impl="reference")
        )
    return found


@pytest.mark.parametrize("form", [STACK, PADDED], ids=str)
def test_grpo(form):
    model = model_of()
    data, supports = with_support(form, model)
    loss = GRPOLoss(
        actor_of(model, form), masking_strategy="rlhf", clip_epsilon=0.2, entropy_bonus=False
    )
    loss(data).loss_objective.backward()
    found = model.lm_head.weight.grad.clone(), model.model.embed_tokens.weight.grad.clone()
    ours = loss(data).loss_objective.detach()
    model.zero_grad()
    terms = []
    advantages = data["advantage"].flatten()
    for row, log_probs, a in zip(rows(), log_probs_of(model, supports), advantages, strict=True):
        kept = row.assistant & row.old.isfinite()
        ratio = (log_probs - row.old)[kept].exp()
        terms.append(-torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a))
    expected = torch.cat(terms).mean()
    expected.backward()
    torch.testing.assert_close(ours, expected.detach(), rtol=2e-5, atol=1e-6)
    grads = model.lm_head.weight.grad, model.model.embed_tokens.weight.grad
    torch.testing.assert_close(found, grads, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("form", [STACK, PADDED], ids=str)
def test_retrieve_log_prob(form):
    model = model_of()
    data, supports = with_support(form, model)
    with torch.no_grad():
        expected = log_probs_of(model, supports)
    with set_list_to_stack(True):
        data = RetrieveLogProb(actor_of(model, form), assistant_only=form is STACK)(data)
    found = data.get(SCORED, as_list=True)
    for row, mine, want in zip(rows(), found, expected, strict=True):
        want = want * row.assistant if form is STACK else want
        mine, want = (x if form is STACK else x[x != 0] for x in (mine, want))
        torch.testing.assert_close(mine, want, rtol=1e-5, atol=2e-5)


def test_a_model_that_computes_its_own_logits():
    model = model_of()
    data, supports = with_support(STACK, model)

    class Own(type(model)):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            out.logits = out.logits * 1.0
            return out

    model.__class__ = Own
    with torch.no_grad():
        expected = log_probs_of(model, supports)
    with set_list_to_stack(True):
        data = RetrieveLogProb(actor_of(model, STACK))(data)
    for row, mine, want in zip(rows(), data.get(SCORED, as_list=True), expected, strict=True):
        torch.testing.assert_close(mine, want * row.assistant, rtol=1e-5, atol=2e-5)


def test_a_support_that_does_not_fit_is_refused():
    model = model_of()
    data, _ = with_support(STACK, model)
    loss = GRPOLoss(actor_of(model, STACK), masking_strategy="rlhf")
    whole = data[1]["sampling_support"].clone()
    data[1]["sampling_support", "counts"] = whole["counts"][1:]
    with pytest.raises(ValueError, match=r"one for each token, that sum to .* in sample 1"):
        loss(data)
    data[1]["sampling_support"] = whole.exclude("counts")
    with pytest.raises(ValueError, match="sampling_support"):
        loss(data)
    data, _ = with_support(PADDED, model)
    counts = data["sampling_support", "counts"]
    counts[~data["masks", "all_attention_mask"]] = 1
    with pytest.raises(ValueError, match=r"expected 0 where sample \d is padded"):
        GRPOLoss(actor_of(model, PADDED), masking_strategy="rlhf")(data)


class Own(GRPOLoss):
    """A loss that torchrl has to compute from all logits."""

    def _get_cur_log_prob(self, tensordict):
        return super()._get_cur_log_prob(tensordict)


def test_what_all_logits_would_compute_is_refused():
    model = model_of()
    data, _ = with_support(STACK, model)
    loss = Own(actor_of(model, STACK), masking_strategy="rlhf")
    with pytest.raises(ValueError, match="expected none where log-probs are not computed from hid"):
        loss(data)
    data, loss.max_token_staleness = batch_of(STACK), 3
    with pytest.raises(ValueError, match="max_token_staleness: expected None where a loss is not"):
        loss(data)


@pytest.mark.parametrize("form", [STACK, PADDED], ids=str)
def test_stale_tokens_count_as_if_they_were_masked(form):
    model = model_of()
    data = batch_of(form)
    versions = [1 + torch.arange(len(row.tokens) - row.prompt) % 4 for row in rows()]
    if form is PADDED:
        sizes = [len(x) for x in versions]
        column = torch.full((len(sizes), max(sizes)), -1)
        for row, x in zip(column, versions, strict=True):
            row[: len(x)] = x
        data["token_policy_version"] = column
    else:
        for sample, x in zip(data.tensordicts, versions, strict=True):
            sample["token_policy_version"] = x
    options = {"masking_strategy": "rlhf", "entropy_bonus": False}
    loss = GRPOLoss(actor_of(model, form), **options)
    loss.max_token_staleness, loss.policy_version = 1, lambda: 5
    found = loss(data)
    found.loss_objective.backward()
    grad = model.lm_head.weight.grad.clone()
    stale = [(x < 4) & row.assistant[row.prompt :] for x, row in zip(versions, rows(), strict=True)]
    assert loss.stale_tokens == sum(int(x.sum()) for x in stale) > 0
    # The same tokens left out by log-probs that are missing.
    masked = batch_of(form)
    for i, (row, x) in enumerate(zip(rows(), stale, strict=True)):
        sample = masked[i]
        places = sample["masks", "all_attention_mask"].nonzero().squeeze(-1)[row.prompt :]
        old = sample["log_probs", "full"].clone()
        old[places[x]] = torch.nan
        if form is STACK:
            sample["log_probs", "full"] = old
        else:
            masked["log_probs", "full"][i] = old
    model.zero_grad()
    expected = GRPOLoss(actor_of(model, form), **options)(masked)
    expected.loss_objective.backward()
    torch.testing.assert_close(found.loss_objective, expected.loss_objective)
    torch.testing.assert_close(grad, model.lm_head.weight.grad)


def test_versions_that_are_missing_or_all_too_old():
    model = model_of()
    loss = GRPOLoss(actor_of(model, STACK), masking_strategy="rlhf")
    loss.max_token_staleness, data = 2, batch_of(STACK)
    with pytest.raises(ValueError, match="policy_version: expected an integer >= 0 with max"):
        loss(data)
    loss.policy_version = 9
    with pytest.raises(ValueError, match="token_policy_version: expected the versions of the tok"):
        loss(data)
    for sample, row in zip(data.tensordicts, rows(), strict=True):
        sample["token_policy_version"] = torch.full((len(row.tokens),), 3)
    with pytest.raises(ValueError, match="expected some token with a log-prob of at most 2"):
        loss(data)
    for sample in data.tensordicts:
        sample["token_policy_version"] = torch.full((1,), 9)
    with pytest.raises(ValueError, match="expected a version for every counted token, got none"):
        loss(data)
    assert loss.stale_tokens == 0


@pytest.mark.parametrize("strategy", ["rlhf", "generic"])
def test_versions_of_all_tokens_or_of_those_that_count(strategy):
    model, losses = model_of(), []
    for form in ("all tokens", "counted"):
        data = batch_of(STACK)
        for sample, row in zip(data.tensordicts, rows(), strict=True):
            n = torch.arange(len(row.tokens))
            counted = row.assistant if strategy == "rlhf" else n >= 0
            versions = torch.where(counted, 4 - n % 4, -1)
            sample["token_policy_version"] = versions if form == "all tokens" else versions[counted]
        loss = GRPOLoss(actor_of(model, STACK), masking_strategy=strategy, entropy_bonus=False)
        loss.max_token_staleness, loss.policy_version = 1, 4
        losses.append((loss(data).loss_objective.detach(), loss.stale_tokens))
    assert losses[0] == losses[1] and losses[0][1] > 0


def test_versions_that_a_padded_tensor_has_of_padding_are_refused():
    data = batch_of(STACK)
    for sample, row in zip(data.tensordicts, rows(), strict=True):
        sample["token_policy_version"] = torch.full((len(row.tokens) - row.prompt,), 4)
    padded = data.get("token_policy_version", as_padded_tensor=True)
    assert (padded[:, -1] == 0).any()
    for sample, versions in zip(data.tensordicts, padded, strict=True):
        sample["token_policy_version"] = versions
    loss = GRPOLoss(actor_of(model_of(), STACK), masking_strategy="rlhf", max_token_staleness=1)
    loss.policy_version = 4
    with pytest.raises(ValueError, match="pad with padding_value=-1"):
        loss(data)


def test_fresh_tokens_without_log_probs_are_nothing_to_train_on():
    data = batch_of(STACK)
    for sample, row in zip(data.tensordicts, rows(), strict=True):
        fresh = row.assistant & (row.assistant.cumsum(0) <= 2)
        sample["token_policy_version"] = torch.where(fresh, 4, 1)
        sample["log_probs", "full"] = torch.where(fresh, torch.nan, row.old)
    loss = GRPOLoss(actor_of(model_of(), STACK), masking_strategy="rlhf", entropy_bonus=False)
    loss.max_token_staleness, loss.policy_version = 1, 4
    with pytest.raises(ValueError, match="expected some token with a log-prob of at most 1"):
        loss(data)
    assert loss.stale_tokens == 0
