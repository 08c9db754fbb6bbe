"""``RetrieveKL``: two models and a penalty in one transform, offline and in an environment."""

from __future__ import annotations

import pytest
import torch
from torchrl.collectors.llm import LLMCollector
from torchrl.envs import TransformedEnv
from torchrl.envs.llm.transforms import RetrieveKL as TorchrlRetrieveKL

from fusedrl import RetrieveKL, RetrieveLogProb

from .conftest import OneReward
from .dialogs import CHATS, assert_rows_equal, conversations, rows

GEN, REF = ("log_probs", "full"), ("ref_log_probs", "full")


def expected_kl(policy, reference) -> list[torch.Tensor]:
    """The difference of what the two models say on their own."""
    gen = rows(RetrieveLogProb(policy())(conversations()), ("gen_log_probs", "full"))
    ref = rows(RetrieveLogProb(reference())(conversations()), REF)
    kl = [x - y for x, y in zip(gen, ref, strict=True)]
    assert all(row.abs().max() > 0.1 for row in kl), "the two models must differ"
    return kl


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("with_next", [False, True])
def test_kl_of_two_models(policy, reference, stacked, with_next):
    """torchrl raises on plain tensordicts, whose unpadded log-probs it cannot rename."""
    data = conversations(stacked=stacked, with_next=with_next)
    transform = RetrieveKL(policy(), reference(), coeff=0.1)
    target = data["next"] if with_next else data
    target.set("reward", torch.ones(len(CHATS), 1, 1))
    out = transform(data)
    assert out is data
    assert isinstance(transform, TorchrlRetrieveKL)
    target = out["next"] if with_next else out
    kl = expected_kl(policy, reference)
    assert_rows_equal(rows(target, "kl_penalty"), kl)
    assert_rows_equal(rows(target, "reward"), [1 - 0.1 * row.unsqueeze(-1) for row in kl])


def test_nothing_is_written_where_the_second_model_cannot_read(policy, reference):
    data = conversations(stacked=True)
    before = set(map(str, data.keys(True)))
    transform = RetrieveKL(policy(), reference(input_key=("elsewhere", "full")))
    with pytest.raises(ValueError, match="elsewhere"):
        transform(data)
    assert set(map(str, data.keys(True))) == before


def test_padded_models_answer_dense(policy, reference):
    data = conversations().set("reward", torch.ones(len(CHATS), 1, 1))
    out = RetrieveKL(policy(pad_output=True), reference(pad_output=True), coeff=0.1)(data)
    kl = expected_kl(policy, reference)
    width = max(map(len, kl))
    padded = [torch.nn.functional.pad(row, (width - len(row), 0)) for row in kl]
    assert out["kl_penalty"].shape == (len(CHATS), width)
    torch.testing.assert_close(out["kl_penalty"], torch.stack(padded), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(out["reward"], 1 - 0.1 * out["kl_penalty"].unsqueeze(-1))


class TestFromCollector:
    """torchrl raises "collector is not set": it wants the collector before there is one."""

    def test_in_an_environment_that_is_wrapped_again(self, reference, chat_env, generating_policy):
        """Wrapping clones the transforms; torchrl's clone is an empty ``Compose``."""
        inner = chat_env(RetrieveKL("from_collector", reference()))
        env = TransformedEnv(inner, OneReward(), auto_unwrap=True)
        assert isinstance(env.transform[-2], RetrieveKL)
        collector = LLMCollector(
            env, policy=generating_policy, dialog_turns_per_batch=2, total_dialog_turns=2
        )
        for batch in collector:
            data = batch.view(-1)["next"]
            assert all(row.abs().max() > 0.1 for row in rows(data, "kl_penalty"))

    def test_without_environment_or_collector(self, reference, chat_env, generating_policy):
        with pytest.raises(ValueError, match="expected this transform in an environment"):
            RetrieveKL("from_collector", reference())(conversations())
        env = chat_env(RetrieveKL("from_collector", reference()))
        with pytest.raises(ValueError, match="expected an environment of a collector"):
            env.step(generating_policy(env.reset()))
