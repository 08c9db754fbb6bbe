"""The causes by which an engine's log-probs are not its trainer's, and what to do about each."""

# vLLM has an environment of its own, which the linters do not see.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedrl.channel.layout import Layout
from fusedrl.compat.vllm import configured
from fusedrl.ops import sampling_support, token_log_probs
from fusedrl.vllm.model_weights import ModelWeights
from fusedrl.vllm.operations import LOGITS, Operation, Values, recorded

Messages = Sequence[Mapping[str, str]]
# Log-probs of packed sequences, from their tokens and lengths.
LogProbs = Callable[[Tensor, list[int]], Any]

# Settings of a model that change what it computes: what a name contains, and the kind of cause.
SETTINGS = {
    "eps": "eps",
    "rope": "RoPE",
    "rotary": "RoPE",
    "softcap": "softcap",
    "window": "sliding window",
    "layer_types": "sliding window",
    "tie_word": "tied head",
    "scal": "scale",
    "multiplier": "scale",
    "act": "activation",
    "bias": "bias",
    "experts": "experts",
    "topk": "experts",
}
OPERATIONS = {
    "RoPE": "compare rope_parameters; a model whose buffers were cast, as by .to(torch.bfloat16), "
    "rotates by rounded angles: load it with dtype= instead",
    "norm": "compare the eps of both norms, and whether the trainer's norm was replaced",
    "attention": "compare masks, windows, scales and softcaps, which transformers applies with "
    "attn_implementation='eager' and not with 'sdpa'",
    "activation": "compare hidden_act of both",
    "linear": "compare how both compute it: the engine's kernel, quantization and adapters",
    "logits": "compare the softcap and the scale of the logits",
}
WITHOUT_WEIGHTS = {"RoPE", "attention", "activation"}
# Sampling parameters of which a softmax over all classes knows nothing, and what leaves them out:
# those that a support describes, and those that change the logits.
TRUNCATION: dict[str, tuple[Any, ...]] = {"top_p": (1.0,), "top_k": (0, -1), "min_p": (0.0,)}
CHANGES: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "logit_bias": (None,),
    "allowed_token_ids": (None,),
}
CORRECTED = "or correct the loss by importance_weights"


class Cause(NamedTuple):
    """Something in which engine and trainer differ.

    Args:
        kind: such as ``"dtype"``, ``"RoPE"`` or ``"template"``.
        what: the values on both sides.
        remedy: what to do.
    """

    kind: str
    what: str
    remedy: str


class Response(NamedTuple):
    """What the engine answered to a prompt.

    Args:
        tokens: of both, int64 ``[N]``.
        start: the index of the first token of the answer.
        values: what the engine computed for all but the last token.
    """

    tokens: Tensor
    start: int
    values: Values

    def log_probs(self, logits: Tensor, temperature: float, support: Any = None) -> Tensor:
        """Those of the answer, from the logits after each token but the last."""
        rows, tokens = logits[self.start - 1 :].float(), self.tokens[self.start :]
        return token_log_probs(rows, tokens, temperature=temperature, support=support)

    def sampled_log_probs(self, params: Any) -> Tensor:
        """Those of the distribution that the engine sampled from; NaN where ``CHANGES`` made it."""
        logits = self.values[LOGITS]
        if params.temperature == 0 or _used(params, CHANGES):
            known = 0.0 if params.temperature == 0 else torch.nan
            return torch.full((len(self.tokens) - self.start,), known)
        options = {name: getattr(params, name) for name in _used(params, TRUNCATION)}
        rows = logits[self.start - 1 :]
        support = sampling_support(rows, temperature=params.temperature, **options)
        return self.log_probs(logits, params.temperature, support)


def _used(params: Any, parameters: Mapping[str, tuple[Any, ...]]) -> list[str]:
    return [name for name, neutral in parameters.items() if getattr(params, name) not in neutral]


