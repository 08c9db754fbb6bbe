"""What the documentation shows of vLLM runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import vllm
from shown import assert_prints, texts
from tiny_engines import OPTIONS, tiny_model

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def test_the_page_runs(tmp_path, monkeypatch, capsys):
    class Small(vllm.LLM):
        def __init__(self, *args, **options):
            super().__init__(*args, **{**OPTIONS, **options})

    page = ROOT / "docs/tutorials/weights-into-vllm.md"
    [block] = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    tiny_model(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(vllm, "LLM", Small)
    exec(compile(block, page, "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    assert "version='default', start=0, end=8" in printed
    assert "version='1', start=0, end=8" in printed


@pytest.mark.parametrize("example", ["vllm_grpo.py"])
def test_the_example_runs(example, tmp_path):
    program = [sys.executable, str(ROOT / "examples" / example), "2"]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ours = [line for line in done.stdout.splitlines(True) if line.startswith("weights")]
    assert_prints(texts(ROOT / "docs/tutorials/weights-into-vllm.md", "console"), "".join(ours))
