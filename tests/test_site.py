"""The documentation site: it builds without a warning, and a browser shows all of it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from browser import CHROMIUM, chromium

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(p.relative_to(DOCS).with_suffix(".html").as_posix() for p in DOCS.rglob("*.md"))
NEEDS = ("mkdocs", "material", "mkdocstrings", "latex2mathml", "ruff")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(importlib.util.find_spec(name) for name in NEEDS), reason="needs fusedrl[docs]"
    ),
    pytest.mark.skipif(
        CHROMIUM is None, reason="no chromium or google-chrome on PATH to open the site with"
    ),
]


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def site(folder):
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("profile")) as tab:
        yield tab


@pytest.mark.parametrize("page", PAGES)
def test_a_browser_shows_the_page(site, tab, page):
    """Without an error, with every image, and from nowhere else than the site itself."""
    tab.problems.clear()
    tab.requests.clear()
    tab.open(f"{site}/{page}")
    drawn = "i => i.complete && i.naturalWidth > 0"
    assert tab.run(f"[...document.images].filter(i => !({drawn})(i)).map(i => i.src)") == []
    assert tab.problems == []
    asked = {url for url in tab.requests if not url.startswith(("data:", "blob:", "about:"))}
    assert asked and all(url.startswith(site + "/") for url in asked), asked


@pytest.mark.parametrize("where", ["server", "folder"])
def test_search_finds_a_name(site, folder, tab, where):
    root = site if where == "server" else folder.as_uri()
    tab.problems.clear()
    tab.open(f"{root}/index.html")
    found = tab.run(
        """new Promise((done) => {
          const input = document.querySelector("input[name=query]");
          document.querySelector("label[for=__search]").click();
          const look = setInterval(() => {
            input.focus(); input.value = "token_log_probs";
            input.dispatchEvent(new KeyboardEvent("keyup"));
            input.dispatchEvent(new Event("input"));
            const hit = document.querySelector(".md-search-result__link");
            if (hit) { clearInterval(look); done(hit.href); }
          }, 100);
          setTimeout(() => { clearInterval(look); done(""); }, 30000);
        })"""
    )
    assert found.startswith(root) and tab.problems == []