def sampled(llm: Any, engine: Any, ids: list[int], params: Any, max_tokens: int) -> Response:
    """Let an engine answer a prompt, and watch what it computes."""
    params = params.clone()
    params.max_tokens, params.min_tokens, params.n = max_tokens, 0, 1
    params.ignore_eos, params.stop, params.stop_token_ids = True, [], []
    params.prompt_logprobs = 0  # otherwise a beginning that it has cached would not be computed
    answers: list[Any] = []

    def answer() -> None:
        answers.extend(llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False))

    values = recorded(engine, answer)
    tokens = torch.tensor(ids + list(answers[0].outputs[0].token_ids))
    values = {key: value[: len(tokens) - 1] for key, value in values.items()}
    hidden = values.pop(LOGITS).to(next(engine.parameters()).device)
    with torch.no_grad(), configured(llm.llm_engine.vllm_config):
        values[LOGITS] = engine.compute_logits(hidden).cpu()
    return Response(tokens, len(ids), values)


def prompt_tokens(
    llm: Any, prompt: str | Messages, tokenizer: Any
) -> tuple[list[int], list[Cause]]:
    """The trainer's tokens of a prompt, and how the engine's differ."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1)
    if isinstance(prompt, str):
        ours = tokenizer(prompt)["input_ids"]
        [answer] = llm.generate(prompt, params, use_tqdm=False)
    else:
        options = {"add_generation_prompt": True, "return_dict": False}
        ours = tokenizer.apply_chat_template(list(prompt), **options)
        [answer] = llm.chat(list(prompt), params, use_tqdm=False)
    theirs = list(answer.prompt_token_ids)
    if ours == theirs:
        return ours, []
    pairs = zip(ours, theirs, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
    shown = [f"{tokenizer.convert_ids_to_tokens(ids[at : at + 3])}" for ids in (ours, theirs)]
    twice = [
        f", and the {side} begins with BOS twice"
        for side, ids in (("trainer", ours), ("engine", theirs))
        if ids[:2] == [tokenizer.bos_token_id] * 2
    ]
    what = (
        f"the prompt differs from token {at} on: {shown[0]} in the trainer, {shown[1]} in the "
        f"engine ({len(ours)} and {len(theirs)} tokens){''.join(twice)}"
    )
    remedy = (
        "give both one tokenizer and chat template, or pass prompt_token_ids; a rendered text has "
        "its BOS already: tokenize it with add_special_tokens=False"
    )
    return ours, [Cause("template", what, remedy)]


def settings(vllm_config: Any, model: Any) -> Iterator[Cause]:
    """What differs in dtypes and in the configurations of the model."""
    engine, trainer = vllm_config.model_config, str(model.dtype)
    if str(engine.dtype) != trainer:
        what = f"the engine computes in {engine.dtype}, the trainer in {trainer}"
        yield Cause("dtype", what, f"start both with one dtype, {CORRECTED}")
    cache = vllm_config.cache_config.cache_dtype
    for name, value in (("quantization", engine.quantization), ("kv_cache_dtype", cache)):
        if value not in (None, "auto", trainer.removeprefix("torch.")):
            what = f"the engine has {name}={value!r}"
            yield Cause("dtype", what, f"start it without, {CORRECTED}")
    ours, theirs = (dict(_flat(c)) for c in (model.config, engine.hf_config))
    found: dict[str, list[str]] = {}
    for name in ours | theirs:
        kind = next((kind for part, kind in SETTINGS.items() if part in name), None)
        if kind and ours.get(name) != theirs.get(name):
            values = f"{ours.get(name)} in the trainer and {theirs.get(name)} in the engine"
            found.setdefault(kind, []).append(f"{name} is {values}")
    for kind, differences in found.items():
        yield Cause(kind, "; ".join(differences), "load both with the same config.json")


def _flat(config: Any) -> Iterator[tuple[str, Any]]:
    for name, value in config.get_text_config().to_dict().items():
        if isinstance(value, dict):
            yield from ((f"{name}.{key}", part) for key, part in value.items())
        else:
            yield name, value


def weights(engine: Any, vllm_config: Any, model: Any) -> Iterator[Cause]:
    """Which weights of an engine are not what it would make of the trainer's."""
    if vllm_config.model_config.quantization is not None:
        return
    layout = Layout.of(model)
    try:
        loaded = ModelWeights(engine, vllm_config, layout)
    except ValueError as error:
        _, *differences = str(error).splitlines()
        what = "; ".join(line.strip() for line in differences[:3])
        yield Cause("weights", what, "start the engine from the trainer's checkpoint")
        return
    # A trainer may have rounded what the engine was started with.
    differs = model.dtype != vllm_config.model_config.dtype
    rounding = 2 * torch.finfo(model.dtype).eps if differs else 0.0
    wrong = loaded.differences(list(layout.named(model).values()), rounding)
    names = list(dict.fromkeys(name.replace("cpu_linear", "weight") for name in wrong))
    if names:
        head = all(re.search("lm_head|embed_tokens", name) for name in names)
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        yield Cause(
            "stale head" if head else "stale weights",
            f"the engine has other values in {', '.join(names[:3])}{more}",
            "update the engine by EngineWeights, or start it from the trainer's checkpoint",
        )


