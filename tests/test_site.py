"""The documentation site: it builds without a warning, and a browser shows all of it."""

from __future__ import annotations

import importlib.util
import re
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


@pytest.mark.parametrize("page", PAGES)
def test_no_code_is_cut(site, tab, page):
    """Signatures neither, on a screen of 1400 pixels."""
    tab.resize(1400, 900)
    tab.open(f"{site}/{page}")
    code = "[...document.querySelectorAll('article pre code')]"
    assert tab.run(f"{code}.filter(c => c.scrollWidth > c.clientWidth).map(c => c.innerText)") == []


WITH_FORMULAS = [page for page in PAGES if "$" in (DOCS / page).with_suffix(".md").read_text()]
TEX = r"/\\[(\[]|\\(frac|sum|log)|\$[^$ ]/g"


@pytest.mark.parametrize("page", WITH_FORMULAS)
def test_formulas_are_drawn(site, tab, page):
    tab.open(f"{site}/{page}")
    formulas = "[...document.querySelectorAll('.formula math')]"
    widths = tab.run(f"{formulas}.map(m => m.getBoundingClientRect().width)")
    assert widths and all(width > 0 for width in widths)
    assert tab.run(f"document.querySelector('article').innerText.match({TEX})") is None


PICTURES = sorted(path.name for path in (DOCS / "pictures").glob("*.svg"))


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_stand_in_their_pages(site, tab, name):
    (page,) = [p for p in DOCS.rglob("*.md") if f"pictures/{name}" in p.read_text()]
    tab.open(f"{site}/{page.relative_to(DOCS).with_suffix('.html').as_posix()}")
    box = "document.querySelector('figure svg.picture').getBoundingClientRect()"
    assert tab.run(f"{box}.width") > 500
    assert tab.run("document.querySelector('figure').getAttribute('aria-label').length") > 20


def test_colours_follow_the_system_and_the_switch(site, tmp_path):
    """In a browser of its own, which remembers what was switched to."""
    with chromium(tmp_path) as tab:
        tab.open(f"{site}/how-it-works/rows.html", "light")
        page, paper = colours(tab)
        assert page > 200
        tab.open(f"{site}/how-it-works/rows.html", "dark")
        dark_page, dark_paper = colours(tab)
        assert dark_page < 80 and dark_paper < paper - 50
        tab.run("document.querySelector('label[for=__palette_1]').click()")  # to the light ones
        assert colours(tab) == (page, paper)


def colours(tab):
    """How bright the page is, and how bright the paper of its picture."""
    page = tab.run("getComputedStyle(document.body).backgroundColor")
    paper = tab.run("getComputedStyle(document.querySelector('.kept')).fill")
    return brightness(page), brightness(paper)


def brightness(colour):
    return sum(float(part) for part in re.findall(r"[\d.]+", colour)[:3]) / 3


WITH_SCHEMES = [
    page for page in PAGES if "<picture>" in (DOCS / page).with_suffix(".md").read_text()
]


@pytest.mark.parametrize("page", WITH_SCHEMES)
def test_each_picture_is_shown_once_in_the_colours_of_the_page(site, tmp_path, page):
    """In those of the system, and in those that a reader switches to."""
    pictures = (DOCS / page).with_suffix(".md").read_text().count("<picture>")
    with chromium(tmp_path) as tab:
        for scheme in ("light", "dark"):
            tab.open(f"{site}/{page}", scheme)
            assert set(endings(shown(tab), pictures)) == {scheme}
        tab.run("document.querySelector('label[for=__palette_1]').click()")  # to the light ones
        assert set(endings(shown(tab), pictures)) == {"light"}


def shown(tab):
    """The addresses of the images that take up room."""
    images = "[...document.querySelectorAll('article img')]"
    return tab.run(f"{images}.filter(i => i.offsetWidth).map(i => i.src)")


def endings(addresses, count):
    assert len(addresses) == count
    return [re.search(r"-(light|dark)\.\w+#", address)[1] for address in addresses]


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
