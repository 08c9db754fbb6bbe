"""The channel's weight-sync scheme: policies of workers, parts of them, tied and large ones."""

from __future__ import annotations

import pickle

import pytest
import torch
from one_thread import one_thread
from sync_collecting import collecting, forked, newest
from sync_workers import Callable, Canary, Scored, canary_policy, scored
from torchrl.collectors import Collector, MultiSyncCollector
from torchrl.collectors.utils import _make_meta_policy
from torchrl.modules.llm import TransformersWrapper

from fusedrl import ChannelWeightSyncScheme

__all__ = ["forked", "one_thread"]

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.heavy
def test_policies_that_workers_make_follow_a_model_that_the_trainer_names(forked):
    scheme = ChannelWeightSyncScheme(mode="copy")
    trained = canary_policy(1.0)
    scheme.init_on_sender(model_id="policy", model=trained)
    with collecting(MultiSyncCollector, scheme, policy_factory=Callable, trust_policy=True) as (
        collector,
        iterator,
    ):
        newest(collector, iterator, 1)
        collector.update_policy_weights_(canary_policy(2.0))
        newest(collector, iterator, 2)


@pytest.mark.heavy
def test_a_policys_part_and_a_transforms_model_have_schemes_of_their_own(forked):
    part, model = "policy.module", "env.transform[0].model"
    schemes = {part: ChannelWeightSyncScheme(), model: ChannelWeightSyncScheme()}
    for name, scheme in schemes.items():
        scheme.init_on_sender(model_id=name, model=Canary(1.0))
    with collecting(MultiSyncCollector, schemes, env=scored, policy_factory=canary_policy) as (
        collector,
        iterator,
    ):
        newest(collector, iterator, 1)
        collector.update_policy_weights_(weights_dict={part: Canary(2.0), model: Canary(2.0)})
        collector.update_policy_weights_(Canary(3.0), model_id=model)
        newest(collector, iterator, 2)
        batch = next(iterator)
        assert {*batch["next", "model_low"].flatten().tolist()} == {3.0}
        assert {*batch["next", "model_high"].flatten().tolist()} == {3.0}


def test_a_model_that_is_not_the_policys_is_refused_in_the_trainers_process():
    name, env = "env.transform[0].model", scored()
    transform, model = env.transform, env.transform.model
    with (
        pytest.raises(ValueError, match="expected one for the policy alone in the trainer's"),
        collecting(Collector, ChannelWeightSyncScheme(), canary_policy(), env, name),
    ):
        pass
    assert transform.model is model and model._compiled_call_impl is None


def test_a_transform_follows():
    scheme, transform = ChannelWeightSyncScheme(), Scored(2.0)
    scheme.init_on_sender(model_id="env.transform", model=Scored(1.0))
    scheme.connect()
    worker = pickle.loads(pickle.dumps(scheme))
    worker.init_on_receiver(model_id="env.transform", model=transform, worker_idx=0)
    worker.connect(worker_idx=0)
    assert transform.model.first.unique().tolist() == [1.0]
    for end in (worker, scheme):
        end.shutdown()


def test_a_language_model_that_travels_on_meta_arrives_whole():
    transformers, tokenizers = map(pytest.importorskip, ("transformers", "tokenizers"))
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": True}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()), pad_token="-", eos_token="."
    )
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes, **heads)).eval()
    policy = TransformersWrapper(model, input_mode="tokens", tokenizer=tokenizer, generate=False)
    scheme = ChannelWeightSyncScheme()
    scheme.init_on_sender(model_id="policy", model=policy)
    scheme.connect()
    with _make_meta_policy(policy):  # as torchrl sends it
        sent = pickle.loads(pickle.dumps(policy))
    worker = pickle.loads(pickle.dumps(scheme))
    worker.init_on_receiver(model_id="policy", model=sent, worker_idx=0)
    worker.connect(worker_idx=0)
    tokens = torch.arange(8)[None]
    arrived = sent.model.state_dict()
    assert all(torch.equal(arrived[name], x) for name, x in model.state_dict().items())
    torch.testing.assert_close(sent.model(tokens).logits, model(tokens).logits)
    for end in (worker, scheme):
        end.shutdown()
