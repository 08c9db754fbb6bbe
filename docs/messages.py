"""Every message of an error, read from the sources of the package."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# Reasons that another message is made of, and what that means for the user.
REASONS = {
    "ArgumentTypeError": "the command names the option",
    "CannotFuse": "a warning: torchrl computes the loss from all logits",
    "CannotSplit": "a warning: log-probs are computed from all logits, which is slower",
    "ChatError": "the chat is skipped: correct its line, or leave it out",
    "NotPlanned": "a note in the log: TRL computes the loss",
    "Unknown": "pass a chat template with generation markers",
}

# What makes an error in C++, and a string literal there.
MADE = re.compile(
    r"\b(?:check|FUSEDRL_DEVICE_CHECK|std::\w+_error|std::invalid_argument|Damaged)\("
)
LITERAL = re.compile(r'"((?:[^"\\]|\\.)*)"')
CONDITION = re.compile(r"^\{\w+\}(?=\w)")  # before the message of a check
ANOTHER = re.compile(r"\{\.\.\.\}(?=[\w ]+: expected )")  # the other one of two


class Message(NamedTuple):
    """What is said, with ``{...}`` for a value that is filled in.

    ``error`` is the class of the error, empty where the text is made apart from it.
    """

    path: Path
    line: int
    error: str
    text: str

    @property
    def has_remedy(self) -> bool:
        """Whether it says what to do, behind a semicolon."""
        return "; " in self.text


def messages_of(package: Path) -> list[Message]:
    """The messages of all modules, with the texts of constants that they share."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in package.rglob("*.py")}
    shared = {name: text for tree in trees.values() for name, text in _constants(tree)}
    return [
        message
        for path, tree in sorted(trees.items())
        for message in _messages_in(path, tree, shared | dict(_constants(tree)))
    ]


def compiled_messages(sources: Path) -> list[Message]:
    """The whole messages of errors in C++ and CUDA, each with a remedy."""
    found: list[Message] = []
    for path in sorted(sources.rglob("*")):
        if path.suffix in (".h", ".cpp", ".cu"):
            code = path.read_text(encoding="utf-8")
            for made in MADE.finditer(code):
                line = code.count("\n", 0, made.start()) + 1
                for text in ANOTHER.split(_joined(code[made.end() :])):
                    message = Message(path, line, "", CONDITION.sub("", text))
                    if ": expected " in text and message.has_remedy:
                        found.append(message)
    return found


def _joined(code: str) -> str:
    """The string literals of a call's arguments, and what stands between them as values."""
    pieces, end, depth = [], 0, 1
    for found in re.finditer(rf"{LITERAL.pattern}|[()]", code):
        depth += {"(": 1, ")": -1}.get(found[0], 0)
        if found[1] is not None:
            between = code[end : found.start()].strip(" \n,+<")
            named = re.search(r"(?:^|,)\s*(\w+)$", between)
            if between and (pieces or named):
                pieces.append("{" + (named[1] if named else "...") + "}")
            pieces.append(found[1].replace('\\"', '"'))
            end = found.end()
        if depth == 0:
            break
    return "".join(pieces)


def _constants(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """The strings of a module under names in capitals."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            name, text = getattr(node.targets[0], "id", ""), node.value.value
            if name.isupper() and isinstance(text, str):
                yield name, text


def _messages_in(path: Path, tree: ast.Module, constants: dict[str, str]) -> Iterator[Message]:
    """What the errors of a module say, and whole messages that stand apart from their error."""
    seen: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise | ast.Return):
            call = node.exc if isinstance(node, ast.Raise) else node.value
            if isinstance(call, ast.Call) and (name := _error_of(call)) and call.args:
                seen.update(map(id, ast.walk(call.args[-1])))
                if text := _text(call.args[-1], constants):
                    yield Message(path, node.lineno, name, text)
    for node in ast.walk(tree):
        if id(node) in seen or not isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp):
            continue
        message = Message(path, node.lineno, "", _text(node, constants))
        seen.update(map(id, ast.walk(node)))
        if re.match(r"[\w.{} ]+: expected [^`\n]+$", message.text) and message.has_remedy:
            yield message


def _error_of(call: ast.Call) -> str:
    """The class of an exception that is made, or nothing."""
    name = getattr(call.func, "id", getattr(call.func, "attr", ""))
    return name if name in REASONS or name.endswith(("Error", "Died")) else ""


def _text(node: ast.expr, constants: dict[str, str]) -> str:
    """The words of an expression of strings; nothing of one that is none."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_piece(piece, constants) for piece in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _text(node.left, constants), _text(node.right, constants)
        return left + (right or "{...}") if left else ""
    if isinstance(node, ast.IfExp):
        return _text(node.body, constants) or _text(node.orelse, constants)
    return _constant(node, constants)


def _constant(node: ast.expr, constants: dict[str, str]) -> str:
    return constants.get(getattr(node, "id", getattr(node, "attr", "")), "")


def _piece(node: ast.expr, constants: dict[str, str]) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    value = getattr(node, "value", node)
    if text := _constant(value, constants):
        return text
    named = [x.id for x in ast.walk(value) if isinstance(x, ast.Name)]
    named += [x.attr for x in ast.walk(value) if isinstance(x, ast.Attribute)]
    return "{" + (named[-1].strip("_").replace("_", " ").lower() if named else "...") + "}"
