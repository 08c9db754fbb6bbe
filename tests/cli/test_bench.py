"""`fusedrl bench`: what it reports of answers, errors and peers. Nothing here looks at a time."""

from __future__ import annotations

import importlib
import json
import re
from dataclasses import fields

import pytest
import torch
from programs import python

pytest.importorskip("matplotlib", reason='needs pip install "fusedrl[bench]"')

from fusedrl.benchmarks import (
    bench_exact_kl,
    bench_linear_token_log_probs,
    bench_token_kl,
    harness,
    peers,
)

from fusedrl.cli import bench, main

pytestmark = pytest.mark.heavy

NUMBERS = torch.linspace(0, 1, 1000)


def fails(_):
    raise RuntimeError("no such kernel\nand a long story")


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Benchmarks one made-up case in place of an op's own; returns the exit code and the JSON."""
    monkeypatch.setattr(harness, "copy_bandwidth", lambda device: 2e9)

    def run(contenders=None, *options, **case):
        if contenders is not None:
            made = harness.Case("doubling", "1000", contenders, lambda: NUMBERS, **case)
            monkeypatch.setattr(bench_token_kl, "cases", lambda *_: iter([made]))
        arguments = ["bench", "--op", "token_kl", "--seconds", "0.001", "--out", str(tmp_path)]
        status = main([*arguments, *options])
        return status, json.loads((tmp_path / "bench.json").read_text())

    return run


def double(x):
    return x + x


def exact(x):
    return 2 * x.double()


def rows(results):
    return {row["contender"]: row for row in results["rows"]}


def test_every_column_of_a_right_answer(run, tmp_path, capsys):
    status, results = run(
        {"torch": double, "fusedrl": double},
        timed_only={"product": lambda x: None},
        truth=exact,
        work=8000,
        goals={"torch": 3.0, "product": 0.5},
        least_fraction=0.85,
        most_extra_mib=1.0,
    )
    assert status == 0
    assert {"versions", "machine", "libraries"} <= results["machine"].keys()
    assert results["ceilings"] == {"copy GB/s": 2.0, "definition": harness.COPY_DEFINITION}
    assert {"commit", "threads", "time", "device", "absent", "skipped", "failed"} <= results.keys()
    columns = {field.name for field in fields(harness.Row)}
    assert all(row.keys() == columns for row in results["rows"])
    ours, torchs, product = (rows(results)[name] for name in ("fusedrl", "torch", "product"))
    assert (ours["speedup"], ours["error"], ours["correct"]) == (1.0, 0.0, True)
    assert ours["unit"] == "GB/s"
    assert ours["rate"] == pytest.approx(8000 / ours["median_ms"] / 1e6)
    assert ours["fraction"] == pytest.approx(ours["rate"] / 2.0)
    assert (ours["least_fraction"], ours["most_extra_mib"]) == (0.85, 1.0)
    assert (torchs["goal"], torchs["least_fraction"]) == (3.0, None)
    assert product["error"] is None
    assert (tmp_path / "bench.png").stat().st_size > 1000
    shown = capsys.readouterr().out
    assert "1.00x" in shown
    assert ">=" not in shown and "goal" not in shown, "a goal is the project's own"


@pytest.mark.parametrize(
    "wrong", [lambda x: double(x) + 1e-3, lambda x: double(x) * torch.nan, lambda x: double(x)[1:]]
)
def test_a_wrong_answer_of_ours_is_reported(run, wrong, capsys):
    status, results = run({"torch": double, "fusedrl": wrong}, truth=exact)
    assert status == 1
    assert re.search(r"^\| fusedrl .* (wrong|failed) \|$", capsys.readouterr().out, re.MULTILINE)
    assert rows(results)["fusedrl"]["correct"] is False


def test_a_peer_that_raises_is_reported_and_stops_nothing(run, capsys):
    status, results = run({"peer": fails, "torch": double, "fusedrl": double}, truth=exact)
    assert status == 0
    assert rows(results)["peer"]["failed"] == "RuntimeError: no such kernel"
    assert rows(results)["peer"]["median_ms"] is None
    assert rows(results)["torch"]["median_ms"] > 0
    assert "peer: failed: RuntimeError: no such kernel" in capsys.readouterr().out


def test_ours_that_raises_is_a_failure_and_the_next_of_ours_is_compared(run):
    status, results = run({"torch": double, "fusedrl a": fails, "fusedrl b": double}, truth=exact)
    assert status == 1
    assert rows(results)["fusedrl a"]["correct"] is False
    assert rows(results)["fusedrl b"]["speedup"] == 1.0


def test_an_op_that_does_not_import_leaves_the_others(run, monkeypatch):
    def missing(*_):
        raise ImportError("cannot import name 'exact_kl'")

    monkeypatch.setattr(bench_exact_kl, "cases", missing)
    status, results = run({"fusedrl": double}, "--op", "exact_kl", truth=exact)
    assert status == 1
    assert results["failed"] == {"exact_kl": "ImportError: cannot import name 'exact_kl'"}
    assert rows(results)["fusedrl"]["correct"] is True


def test_what_is_not_installed_is_listed_as_absent(run, monkeypatch, capsys):
    for name in (peers.TORCHRL, peers.LIGER):
        monkeypatch.setitem(peers.MODULES, name, "no_such_module")
    status, results = run(None, "--peers", "--op", "retrieve_kl")
    assert status == 0
    assert results["absent"]["Liger"] == "no_such_module is not installed"
    assert "torchrl" in results["absent"]
    assert results["skipped"].keys() == {"KLComputation", "retrieve_kl"}
    assert results["skipped"]["retrieve_kl"] == "needs torchrl, which cannot be used here"
    assert rows(results).keys() == {"torch", "fusedrl"}
    assert "Liger: absent: no_such_module is not installed" in capsys.readouterr().out


