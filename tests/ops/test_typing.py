"""What type checkers make of the ops: pyright reads a program that states each answer's type."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
from torch import Tensor
from torch.distributed import ProcessGroup
from typing_extensions import assert_type

from fusedrl import (
    ExactKL, TokenKL, TokenLogProbs, VocabPart, exact_kl, linear_exact_kl,
    linear_token_log_probs, token_kl, token_log_probs,
)


def types(x: Tensor, xs: list[Tensor], group: ProcessGroup, flag: bool) -> None:
    assert_type(token_kl(x, x), Tensor)
    assert_type(token_kl(x, x, x, estimator="k3", offsets=x), Tensor)
    assert_type(token_kl(x, x, reward=x, coeff=0.1), TokenKL)
    assert_type(token_kl(x, x, reward=x).kl, Tensor)
    assert_type(token_kl(xs, xs), list[Tensor])
    assert_type(token_kl(xs, xs, reward=x), TokenKL[list[Tensor]])
    assert_type(token_kl(xs, xs, reward=x).kl, list[Tensor])
    assert_type(token_log_probs(x, x, shift=True), Tensor)
    assert_type(token_log_probs(x, x, entropy=True), TokenLogProbs)
    assert_type(token_log_probs(x, x, entropy=flag), Tensor | TokenLogProbs)
    assert_type(linear_token_log_probs(x, x, x, shift=True), Tensor)
    assert_type(linear_token_log_probs(x, x, x, bias=x, entropy=True), TokenLogProbs)
    assert_type(linear_token_log_probs(x, x, x, vocab_offset=3), VocabPart)
    assert_type(linear_token_log_probs(x, x, x, vocab_offset=3, vocab_group=group), Tensor)
    assert_type(exact_kl(x, x, direction="forward"), Tensor)
    assert_type(exact_kl(x, x, entropy=True), ExactKL)
    assert_type(linear_exact_kl(x, x, x, x, ref_bias=x), Tensor)
    assert_type(linear_exact_kl(x, x, x, x, entropy=True).entropy, Tensor)
"""
WRONG = ["token_kl(x, x, estimater='k3')", "linear_token_log_probs(x, x, x, shfit=True)"]


def test_every_answer_has_its_type_and_no_option_is_misspelled(tmp_path):
    pytest.importorskip("pyright")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM + "".join(f"    {call}\n" for call in WRONG))
    settings = '{"extraPaths": ["%s"], "typeCheckingMode": "basic", "pythonVersion": "3.10"}'
    (tmp_path / "pyrightconfig.json").write_text(settings % (ROOT / "python"))
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--project"]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, check=False)
    wrong = [line for line in done.stdout.splitlines() if " - error: " in line]
    first = 1 + PROGRAM.count("\n")
    assert [int(line.split(":")[1]) for line in wrong] == [first, first + 1], done.stdout
