"""Under the patch a group's prompt is computed once, and what TRL computes is the same."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

pytest.importorskip("trl.kernels.chunked_logprob", reason="no trl, or one without a fused LM head")

import trl
from datasets import Dataset
from one_thread import one_thread
from tiny_trl import PAIRS, TEXTS, by_length, options, save_model, trained
from trl_losses import (
    OLD,
    PLAIN_KL,
    REF,
    SEQUENCE,
    TOOLS,
    WIDTH,
    batch,
    both,
    check_same,
    folder,
    grpo,
    said,
)
from watching import Watch

import fusedrl

__all__ = ["folder", "one_thread", "said"]

pytestmark = pytest.mark.filterwarnings("ignore")

LONG, SHORT = 48, 32  # tokens of the two prompts, of which each has two answers
NODES = LONG + 6 + 4 + SHORT + 1 + 0
WHOLE = 4 * (LONG + WIDTH)
PROMPTS = [" ".join([text] * 15) for text in TEXTS]  # of 45 to 90 tokens


def of_groups(*columns):
    """The batch of other tests, under two long prompts."""
    generator = torch.Generator().manual_seed(2)
    prompts = torch.randint(2, 250, (2, LONG), generator=generator)
    mask = torch.ones_like(prompts)
    mask[1, : LONG - SHORT] = 0
    rows = torch.tensor([0, 0, 1, 1])
    return {**batch(*columns), "prompt_ids": prompts[rows], "prompt_mask": mask[rows]}


@pytest.fixture
def embedded():
    """How many tokens each call of a decoder embeds that may learn from it, and each other one."""
    counts = {True: [], False: []}

    def count(module, args, output):
        counts[torch.is_grad_enabled()].append(args[0].numel())

    def counting(trainer):
        for model in filter(None, (trainer.model, trainer.ref_model)):
            model.get_input_embeddings().register_forward_hook(Watch(count))
        return trainer

    counting.counts = counts
    return counting


CASES = [
    ({}, ()),
    ({"epsilon": 0.1, "loss_type": "grpo"}, (OLD, TOOLS)),
    ({"beta": 0.1, "entropy_coef": 0.05}, (OLD, REF)),
    ({"loss_type": "luspo", **SEQUENCE}, (OLD,)),
    ({"loss_type": "sapo"}, (OLD,)),
    ({"top_entropy_quantile": 0.5}, (OLD,)),
    ({"gradient_checkpointing": True}, (OLD,)),
    ({"cast_lm_head_to_fp32": True}, (OLD,)),
]


@pytest.mark.parametrize(("config", "columns"), CASES)
def test_a_loss_and_its_gradients_and_metrics_are_those_of_trl(
    config, columns, folder, embedded, tmp_path
):
    found, expected, _ = both(
        lambda: embedded(grpo(folder, tmp_path, **config)), of_groups(*columns)
    )
    check_same(found, expected)
    learned = embedded.counts[True]
    # A layer that is recomputed has its embeddings already.
    assert learned == [WHOLE, NODES]


def test_the_switch_and_the_names(folder, embedded, tmp_path):
    names = {"DPOTrainer._compute_loss", "DPOTrainer.compute_ref_log_probs"}
    names |= {f"{x}Trainer._get_per_token_logps_and_entropies" for x in ("GRPO", "RLOO")}
    trainer = embedded(grpo(folder, tmp_path))
    inputs, calls = of_groups(), embedded.counts[True]
    trainer.current_gradient_accumulation_steps = 1
    with fusedrl.patch_trl(share_prefixes=False) as report:
        assert not names & {change.name for change in report}
        trainer.compute_loss(trainer.model, inputs)
    assert calls == [WHOLE]
    with fusedrl.patch_trl() as report:  # a trainer that exists shares too
        assert names <= {change.name for change in report}
        assert names <= set(fusedrl.patch_trl().already)
        trainer.compute_loss(trainer.model, inputs)
    assert calls == [WHOLE, NODES]
    trainer.compute_loss(trainer.model, inputs)
    assert calls == [WHOLE, NODES, WHOLE]


def test_a_part_of_a_batch_shares_what_it_has(folder, embedded, tmp_path):
    """As when the policy before the step is scored."""
    trainer = embedded(grpo(folder, tmp_path))
    inputs = of_groups()
    ids = torch.cat((inputs["prompt_ids"], inputs["completion_ids"]), 1)
    mask = torch.cat((inputs["prompt_mask"], inputs["completion_mask"]), 1)

    def scored(rows):
        with torch.no_grad():
            return trainer._get_per_token_logps_and_entropies(
                trainer.model, ids[rows], mask[rows], WIDTH, batch_size=2, compute_entropy=True
            )[:2]

    for rows, nodes in (
        ([0, 1, 2, 3], [LONG + 10, SHORT + 1]),
        ([0, 2, 1, 3], [2 * (LONG + WIDTH)] * 2),  # shuffled, so that no two are alike
        ([0], [LONG + WIDTH]),
    ):
        expected = scored(rows)
        with fusedrl.patch_trl():
            scored(rows)
            embedded.counts[False].clear()
            torch.testing.assert_close(scored(rows), expected, rtol=1e-5, atol=1e-5)
        assert embedded.counts[False] == nodes


def test_the_loss_of_a_router_is_that_of_trl(embedded, tmp_path):
    moe = save_model(tmp_path / "moe", experts=4)
    found, expected, trainer = both(lambda: embedded(grpo(moe, tmp_path)), of_groups(OLD))
    assert trainer.aux_loss_enabled and "aux_loss" in expected[2]
    check_same(found, expected)
    assert embedded.counts[True] == [WHOLE, NODES]


# Adam divides small gradients by their own size, and with them their rounding, in a few weights.
SLOW = {"learning_rate": 1e-3}


def policy(trainer, adapters=False, **config):
    def make(folder, out):
        kind = getattr(trl, trainer.__name__.replace("Trainer", "Config"))
        config_of = {**SLOW, "num_generations": 2, "max_completion_length": WIDTH, **config}
        return trainer(
            folder,
            reward_funcs=by_length,
            args=kind(**options(out, **config_of)),
            train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
            peft_config=lora() if adapters else None,
        )

    return make


def preferring(adapters=False, **config):
    def make(folder, out):
        return trl.DPOTrainer(
            folder,
            args=trl.DPOConfig(**options(out, **SLOW, **config)),
            train_dataset=Dataset.from_dict({**PAIRS, "prompt": PROMPTS}),
            peft_config=lora() if adapters else None,
        )

    return make


def lora():
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    return peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)


ACCUMULATED = {"num_generations": 4, "gradient_accumulation_steps": 2}
# How a trainer is made, and whether what learns and what only scores share something.
STEPS = {
    "grpo": (policy(trl.GRPOTrainer, mask_truncated_completions=True), True, False),
    "grpo of adapters": (policy(trl.GRPOTrainer, True, beta=0.1), True, True),
    "grpo, each batch twice": (
        policy(trl.GRPOTrainer, num_iterations=2, epsilon=1e-3, **PLAIN_KL),
        True,
        True,
    ),
    "grpo, accumulated": (policy(trl.GRPOTrainer, **ACCUMULATED), True, False),
    "rloo": (policy(trl.RLOOTrainer, beta=0.1), True, True),
    "dpo": (preferring(), True, True),
    "dpo of adapters": (preferring(True), True, True),
}


@pytest.mark.heavy
@pytest.mark.parametrize("case", STEPS)
def test_two_steps_under_the_patch_are_those_without_it(case, folder, embedded, said, tmp_path):
    make, *shares = STEPS[case]
    found = []
    for patch in (nullcontext(), None):
        with patch or fusedrl.patch_trl():
            logs, weights = trained(lambda *at: embedded(make(*at)), folder, tmp_path)
        # Without the passes over a token in generation, and over a few that try the model.
        sizes = [sum(n for n in embedded.counts[kind] if n > 20) for kind in (True, False)]
        found.append((logs, weights, sizes))
        for counts in embedded.counts.values():
            counts.clear()
    (expected_logs, expected, before), (logs, weights, after) = found
    for ours_of_step, theirs_of_step in zip(logs, expected_logs, strict=True):
        assert ours_of_step == pytest.approx(theirs_of_step, rel=2e-4, abs=2e-5)
    learned, as_theirs = (torch.cat([*map(torch.flatten, x.values())]) for x in (weights, expected))
    assert (learned - as_theirs).norm() <= 1e-4 * as_theirs.norm()  # what is learned is 5e-3 of it
    assert [new < old for new, old in zip(after, before, strict=True)] == shares
    assert [new > old for new, old in zip(after, before, strict=True)] == [False, False]
    assert not said()