@pytest.mark.parametrize("plots", [False, True], ids=["", "plots"])
def test_an_interrupt_keeps_what_was_measured(run, monkeypatch, capsys, tmp_path, plots):
    def interrupted(x):
        raise KeyboardInterrupt

    cases = [
        harness.Case(op, "1000", {"torch": double, "fusedrl": ours}, lambda: NUMBERS, truth=exact)
        for op, ours in (("doubling", double), ("tripling", interrupted), ("nothing", fails))
    ]
    monkeypatch.setattr(bench_token_kl, "cases", lambda *_: iter(cases))
    status, results = run(None, *(("--plots", str(tmp_path / "plots")) if plots else ()))
    assert status == 130
    assert {row["op"] for row in results["rows"]} == {"doubling"}
    assert results["interrupted"] == "tripling 1000"
    assert results["failed"] == {}
    shown = capsys.readouterr().out
    assert "interrupted during tripling 1000, which is not in the results" in shown
    assert f"wrote {tmp_path / 'bench.json'}" in shown
    assert (tmp_path / "bench.png").is_file()
    assert (tmp_path / "plots" / "doubling-light.svg").is_file() == plots


@pytest.mark.parametrize("option", ["--out", "--plots"])
def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_measured(
    option, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(harness, "copy_bandwidth", fails)
    (tmp_path / "taken").write_text("mine")
    options = {"--out": str(tmp_path / "out")} | {option: str(tmp_path / "taken")}
    assert main(["bench", *(part for pair in options.items() for part in pair)]) == 2
    expected = f"bench: cannot read or write {tmp_path / 'taken'}: File exists; name another file"
    assert capsys.readouterr().err == f"{expected} or folder\n"


def test_a_limit_that_is_over_before_the_first_case_is_a_failure(run):
    status, results = run({"fusedrl": double}, "--limit", "1e-9")
    assert (status, results["rows"]) == (1, [])
    assert results["failed"] == {"remaining settings": "not started: limit of 0 s reached"}


def many(op="doubling"):
    return iter(
        harness.Case(op, str(n), {"fusedrl": double}, lambda: NUMBERS, truth=exact)
        for n in range(5)
    )


def test_a_quick_run_measures_one_setting_of_each_op(run, monkeypatch):
    monkeypatch.setattr(bench_token_kl, "cases", lambda *_: many())
    monkeypatch.setattr(bench_exact_kl, "cases", lambda *_: many("halving"))
    options = ["--op", "exact_kl"]
    status, results = run(None, "--quick", *options)
    assert status == 0
    measured = [(row["op"], row["setting"]) for row in results["rows"]]
    assert measured == [("doubling", "0"), ("halving", "0")]
    assert len(run(None, *options)[1]["rows"]) == 10


def modules():
    """Every benchmark of the folder; those that start processes or train are slow."""
    for name in bench.OPS:
        long = name in (*bench.NOT_QUICK, "channel")
        yield pytest.param(name, marks=pytest.mark.slow if long else ())


@pytest.mark.parametrize("name", modules())
def test_ours_run_in_every_benchmark(name):
    """Once, with the truth, in each op's setting of a quick run; in one setting if slow."""
    module = importlib.import_module(f"fusedrl.benchmarks.bench_{name}")
    usable = set(peers.MODULES) - peers.absent("cpu", False).keys()
    for case in harness.cases_of(module, "cpu", True, usable):
        if isinstance(case, harness.Skipped):
            continue
        ours = [run for who, run in case.contenders.items() if who.startswith(harness.OURS)]
        assert ours
        for run in ours:
            run(case.make_input())
        if case.truth is not None:
            case.truth(case.make_input())
        if name in bench.NOT_QUICK:
            break


@pytest.mark.parametrize("keep", [0.5, 1.0])
def test_the_truth_of_the_linear_ops_equals_autograd_in_float64(monkeypatch, keep):
    module = bench_linear_token_log_probs
    monkeypatch.setattr(module, "CHUNK", 128)
    job = module.make_job("cpu", (2, 8), 16, 300, torch.float64, keep)
    by_torch = torch.nn.functional.linear(job.states(), job.weight).log_softmax(-1)
    by_torch = by_torch.gather(-1, job.targets()[:, None]).squeeze(-1)
    torch.testing.assert_close(module.truth(job), by_torch)

    def path(job):
        logits = torch.nn.functional.linear(job.states(), job.weight)
        return -torch.nn.functional.cross_entropy(logits, job.targets(), reduction="none")

    expected = module.sample_of(module.gradients(path, job))
    torch.testing.assert_close(module.exact_gradients(job), expected)


def test_a_full_disk_keeps_the_last_whole_results(tmp_path):
    """A limit on the size of files ends a write as a full disk does."""
    path = tmp_path / "bench.json"
    done = python("-c", WRITE_TWICE, str(path))
    assert done.stdout == "File too large\n", done.stderr
    assert json.loads(path.read_text())["note"] == "x"
    assert list(tmp_path.iterdir()) == [path]


WRITE_TWICE = """
import resource, sys
from pathlib import Path
from fusedrl.benchmarks.results import Results

path = Path(sys.argv[1])
Results({"note": "x"}).write(path)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, -1))
try:
    Results({"note": "x" * 5000}).write(path)
except OSError as error:
    print(error.strerror)
"""