def of_operation(first: Operation | None, causes: Sequence[Cause]) -> Iterator[Cause]:
    """The first operation that differs by more than rounding, unless other causes say why."""
    elsewhere = {"template", "dtype"}
    if first is not None and first.kind in WITHOUT_WEIGHTS:
        elsewhere |= {"weights", "stale head", "stale weights"}
    if first is not None and all(cause.kind in elsewhere for cause in causes):
        what = f"{first.name} differs with the same input and weights"
        yield Cause(first.kind, what, OPERATIONS.get(first.kind, OPERATIONS["linear"]))


def in_packed_row(
    response: Response, log_probs: LogProbs, alone: Tensor, rounding: float
) -> tuple[Tensor, list[Cause]]:
    """The trainer's log-probs of an answer behind another sequence, and what that changes."""
    tokens, start = response.tokens, response.start
    with torch.no_grad():
        found = log_probs(torch.cat((tokens, tokens)), [len(tokens)] * 2)
    first, second = (part[start:].to(alone) for part in found.cpu().chunk(2))
    off = [bool((part - alone).abs().max() > rounding) for part in (first, second)]
    if not any(off):
        return second, []
    if off[0]:
        what = "the trainer's log_probs are not those of its model in evaluation mode"
        remedy = "look for dropout, a temperature, another mask, or a shift by one token"
        return second, [Cause("log_probs", what, remedy)]
    worst = (second - alone).abs()
    what = (
        "a sequence has other log-probs in a row behind another one, by up to "
        f"{worst.max():.2g} nats, from token {start + int((worst > rounding).nonzero()[0])} on"
    )
    remedy = (
        "let position_ids begin at 0 in each sequence, and keep attention within it "
        "(cu_seqlens or a block-diagonal mask)"
    )
    return second, [Cause("packing", what, remedy)]


def sampling(params: Any, temperature: float, model_config: Any) -> Iterator[Cause]:
    """What of the engine's sampling the trainer's log-probs ignore."""
    if params.temperature != temperature:
        what = f"the engine samples at {params.temperature}, the trainer divides by {temperature}"
        yield Cause("temperature", what, "give both the same temperature")
    elif temperature != 1 and not model_config.logprobs_mode.startswith("processed"):
        what = f"logprobs_mode={model_config.logprobs_mode!r} reports those at temperature 1"
        remedy = "start the engine with logprobs_mode='processed_logprobs'"
        yield Cause("temperature", what, remedy)
    default = model_config.get_diff_sampling_param()
    for name in _used(params, TRUNCATION | CHANGES):
        value, [neutral, *_] = getattr(params, name), (TRUNCATION | CHANGES)[name]
        source = " of generation_config.json" if default.get(name) == value else ""
        remedy = f"sample with {name}={neutral}"
        if source:
            remedy += ", or start the engine with generation_config='vllm'"
        if name in TRUNCATION:
            remedy += ", or pass support= to the trainer's log-probs"
        yield Cause(name, f"the trainer ignores {name}={value}{source}", remedy)
