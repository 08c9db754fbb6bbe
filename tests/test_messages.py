"""What errors say: each names a remedy, and the documentation lists each."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "python" / "fusedrl"


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


sources = load(ROOT / "docs" / "messages.py")
# Read the description of a channel; whoever calls them says what to do with one that is damaged.
OF_DESCRIPTIONS = {
    "layout.py",
    "lora_adapters.py",
}


def test_every_error_says_what_to_do():
    found = sources.messages_of(PACKAGE)
    assert len(found) > 500
    without = [
        f"{m.path.relative_to(ROOT)}:{m.line}: {m.text}"
        for m in found
        if not m.has_remedy
        and m.error not in sources.REASONS
        and not (m.path.name in OF_DESCRIPTIONS and "expected " in m.text)
    ]
    # Python's own sentence, and a key that makes a line unreadable, which the next error names.
    assert len(sources.compiled_messages(ROOT / "csrc")) > 20
    allowed = ("' has no attribute {name}", "the key {twice} stands twice")
    assert [line for line in without if not any(text in line for text in allowed)] == []


MODULE = '''
REMEDY = "y: expected b, got c; pass b"
LIST = f"{name}: expected b, got {got}"  # a line of a list, without a remedy of its own

def one(x):
    """x: expected prose, got prose; a docstring like any other

    It goes on."""
    raise ValueError(f"x: expected 1, got {x.some_thing!r}; "
                     + ("pass 1" if x else "pass 2"))

def two(error):
    return TimeoutError("timeout: expected an answer, got none; raise it")

def three():
    raise errors.WorkerDied("worker: expected life, got none" + more)
    raise NotPlanned("it is compiled")
    raise wrapped(error)
    raise OSError(f"z: expected 1, got {i}; {shared.AGAIN}")
'''


def test_messages_are_found_wherever_they_stand(tmp_path):
    (tmp_path / "module.py").write_text(MODULE)
    (tmp_path / "shared.py").write_text("AGAIN = 'make it again'")
    found = {(m.error, m.text, m.has_remedy) for m in sources.messages_of(tmp_path)}
    assert found == {
        ("", "y: expected b, got c; pass b", True),
        ("ValueError", "x: expected 1, got {some thing}; pass 1", True),
        ("TimeoutError", "timeout: expected an answer, got none; raise it", True),
        ("WorkerDied", "worker: expected life, got none{...}", False),
        ("NotPlanned", "it is compiled", False),
        ("OSError", "z: expected 1, got {i}; make it again", True),
    }


COMPILED = """
  check(valid, "offsets: expected values from 0 to ", tokens, ", got others; "
        "pass others");
  check(fits(a, b), name, ": expected \\"x\\", got ", got(s), "; pass x");
  check(error == 0, what, ": ", text(error));
  throw std::runtime_error(closed ? "a: expected one, got none; make one"
                                  : "b: expected 1, got " + std::to_string(n) + "; pass 1");
"""


def test_messages_of_compiled_code_are_found(tmp_path):
    (tmp_path / "code.cpp").write_text(COMPILED)
    assert [(m.line, m.text) for m in sources.compiled_messages(tmp_path)] == [
        (2, "offsets: expected values from 0 to {tokens}, got others; pass others"),
        (4, '{name}: expected "x", got {...}; pass x'),
        (6, "a: expected one, got none; make one"),
        (6, "b: expected 1, got {...}; pass 1"),
    ]
