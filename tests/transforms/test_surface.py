"""What is easily skipped: options, gradients and devices of the three transforms."""

from __future__ import annotations

import copy

import pytest
import torch

from fusedrl import RetrieveKL, RetrieveLogProb

from .dialogs import rewarded, rows

GEN, REF, KL = ("log_probs", "full"), ("ref_log_probs", "full"), "kl_penalty"


class TestOptions:
    """Options of ``RetrieveKL`` reach the transforms they are for."""

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

    def test_detached_answers_have_no_graph_and_no_model_a_gradient(self, wrap, models):
        out = self.score(wrap, models, detach=True)
        for key in (GEN, REF, KL, "reward"):
            assert not any(row.requires_grad for row in rows(out, key))
        assert all(p.grad is None for model in models for p in model.parameters())


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
