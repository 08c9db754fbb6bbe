"""What is easily skipped: options, gradients and devices of the three transforms."""

from __future__ import annotations

import copy

import pytest
import torch

from fusedrl import KLComputation, RetrieveKL, RetrieveLogProb

from .dialogs import assert_rows_equal, conversations, rewarded, rows
from .test_retrieve_log_prob import WHOLE_TURN

GEN, REF, KL = ("log_probs", "full"), ("ref_log_probs", "full"), "kl_penalty"


class TestOptions:
    """Options of ``RetrieveKL`` reach the transforms they are for."""

    @pytest.mark.parametrize("coeff", [0.25, 0, -1.0, torch.tensor(0.25, dtype=torch.float64)])
    def test_coeff(self, retrieve_kl, coeff):
        out = retrieve_kl(coeff=coeff)(rewarded())
        expected = [1 - float(coeff) * row.unsqueeze(-1) for row in rows(out, KL)]
        assert_rows_equal(rows(out, "reward"), expected)

    def test_coeff_may_change_between_steps(self, retrieve_kl):
        transform = retrieve_kl(coeff=0.5)
        for coeff in (0.5, 0.1):
            transform[2].coeff = coeff
            out = transform(rewarded())
            assert_rows_equal(
                rows(out, "reward"), [1 - coeff * row.unsqueeze(-1) for row in rows(out, KL)]
            )

    @pytest.mark.parametrize("source", ["tokenizer", "tokenizer_kwargs"])
    def test_the_mask_of_both_models_comes_from_another_template(
        self, retrieve_kl, tokenizer, source
    ):
        other = copy.deepcopy(tokenizer)
        other.chat_template = WHOLE_TURN
        options = {"tokenizer": other, "tokenizer_kwargs": {"chat_template": WHOLE_TURN}}
        narrow = retrieve_kl()(conversations())
        wide = retrieve_kl(**{source: options[source]})(conversations())
        for key in (GEN, REF):
            for few, more in zip(rows(narrow, key), rows(wide, key), strict=True):
                assert 0 < (few != 0).sum() < (more != 0).sum()

    def test_all_tokens(self, retrieve_kl):
        """Of the whole conversation the first token alone has no log-prob."""
        out = retrieve_kl(assistant_only=False)(conversations())
        for key in (GEN, REF):
            assert all((row[1:] != 0).all() and row[0] == 0 for row in rows(out, key))

    def test_padding_side(self, retrieve_kl):
        unpadded = rows(retrieve_kl()(conversations()), KL)
        left, right = (
            retrieve_kl(True, padding_side=side)(conversations()) for side in ("left", "right")
        )
        for i, row in enumerate(unpadded):
            torch.testing.assert_close(left[KL][i, -len(row) :], row, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(right[KL][i, : len(row)], row, rtol=1e-5, atol=1e-5)
            assert not right[KL][i, len(row) :].any()

    @pytest.mark.parametrize("key", ["kl", ("info", "kl")])
    def test_out_keys(self, retrieve_kl, key):
        names = {"gen_log_probs_full_key": ("a", "full"), "ref_log_probs_full_key": ("b", "full")}
        out = retrieve_kl(**names, kl_key=key)(rewarded())
        assert_rows_equal(rows(out, key), rows(retrieve_kl()(rewarded()), KL))
        given = set(rewarded().keys(True))
        assert {("a", "full"), ("b", "full"), key} == {
            k for k in set(out.keys(True, True)) - given if k != "reward"
        }

    @pytest.mark.parametrize("deferred", [False, True])
    def test_history_key(self, policy, reference, deferred):
        options = {"input_key": ("dialog", "full")}
        model = "from_collector" if deferred else policy(**options)
        RetrieveKL(model, reference(**options), history_key="dialog")
        with pytest.raises(ValueError, match="history_key: expected the key"):
            RetrieveKL(model, reference(), history_key="dialog")

    def test_factories_are_called_once_and_at_once(self, policy, reference):
        made = []

        def make(model):
            made.append(model)
            return model()

        transform = RetrieveKL(
            gen_model_factory=lambda: make(policy), ref_model_factory=lambda: make(reference)
        )
        for _ in range(2):
            transform(rewarded())
        assert made == [policy, reference]

    def test_a_factory_of_the_reference_with_the_collectors_policy(self, reference):
        transform = RetrieveKL("from_collector", ref_model_factory=reference)
        assert [type(t) for t in transform] == [RetrieveLogProb, KLComputation]

    @pytest.mark.parametrize("model", ["policy", "from_collector"])
    def test_one_key_for_both_models_is_refused(self, policy, reference, model):
        gen_model = policy() if model == "policy" else model
        with pytest.raises(ValueError, match="expected another key"):
            RetrieveKL(gen_model, reference(), gen_log_probs_full_key=REF)

    @pytest.mark.parametrize("old", ["coef", "gen_log_probs_key", "ref_log_probs_key"])
    @pytest.mark.filterwarnings("ignore::DeprecationWarning")
    def test_old_names(self, retrieve_kl, old):
        retrieve_kl(**{old: 0.5 if old == "coef" else ("mine", "full")})

    def test_the_name_of_an_actor(self, retrieve_kl):
        retrieve_kl(actor_name="scorer")


class TestGradients:
    @pytest.fixture
    def models(self, policy_model, reference_model):
        return copy.deepcopy(policy_model), copy.deepcopy(reference_model)

    def score(self, wrap, models, **options):
        names = ("gen_log_probs", "ref_log_probs")
        wrapped = [wrap(model, name) for model, name in zip(models, names, strict=True)]
        return RetrieveKL(*wrapped, **options)(rewarded())

    def test_they_reach_every_parameter_of_both_models(self, wrap, models):
        out = self.score(wrap, models, detach=False, coeff=2.0)
        weights = [torch.randn_like(row) for row in rows(out, "reward")]
        sum((w * r).sum() for w, r in zip(weights, rows(out, "reward"), strict=True)).backward()
        for model in models:
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None and parameter.grad.any(), name

    def test_they_are_those_of_the_definition(self, wrap, models, policy_model, tokenizer):
        """d(reward)/d(logits) by autograd through log_softmax, of one conversation."""
        out = self.score(wrap, models, detach=False)
        rows(out, KL)[0].sum().backward()
        ours = models[0].lm_head.weight.grad
        wrapper = wrap(policy_model)
        scored = wrapper(conversations())
        tokens = rows(scored, ("tokens", "full"))[0]
        mask = rows(scored, ("masks", "all_assistant_mask"))[0]
        other = copy.deepcopy(policy_model)
        log_probs = other(tokens[None]).logits.log_softmax(-1)[0, :-1]
        picked = log_probs.gather(-1, tokens[1:, None]).squeeze(-1)
        picked[mask[1:]].sum().backward()
        torch.testing.assert_close(ours, other.lm_head.weight.grad, rtol=1e-4, atol=1e-5)

    def test_detached_answers_have_no_graph_and_no_model_a_gradient(self, wrap, models):
        out = self.score(wrap, models, detach=True)
        for key in (GEN, REF, KL, "reward"):
            assert not any(row.requires_grad for row in rows(out, key))
        assert all(p.grad is None for model in models for p in model.parameters())

    def test_no_grad_wins_over_detach_false(self, wrap, models):
        with torch.no_grad():
            out = self.score(wrap, models, detach=False)
        assert not rows(out, KL)[0].requires_grad


class TestDevice:
    """Without a GPU, ``meta`` is the other device: parameters and the I/O device go there."""

    @pytest.fixture
    def own(self, wrap, policy_model, reference_model):
        return [
            wrap(copy.deepcopy(model), name)
            for model, name in ((policy_model, "gen_log_probs"), (reference_model, "ref_log_probs"))
        ]

    def devices(self, transform) -> set[str]:
        return {p.device.type for p in transform.parameters()}

    @pytest.mark.parametrize("device", ["meta", torch.device("meta")])
    def test_the_constructor_moves_the_models(self, own, device):
        assert self.devices(RetrieveLogProb(own[0], device=device)) == {"meta"}
        assert self.devices(RetrieveKL(*own, device=device)) == {"meta"}

    @pytest.mark.parametrize("device", [None, "cpu"])
    def test_to_moves_the_models_and_where_data_goes(self, own, device):
        transform = RetrieveKL(*own, device=device).to("meta")
        assert self.devices(transform) == {"meta"}
        # Data follows only where the constructor asked for it.
        expected = None if device is None else torch.device("meta")
        assert [getattr(t, "_io_device", None) for t in transform[:2]] == [expected] * 2

    def test_data_returns_to_its_own_device(self, own):
        data = rewarded(stacked=True).to("cpu")
        out = RetrieveKL(*own, device="cpu")(data)
        assert out.device == torch.device("cpu")
        assert all(row.device.type == "cpu" for row in rows(out, KL))

    def test_the_attribute_of_older_releases(self, policy):
        with pytest.warns(DeprecationWarning, match="device"):
            assert RetrieveLogProb(policy(), device="cpu").device == torch.device("cpu")
