"""``fusedrl check --engine vllm MODEL``: why an engine's log-probs are not its trainer's."""

# vLLM has an environment of its own, which the linters do not see.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

TEXT = "Is it late? Answer in one sentence, and say how you know."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    group = parser.add_argument_group("an engine and its trainer")
    group.add_argument("--engine", choices=["vllm"], help="start it, and compare it with a trainer")
    group.add_argument("model", nargs="?", metavar="MODEL", help="directory or name, for both")
    group.add_argument("--trainer", metavar="MODEL", help="the trainer's, if it has another one")
    group.add_argument("--dtype", default="auto", help="the trainer's (that of its checkpoint)")
    group.add_argument("--temperature", type=float, default=1.0, help="the trainer's (1)")
    group.add_argument("--text", default=TEXT, help="what a user asks the engine")
    for option, of in (("engine-options", "LLM"), ("sampling-params", "SamplingParams")):
        what = f"arguments of vllm.{of}"
        group.add_argument(f"--{option}", type=_options, default={}, metavar="JSON", help=what)


def _options(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected JSON, got {text!r}: {error}") from error
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"expected an object such as {{}}, got {text!r}")
    return found


def run(args: argparse.Namespace) -> int:
    """Start the engine and print how it differs; 1 if anything but rounding makes it differ."""
    if args.engine is None or args.model is None:
        print("check: expected --engine vllm and MODEL together; name both", file=sys.stderr)
        return 2
    # Modules are watched in this process.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from vllm import LLM, SamplingParams

    from fusedrl.vllm import explain_mismatch

    trainer = args.trainer or args.model
    try:
        tokenizer = AutoTokenizer.from_pretrained(trainer)
        model = AutoModelForCausalLM.from_pretrained(trainer, dtype=args.dtype)
        llm = LLM(args.model, **{"enforce_eager": True, **args.engine_options})
        sampling = SamplingParams(**args.sampling_params) if args.sampling_params else None
        chat = [{"role": "user", "content": args.text}] if tokenizer.chat_template else args.text
        options: dict[str, Any] = {"sampling_params": sampling, "temperature": args.temperature}
        found = explain_mismatch(model, llm, chat, tokenizer, **options)
    except (OSError, TypeError, ValueError) as error:
        print(f"check: {error}", file=sys.stderr)
        return 2
    print(found)
    return 1 if found.causes else 0
