"""The command line itself, and the commands that need no model."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from programs import python

import fusedrl
from fusedrl import _host
from fusedrl.cli import COMMANDS, check, main
from fusedrl.ops import _head, cases, token_kl
from fusedrl.ops.cases import OPS, cases_of

from .conftest import pasted


@pytest.mark.heavy
def test_a_wrong_path_is_told_before_what_takes_seconds(tmp_path):
    pytest.importorskip("pyarrow")
    command = [sys.executable, "-X", "importtime", "-m", "fusedrl", "score", "none.jsonl"]
    command += ["--policy", ".", "--reference", ".", "--out", "out"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 2 and "\nscore: chats: cannot read none.jsonl: " in done.stderr
    assert "| torch\n" not in done.stderr and "transformers" not in done.stderr


def test_without_arguments_it_says_what_to_do_next(capsys):
    with pytest.raises(SystemExit) as stopped:
        main([])
    assert stopped.value.code == 0
    out = capsys.readouterr().out
    assert all(f"\n    {command} " in out for command in COMMANDS)
    assert "Start with `fusedrl demo`" in out


@pytest.mark.heavy
@pytest.mark.parametrize(("command", "package"), [("demo", "transformers"), ("score", "pyarrow")])
def test_a_command_does_not_run_without_what_it_needs(command, package, tmp_path):
    (tmp_path / "chats.jsonl").write_text('{"messages": []}\n')
    options = {"score": ["chats.jsonl", "--policy", ".", "--reference", ".", "--out", "out"]}
    arguments = [command, *options.get(command, [])]
    block = f"import os, sys; os.chdir({str(tmp_path)!r}); sys.modules[{package!r}] = None; "
    done = python("-c", block + f"from fusedrl.cli import main; sys.exit(main({arguments}))")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"{command}: needs {package}: pip install ")


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_has_examples_that_parse_and_its_exit_codes(
    command, capsys, tmp_path
):
    module = importlib.import_module(f"fusedrl.cli.{command}")
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out.endswith(f"\n\n{module.EXAMPLES}")
    examples, exit_codes = module.EXAMPLES.split("\n\n")
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    given = [arguments for name, *arguments in pasted(examples, tmp_path) if name == command]
    assert given
    for arguments in given:
        parser.parse_args(arguments)
    codes = [line.split()[0] for line in exit_codes.splitlines()[1:]]
    assert codes == sorted(codes, key=int)
    assert "0" in codes


def test_the_version(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"fusedrl {fusedrl.__version__}\n"


def test_info_json_has_versions_machine_and_libraries(capsys):
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["versions"]["fusedrl"] == fusedrl.__version__
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["machine"]["torch threads"] == torch.get_num_threads()
    assert facts["libraries"]["_C"] == "loaded"


@pytest.mark.heavy
def test_check_passes_every_case_here(capsys):
    assert main(["check", "-v"]) == 0
    out = capsys.readouterr().out
    names = [cells(line)[0] for line in out.splitlines() if line.startswith("| ")]
    assert [name for name in names if not name.startswith("- ")] == ["op on cpu", *OPS]
    assert len(names) - 1 - len(OPS) == 3 * sum(1 for op in OPS for _ in cases_of(op))
    assert " 0 failed" in out


def cells(line):
    """Of a row of a table."""
    return [cell.strip() for cell in line.strip("|").split(" | ")]


@pytest.fixture
def two_ops(monkeypatch):
    """Checks the ops that take no time."""
    monkeypatch.setattr(check, "OPS", TWO)


TWO, COUNTS = ("token_kl", "token_log_probs"), ("pass 24/24", "pass 27/27")


def slightly_wrong(*args, impl, **options):
    found = token_kl(*args, impl=impl, **options)
    right = impl == "reference" or "reward" in options
    return found if right else found._replace(kl=found.kl + 0.1)


def test_check_prints_a_row_an_op_and_a_summary(two_ops, capsys):
    assert main(["check"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [cells(line) for line in lines if line.startswith("| ")]
    assert [(row[0], row[-1]) for row in rows[1:]] == list(zip(TWO, COUNTS, strict=True))
    assert "cpu: 51 passed, 0 failed" in lines


class _Rounded(torch.autograd.Function):
    """Logits whose gradients are rounded, as CUDA kernels write them and as plain torch does."""

    @staticmethod
    def forward(ctx, logits, dtype, factor):
        ctx.dtype, ctx.factor = dtype, factor
        return logits.clone()

    @staticmethod
    def backward(ctx, grad):
        return (ctx.factor * grad).to(ctx.dtype).to(grad.dtype), None, None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factor", [1.0, 1.1])
def test_check_allows_a_head_on_a_gpu_the_rounding_of_its_logits_gradients(
    monkeypatch, dtype, factor
):
    """It makes the errors that were seen on an H200; gradients that are 10 % off fail."""
    evaluate, logits = check._evaluate, _head.scaled_and_capped

    def rounded(x, *options):
        return logits(_Rounded.apply(x, dtype, factor), *options)

    def on_gpu(case, inputs, impl):
        with monkeypatch.context() as patch:
            if impl == "cuda":
                patch.setattr(_head, "scaled_and_capped", rounded)
            return evaluate(case, inputs, "reference")

    monkeypatch.setattr(check, "_evaluate", on_gpu)
    for op in ("linear_token_log_probs", "linear_policy_loss", "linear_exact_kl"):
        for case in cases_of(op):
            result = check._compare(case, dtype, SimpleNamespace(type="cuda"))
            assert not result.failure
            assert (result.excess <= 0) == (factor == 1.0), (op, case.name)


def test_check_fails_when_a_kernel_is_off(monkeypatch, two_ops, capsys):
    monkeypatch.setattr(cases, "token_kl", slightly_wrong)
    assert main(["check"]) == 1
    out = capsys.readouterr().out
    # Four estimators without a reward, in three dtypes; the worst of them is the op's row.
    failed = [cells(line) for line in out.splitlines() if line.startswith("| ") and "FAIL" in line]
    assert (failed[0][0], failed[0][-1], len(failed)) == ("token_kl", "FAIL 12/24", 13)
    assert failed[0][1:-1] in [row[1:-1] for row in failed[1:]]
    assert " 12 failed" in out


@pytest.mark.heavy
def test_check_needs_torch_alone():
    names = ("transformers", "torchrl", "tensordict", "rich")
    block = f"import sys; sys.modules.update(dict.fromkeys({names})); "
    run = "from fusedrl.cli import main; sys.exit(main(['check']))"
    done = python("-c", block + run)
    assert done.returncode == 0, done.stderr


@pytest.mark.heavy
def test_help_names_every_command_and_imports_none_of_them():
    command = [sys.executable, "-X", "importtime", "-m", "fusedrl", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert all(command in done.stdout for command in COMMANDS)
    assert "| torch\n" not in done.stderr and "transformers" not in done.stderr


SCORE = ["score", "c", "--policy", "p", "--reference", "r", "--out", "o"]
OUT_OF_RANGE = {
    **dict.fromkeys(("--temperature=warm", "--rollout-bound=two", "--estimator=k4"), SCORE),
    **dict.fromkeys(("--threads=-3", "--seconds=0", "--limit=-1"), ("bench",)),
}


@pytest.mark.parametrize("option", OUT_OF_RANGE)
def test_an_option_out_of_range_is_refused(option, capsys):
    pytest.importorskip("transformers")
    with pytest.raises(SystemExit) as stopped:
        main([*OUT_OF_RANGE[option], option])
    assert stopped.value.code == 2
    assert f"argument {option.partition('=')[0]}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "option",
    [
        *(f"--temperature={value}" for value in ("0", "-1", "nan", "inf")),
        *("--rollout-bound=0", "--rollout-bound=nan"),
        *("--report-chats=0", "--max-tokens-per-batch=-5", "--context=0"),
    ],
)
def test_a_setting_out_of_range_is_refused(option, capsys):
    pytest.importorskip("pyarrow")
    assert main([*SCORE, option]) == 2
    name = option.partition("=")[0].removeprefix("--").replace("-", "_")
    assert capsys.readouterr().err.startswith(f"score: {name}: expected ")


def test_an_unknown_option_is_refused_by_its_command(capsys):
    pytest.importorskip("pyarrow")
    with pytest.raises(SystemExit) as stopped:
        main([*SCORE, "--estimater", "k1"])
    assert stopped.value.code == 2
    expected = "fusedrl score: error: unrecognized arguments: --estimater k1\n"
    assert capsys.readouterr().err.endswith(expected)


@pytest.mark.heavy
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_output_that_does_not_fit_is_told_in_a_line():
    with Path("/dev/full").open("wb") as full:
        code = "import sys; from fusedrl.cli import main; sys.exit(main())"
        done = python("-c", code, "info", stdout=full)
    told = "info: cannot write the output: No space left on device\n"
    assert (done.stderr, done.returncode) == (told, 2)


@pytest.mark.heavy
@pytest.mark.parametrize(("command", "unbuffered"), [("info", ""), ("info", "1"), ("--help", "")])
def test_output_that_nobody_reads(command, unbuffered, monkeypatch):
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as nobody:
        code = "import sys; from fusedrl.cli import main; sys.exit(main())"
        done = python("-c", code, command, stdout=nobody)
    assert (done.stderr, done.returncode) == ("", 128 + signal.SIGPIPE)


def test_info_says_the_level_of_the_kernels_and_who_chose_it(monkeypatch, capsys):
    levels = _host.cpu_levels()
    told = {
        "": levels[-1],
        "avx1024": "none: FUSEDRL_CPU_LEVEL: expected portable or a level up to",
    }
    for value, expected in (told | {level: level for level in levels}).items():
        monkeypatch.setenv("FUSEDRL_CPU_LEVEL", value)
        main(["info", "--json"])
        libraries = json.loads(capsys.readouterr().out)["libraries"]
        assert libraries["cpu levels"] == ", ".join(levels)
        assert libraries["cpu level"].startswith(expected)
        assert libraries["FUSEDRL_CPU_LEVEL"] == (value or "not set")
