"""What mkdocs does beside its plugins: formulas and pictures are written into the pages.

Formulas become MathML, which browsers draw without a script or a font. Pictures become part of
their page, where they take its colours. Files of the repository that pages link to are copied.
"""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import griffe
from latex2mathml.converter import convert
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
LINKED = ("examples/*.py", "examples/*.ipynb", "benchmarks/results/*/*")
TWO_SCHEMES = re.compile(
    r'<picture>\s*<source media="\(prefers-color-scheme: dark\)" srcset="([^"]+)">'
    r'\s*<img alt="([^"]*)" src="([^"]+)">\s*</picture>'
)
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
FUNCTION = re.compile(r"(<m[io]>(?:log|exp|min|max|tanh)</m[io]>)")
ROLE = re.compile(r":(?:class|func|meth|attr|mod):`~?([^`]+)`")
ROWS = re.compile(r"<!-- rows: (\S+) -->")
PICTURE = re.compile(r'<p><img alt="([^"]*)" src="[^"]*pictures/([a-z-]+\.svg)" ?/?></p>')


def on_files(files: Any, config: Any) -> Any:
    """The files that pages link to stand under ``repository/`` of the site."""
    for pattern in LINKED:
        for path in sorted(ROOT.glob(pattern)):
            uri = f"repository/{path.relative_to(ROOT).as_posix()}"
            files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in tables, lead links that leave ``docs/`` to the copies, split pictures by scheme."""
    markdown = ROWS.sub(_rows, markdown)
    # A repository's viewer shows ``<picture>``, but the switch of the site's colours cannot reach
    # it: the theme shows one of two images by the end of their addresses.
    markdown = TWO_SCHEMES.sub(r"![\2](\3#only-light)\n![\2](\1#only-dark)", markdown)
    return re.sub(r"\]\(\.\./((?:\.\./)*)(examples|benchmarks)/", r"](\1repository/\2/", markdown)


def on_page_content(html: str, **_: Any) -> str:
    """The page with MathML for TeX, and with the pictures themselves for links to them."""
    return PICTURE.sub(_picture, FORMULA.sub(_formula, html))


def _rows(found: re.Match[str]) -> str:
    """All rows of a file of benchmarks, folded away."""
    path = found.group(1)
    measured = json.loads((ROOT / path).read_text(encoding="utf-8"))
    rows = [row for row in measured["rows"] if row["median_ms"] is not None]
    machine = measured["machine"]["machine"]
    said = f"{machine['cpu']}, {machine['cpu capability (torch)']}, {measured['threads']} threads"
    table = [
        f'??? note "All {len(rows)} rows: {said}, commit {measured["commit"]}"',
        "",
        "| op | setting | contender | ms | speed-up of fusedrl | error | extra MiB |",
        "|---|---|---|--:|--:|--:|--:|",
    ]
    for row in rows:
        names = (str(row[name]).replace("|", "/") for name in ("op", "setting", "contender"))
        figures = (
            f"{row['median_ms']:.3g}",
            "" if row["speedup"] is None else f"{row['speedup']:.2f}",
            "" if row["error"] is None else f"{row['error']:.1e}",
            "" if row["peak_extra_mib"] is None else f"{row['peak_extra_mib']:.1f}",
        )
        table.append(f"| {' | '.join((*names, *figures))} |")
    return "\n    ".join(table)


def _formula(found: re.Match[str]) -> str:
    _, bracket, tex = found.groups()
    block = bracket == "["
    mathml = convert(unescape(tex).strip(), display="block" if block else "inline")
    # A function's name stands apart from its argument.
    mathml = FUNCTION.sub(r'\1<mspace width="0.17em"/>', mathml)
    return f'<span class="formula{" formula-block" * block}">{mathml}</span>'


def _picture(found: re.Match[str]) -> str:
    text, name = found.groups()
    svg = (Path(__file__).parent / "pictures" / name).read_text(encoding="utf-8")
    return f'<figure class="picture-of-page" role="img" aria-label="{text}">{svg}</figure>'


class Docstrings(griffe.Extension):
    """Reads what our docstrings have in another form than the parser of the reference."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """An op is the function, not the module around it."""
        for name, module in pkg["ops"].modules.items():
            if name in module.members and name in pkg.members:
                pkg.set_member(name, griffe.Alias(name, module[name].path, parent=pkg))

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for everything that is read."""
        if obj.docstring:
            text = re.sub(r"(?m)^Example:$", "Examples:", obj.docstring.value)
            text = re.sub(r":math:`([^`]+)`", r"$\1$", text)
            obj.docstring.value = ROLE.sub(_reference, text)


def _reference(found: re.Match[str]) -> str:
    """A link where the reference has the name, and the name alone elsewhere."""
    name = found.group(1)
    title = name.removeprefix("fusedrl.")
    return f'<autoref identifier="{name}" optional><code>{title}</code></autoref>'
