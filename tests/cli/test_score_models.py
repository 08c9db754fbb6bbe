"""The models of a scoring job: whole, causal, of one vocabulary, with a template, or refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("pyarrow")

from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertLMHeadModel,
    Qwen2ForSequenceClassification,
)

from fusedrl.demo.models import make_model, make_tokenizer
from fusedrl.scoring import ScoreError, Settings, batch_scores, pretrained, score_chats
from fusedrl.scoring.pretrained import load_pair

from .conftest import chat, rows

pytestmark = pytest.mark.heavy

GOOD = chat("Hi", "Hello!")


@pytest.fixture
def folder(models, tmp_path):
    """A copy of the policy, to be damaged."""
    return Path(shutil.copytree(models.policy, tmp_path / "model"))


@pytest.fixture
def refused(write_chats, score, capsys):
    """What the command says of a policy that it refuses, having written nothing."""

    def run(policy, *options, **other):
        code, out = score(write_chats(GOOD), *options, policy=policy, **other)
        assert code == 2
        assert not out.exists()
        said = capsys.readouterr().err.strip().splitlines()[-1]
        assert said.startswith("score: ")
        return said

    return run


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("kept", [0, 0.5])
def test_truncated_weights_are_refused(folder, refused, kept):
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: kept if isinstance(kept, int) else int(kept * len(content))])
    assert f"policy: cannot load a model from '{folder}'" in refused(folder)


BROKEN = {
    "config.json": [b"", b"null", b"\xff\xfe"],
    "tokenizer.json": [b"", b"{}", b"\xff\xfe"],
    "tokenizer_config.json": [b"{"],
    "generation_config.json": [b"null"],
    "chat_template.jinja": [b"\xff\xfe"],
}


@pytest.mark.parametrize(
    ("name", "content"), [(name, content) for name, all_ in BROKEN.items() for content in all_]
)
def test_a_broken_file_of_a_checkpoint_is_refused(folder, refused, name, content):
    (folder / name).write_bytes(content)
    assert refused(folder).startswith("score: policy: cannot load a")


MISFITS = [
    (
        {"num_hidden_layers": 1, "layer_types": ["full_attention"]},
        "12 weights are not in the model",
    ),
    ({"tie_word_embeddings": False}, "1 weights are missing, such as lm_head.weight"),
    ({"hidden_size": 64}, "expected model.embed_tokens.weight of shape"),
    ({"vocab_size": 700}, "expected model.embed_tokens.weight of shape"),
    ({"quantization_config": {"quant_method": "nope"}}, "does not support its quantization"),
]


@pytest.mark.parametrize(("changes", "message"), MISFITS)
def test_weights_that_do_not_fit_their_configuration_are_refused(folder, refused, changes, message):
    edit(folder / "config.json", **changes)
    assert message in refused(folder)


SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}


def test_an_encoder_is_refused(tokenizer, tmp_path, refused):
    torch.manual_seed(0)
    sizes = {"vocab_size": len(tokenizer), "intermediate_size": 64, **SIZES}
    BertLMHeadModel(BertConfig(**sizes, initializer_range=0.5)).save_pretrained(tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")
    said = refused(tmp_path / "bert", "--dtype", "bfloat16")
    assert "whose logits depend on later tokens" in said


def test_a_reward_model_is_refused(models, folder, refused):
    config = make_model(1500).config
    config.num_labels = 1
    config.pad_token_id = 0
    Qwen2ForSequenceClassification(config).save_pretrained(folder)
    said = refused(folder)
    assert "expected a causal language model, got Qwen2ForSequenceClassification" in said


def test_different_vocabularies_are_refused(models, write_chats, score, tmp_path, capsys):
    other = make_tokenizer(["quite another text, from which other merges follow"] * 20, size=300)
    other.save_pretrained(tmp_path / "other")
    make_model(len(other)).save_pretrained(tmp_path / "other")
    code, out = score(write_chats(GOOD), reference=tmp_path / "other")
    assert code == 2
    assert "expected the policy's vocabulary" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("role", ["policy", "reference"])
def test_a_model_that_is_not_there_is_named(write_chats, score, capsys, role):
    code, _ = score(write_chats(GOOD), **{role: "a b"})
    assert code == 2
    assert f"score: {role}: cannot load a tokenizer from '" in capsys.readouterr().err


@pytest.mark.parametrize("role", ["policy", "reference"])
@pytest.mark.parametrize("name", ["./polcy", "runs/7/model", "~/x"])
def test_a_folder_that_is_not_there_is_named(write_chats, score, capsys, role, name):
    code, _ = score(write_chats(GOOD), **{role: name})
    assert code == 2
    expected = f"score: {role}: expected a directory, got '{name}', which is not there; "
    assert expected in capsys.readouterr().err


def test_a_folder_that_has_checkpoints_alone_names_them(
    models, tmp_path, refused, score, write_chats
):
    for step in (10, 5):
        shutil.copytree(models.policy, tmp_path / "run" / f"checkpoint-{step}")
    said = refused(tmp_path / "run")
    advised = said.rpartition("; pass one of its checkpoints, such as ")[2]
    assert advised == str(tmp_path / "run" / "checkpoint-10")
    code, _ = score(write_chats(GOOD), policy=advised)
    assert code == 0


def test_a_tokenizer_without_its_vocabulary_is_refused_by_its_folder(models, tmp_path, refused):
    for name, source in (("policy", models.policy), ("other", models.reference)):
        shutil.copytree(source, tmp_path / name)
        (tmp_path / name / "tokenizer.json").unlink()
    said = refused(tmp_path / "policy", reference=tmp_path / "other")
    assert f"policy: expected a tokenizer with a vocabulary in '{tmp_path / 'policy'}'" in said
    said = refused(models.policy, reference=tmp_path / "other")
    assert f"reference: expected a tokenizer with a vocabulary in '{tmp_path / 'other'}'" in said


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_not_finite_are_refused(models, folder, refused, value, dtype):
    model = AutoModelForCausalLM.from_pretrained(models.policy, dtype=dtype)
    model.get_input_embeddings().weight.data[-1, -1] = value  # of a token that no chat has
    model.save_pretrained(folder)
    assert "got NaN or infinite ones in model.embed_tokens.weight of" in refused(folder)


def adapters(model, folder, **options):
    """A folder of peft adapters that move every logit, and the model that they are merged into."""
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(target_modules=["v_proj", "o_proj"], **options)
    )
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in (w for w in adapted.parameters() if w.requires_grad):
            weight.add_(torch.randn_like(weight), alpha=0.5)
    adapted.save_pretrained(folder)
    return adapted.merge_and_unload()


@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"modules_to_save": ["norm"]}])
def test_adapters_are_scored_as_the_model_that_they_are_merged_into(
    models, write_chats, tmp_path, options
):
    base = AutoModelForCausalLM.from_pretrained(models.reference)
    merged = adapters(base, tmp_path / "lora", **options)
    merged.save_pretrained(tmp_path / "merged")
    AutoTokenizer.from_pretrained(models.reference).save_pretrained(tmp_path / "merged")
    path, found = write_chats(GOOD, chat("Name a colour.", "Blue.")), []
    for policy in ("lora", "merged"):
        pair = str(tmp_path / policy), models.reference
        score_chats(path, *pair, tmp_path / "out")
        found.append([row["kl"] for row in rows(tmp_path / "out" / "tokens.parquet")])
    assert found[0] == pytest.approx(found[1], abs=1e-6)
    assert max(found[0]) > 3e-5
    swapped = models.reference, str(tmp_path / "lora")
    summary = score_chats(path, *swapped, tmp_path / "out", Settings(forward_kl=True))
    assert summary.mean("kl_forward_mean") == pytest.approx(sum(found[0]) / len(found[0]), abs=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj"], "alora_invocation_tokens": [5, 6]},
        {"target_modules": ["q_proj"], "trainable_token_indices": [5, 6]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
        {"target_modules": ["embed_tokens"]},
    ],
    ids=lambda options: [*options][-1],
)
def test_adapters_are_loaded_as_peft_loads_them(models, tmp_path, options):
    peft = pytest.importorskip("peft")
    base = AutoModelForCausalLM.from_pretrained(models.reference)
    adapted = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **options))
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in (w for w in adapted.parameters() if w.requires_grad):
            weight.add_(torch.randn_like(weight), alpha=0.1)
    adapted.save_pretrained(tmp_path / "lora")
    made = load_pair(str(tmp_path / "lora"), models.reference, "cpu", "auto", None)
    tokens = torch.arange(2, 12)[None]
    with torch.inference_mode():
        expected = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "lora")(tokens).logits
        assert torch.equal(made.policy(tokens).logits, expected)
        assert not torch.equal(made.reference(tokens).logits, expected)


def test_the_base_of_adapters_has_the_revision_that_they_name(models, tmp_path, monkeypatch):
    adapters(AutoModelForCausalLM.from_pretrained(models.reference), tmp_path / "lora")
    edit(tmp_path / "lora" / "adapter_config.json", revision="v2")
    real, asked = pretrained._load, []

    def load(kind, role, name, *args, **options):
        asked.append((role, name, options.get("revision")))
        return real(kind, role, name, *args, **options)

    monkeypatch.setattr(pretrained, "_load", load)
    load_pair(str(tmp_path / "lora"), models.reference, "cpu", "auto", None)
    of_base = [of for role, name, of in asked if (role, name) == ("policy", models.reference)]
    assert of_base == ["v2"] * 3
    assert {of for role, _, of in asked if role == "reference"} == {None}


def test_the_base_of_adapters_may_be_named(models, write_chats, tmp_path, refused, score):
    adapters(AutoModelForCausalLM.from_pretrained(models.reference), tmp_path / "lora")
    config = tmp_path / "lora" / "adapter_config.json"
    edit(config, base_model_name_or_path=str(tmp_path / "moved"))
    said = refused(tmp_path / "lora")
    assert f"expected a directory, got '{tmp_path / 'moved'}', which is not there" in said
    assert "--base" in said
    edit(config, base_model_name_or_path=None)
    assert "have no base model; pass --base MODEL" in refused(tmp_path / "lora")
    assert "leave it out" in refused(models.policy, "--base", models.reference)
    code, _ = score(write_chats(GOOD), "--base", models.reference, policy=tmp_path / "lora")
    assert code == 0


def test_adapters_that_do_not_fit_are_refused(models, folder, tmp_path, refused):
    from safetensors.torch import load_file, save_file

    adapters(AutoModelForCausalLM.from_pretrained(models.reference), tmp_path / "lora")
    file = tmp_path / "lora" / "adapter_model.safetensors"
    weights = load_file(file)
    first = next(iter(weights))
    for other in (
        {key: x for key, x in weights.items() if key != first},
        {**weights, first.replace("layers.0", "layers.7"): weights[first].clone()},
        {**weights, first: weights[first][:, :-1].contiguous()},
    ):
        save_file(other, file)
        assert "do not match" in refused(tmp_path / "lora")
    file.unlink()
    assert "do not match" in refused(tmp_path / "lora")
    edit(tmp_path / "lora" / "adapter_config.json", peft_type="PROMPT_TUNING")
    assert "which adds virtual tokens" in refused(tmp_path / "lora")


def test_a_chat_without_memory_for_it_is_left_out(models, write_chats, monkeypatch, tmp_path):
    real = batch_scores.causal_scores

    def no_memory(policy, reference, tokens, lengths, *args, **options):
        if max(lengths) > 100:
            raise torch.OutOfMemoryError("tried to allocate too much")
        return real(policy, reference, tokens, lengths, *args, **options)

    monkeypatch.setattr(batch_scores, "causal_scores", no_memory)
    path = write_chats(GOOD, chat("Hi", "long " * 100), GOOD)
    summary = score_chats(path, models.policy, models.reference, tmp_path / "out")
    assert [row["chat"] for row in summary.rows] == [1, 3]
    assert "tried to allocate too much" in str(summary.skipped[0])


def test_vocabularies_that_differ_in_padding_alone_are_compared_over_the_tokens(
    models, write_chats, tmp_path
):
    model = AutoModelForCausalLM.from_pretrained(models.policy)
    model.resize_token_embeddings(len(model.get_input_embeddings().weight) + 5, mean_resizing=False)
    with torch.no_grad():
        model.get_output_embeddings().weight[-5:] = 9.0  # of classes that are no tokens
    for padded in (model, AutoModelForCausalLM.from_pretrained(models.policy)):
        padded.save_pretrained(tmp_path / "padded")
        AutoTokenizer.from_pretrained(models.policy).save_pretrained(tmp_path / "padded")
        summary = score_chats(
            write_chats(GOOD), str(tmp_path / "padded"), models.policy, tmp_path / "out"
        )
        assert summary.mean("kl_mean") == pytest.approx(0, abs=1e-6)


def test_a_tokenizer_without_chat_template_needs_one(folder, write_chats, score, refused, tmp_path):
    template = tmp_path / "template.jinja"
    (folder / "chat_template.jinja").rename(template)
    assert "--chat-template FILE" in refused(folder)
    code, out = score(write_chats(GOOD), "--chat-template", template, policy=folder)
    assert code == 0
    assert rows(out / "chats.parquet")[0]["scored_tokens"] > 1


BAD_TEMPLATES = {
    "not utf-8": (b"\xff\xfe{{ x }}", "chat_template: cannot read "),
    "empty": (b"\n", "chat_template: expected a Jinja template, got the empty file "),
    "not jinja": (b"\n{% for m in %}", "TemplateSyntaxError: "),
    "raises": (b"{{ raise_exception('never\nthis') }}", "messages: TemplateError: never this"),
    "endless": (b"{% for i in range(10 ** 9) %}x{% endfor %}", "OverflowError: Range too big"),
    "recursive": (b"{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    "escaping": (b"{{ messages.__class__.__mro__ }}", "SecurityError"),
    "no text": (b"{}", "the chat template does not render all of its content"),
}


@pytest.mark.parametrize("name", BAD_TEMPLATES)
def test_a_template_that_does_not_do_is_refused(models, tmp_path, refused, name):
    content, message = BAD_TEMPLATES[name]
    (tmp_path / "template.jinja").write_bytes(content)
    assert message in refused(models.policy, "--chat-template", tmp_path / "template.jinja")


@pytest.mark.parametrize("device", ["cuda:99", "meta", "nowhere"])
def test_a_device_that_cannot_compute_is_named(models, refused, device):
    said = refused(models.policy, "--device", device)
    assert f"policy: '{models.policy}' does not run on {device}: " in said


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": 1e-31},
        {"temperature": float("nan")},
        {"estimator": "k4"},
        {"dtype": "int8"},
        {"max_tokens_per_batch": 0},
        {"context": -1},
        {"report_chats": 0},
        {"chat_template_kwargs": {"add_generation_prompt": True}},
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(wrong):
    (name,) = wrong
    with pytest.raises(ScoreError, match=f"{name}: expected"):
        Settings(**wrong)
