"""Planted differences of an engine and its trainer are named, and none where none is planted."""

import pytest
from chat_templates import CHATML
from tiny_engines import offline, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from fusedrl.vllm import explain_mismatch

CHAT = [{"role": "user", "content": "Is it late? Say yes or no, and then why you think so."}]
BUILT = {"qwen2": {"initializer_range": 0.2}}


@pytest.fixture(scope="module")
def llm(folder):
    tiny_model(folder, initializer_range=0.2)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = CHATML.replace("GENERATION", "").replace("END", "")
    tokenizer.save_pretrained(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        with offline(folder) as llm:
            yield llm


@pytest.fixture
def tokenizer(folder, llm):
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def trainer(folder, llm):
    return lambda **options: AutoModelForCausalLM.from_pretrained(folder, **options)


def show(found):
    print(f"\nbits: {next((o for o in found.operations if o.difference), None)}")
    print(f"first: {found.first}")
    for o in found.operations:
        print(
            f"   {o.name:45} {o.kind:10} {o.error:.1e} {o.allowed:.1e} {o.difference:.1e} {o.token}"
        )
    for cause in found.causes:
        print(f"{cause.kind}: {cause.what}; {cause.remedy}")
    print(f"ratio {found.cost.max_ratio:.3f} k3 {found.cost.k3:.2e} ess {found.cost.ess:.2f}")
    return found


def test_nothing(llm, trainer, tokenizer):
    found = show(explain_mismatch(trainer(), llm, CHAT, tokenizer))
    assert found.causes == []
