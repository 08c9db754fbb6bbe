"""Two tiny models on disk, made as the demo makes them but hardly trained, and a way to score."""

from __future__ import annotations

import csv
import io
import json
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
from one_thread import one_thread

from fusedrl.cli import main

__all__ = ["one_thread"]


class Models(NamedTuple):
    policy: str
    reference: str


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Models:
    demo = pytest.importorskip("fusedrl.demo", reason='needs pip install "fusedrl[score]"')
    folder = tmp_path_factory.mktemp("models")
    for name, steps in (("reference", 4), ("policy", 8)):
        demo.make_reference(folder / name, steps=steps)
    return Models(str(folder / "policy"), str(folder / "reference"))


@pytest.fixture
def tokenizer(models):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(models.policy)


@pytest.fixture
def write_chats(tmp_path):
    """Writes rows to a JSONL file; a ``str`` or ``bytes`` row goes in as it is."""

    def write(*rows) -> Path:
        path = tmp_path / "chats.jsonl"
        lines = [row if isinstance(row, str | bytes) else json.dumps(row) for row in rows]
        path.write_bytes(b"".join((x.encode() if isinstance(x, str) else x) + b"\n" for x in lines))
        return path

    return write


@pytest.fixture
def score(models, tmp_path):
    """Runs `fusedrl score` in this process; returns its exit code and the output directory."""

    def run(*arguments, policy=models.policy, reference=models.reference):
        out = tmp_path / "out"
        pair = ["--policy", str(policy), "--reference", str(reference)]
        return main(["score", *map(str, arguments), *pair, "--out", str(out)]), out

    return run


def chat(*turns: str, system: str | None = None) -> dict:
    """A row from alternating user and assistant turns."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    roles = ("user", "assistant")
    messages += [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
    return {"messages": messages}


def user(text):
    return [{"role": "user", "content": text}]


def assistant(text):
    return [{"role": "assistant", "content": text}]


def sharegpt(row):
    words = {"user": "human", "assistant": "gpt"}
    turns = [{"from": words[m["role"]], "value": m["content"]} for m in row["messages"]]
    return {"conversations": turns}


def lines(found):
    return "\n".join(map(json.dumps, found)).encode()


def sheet(found):
    file = io.StringIO()
    writer = csv.DictWriter(file, list(found[0]))
    writer.writeheader()
    writer.writerows(found)
    return file.getvalue().encode("utf-8-sig")


def rows(path: Path) -> list[dict]:
    """The rows of a Parquet file."""
    from pyarrow import parquet

    with path.open("rb") as file:  # pyarrow takes no path that is not UTF-8
        return parquet.read_table(file).to_pylist()


def pasted(examples, folder):
    """The arguments of each ``fusedrl`` in examples that a shell is given as they stand."""
    heading, _, lines = examples.partition("\n")
    assert heading == "examples:"
    script = f"fusedrl() {{ printf '%s\\0' \"$@\"; printf '\\n\\0'; }}\n{lines}"
    done = subprocess.run(
        ["bash", "-eu", "-c", script], cwd=folder, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return [command.split("\0")[:-1] for command in done.stdout.split("\n\0") if command]
