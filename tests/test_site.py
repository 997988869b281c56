"""The documentation: the site builds, its search finds, links lead somewhere, commands in it are commands."""

import functools
import http.server
import importlib
import os
import re
import shlex
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from report_browser import CHROMIUM, Browser

import lockstep
from lockstep.cli.main import COMMANDS, make_parser
from lockstep.play.page import page as playground

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
FRONT = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder that the one command makes."""
    pytest.importorskip("material", reason="mkdocs-material is not installed: pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_every_name_and_every_option_is_in_the_reference(site):
    names, commands = ((site / page).read_text() for page in ("api.html", "commands.html"))
    for name in lockstep.__all__:
        assert f'id="lockstep{name.lower()}"' in names, name
    for command in COMMANDS:
        assert f'id="lockstep-{command}"' in commands, command
    for method in (
        "Trainer.step",
        "DataParallel.no_sync",
        "World.mean",
        "SyncBatchNorm.convert",
        "ShardedLoader.set_epoch",
        "StepResult.grad_norm",
    ):
        assert f'id="{method.lower().replace(".", "")}"' in names, method
    assert "go_on_from_progress" not in names
    assert "<code>rank</code></strong>: This worker" in names


def test_the_playground_is_part_of_the_site(site):
    assert (site / "playground.html").read_text() == playground()
    assert 'href="playground.html"' in (site / "play.html").read_text()


def test_pages_ask_nobody_for_anything(site):
    for page in site.rglob("*.html"):
        for tag in re.findall(r"<(?:script|link|img|iframe|source|use)\b[^>]*>", page.read_text()):
            address = re.search(r'(?:src|href)="?((?:https?:)?//[^" >]+)', tag)
            assert address is None or 'rel="canonical"' in tag, (page.name, tag)


def test_the_navigation_names_what_there_is():
    named = set(re.findall(r": (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    written = {path.name for path in (ROOT / "docs").glob("*.md")}
    made = {"api.md", "commands.md", "changes.md", "contributing.md"}
    assert named == written | made


# Search, in the browser that readers have


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if CHROMIUM is None:
        pytest.skip("no Chromium on the PATH")
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def served(site, browser):
    """The browser, at the first page of the site."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    browser.show(f"http://127.0.0.1:{server.server_port}/index.html", 1280)
    yield browser
    server.shutdown()
    server.server_close()


FOUND = """
(words => new Promise(done => {
  const input = document.querySelector('.md-search__input'), list = document.querySelector('.md-search-result__list');
  const say = field => ['input', 'keyup'].forEach(kind => field.dispatchEvent(new Event(kind, {bubbles: true})));
  const first = () => list.querySelector('a[href*="?h="]');
  new MutationObserver((changes, observer) => {
    if (!input.value && !first()) { input.value = words; say(input) }
    else if (input.value && first()) { observer.disconnect(); done(first().pathname.split('/').pop()) }
  }).observe(list, {childList: true, subtree: true});
  input.focus();
  input.value = first() ? '' : words;
  say(input);
}))
"""
"""The page that the search of the site puts first; a search before it is taken back, and its results go."""


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("deepspeed", "coming_from.html"),
        ("hang", "hangs.html"),
        ("out of memory", "model_does_not_fit.html"),
        ("uneven", "sharding.html"),
        ("slurm", "hosts.html"),
        ("bit identical", "trainer.html"),
        ("learning rate", "learning_rate.html"),
        ("batch norm", "batch_norm.html"),
    ],
)
def test_search_puts_the_right_page_first(served, words, page):
    assert served.value(f"{FOUND}({words!r})") == page
    assert served.complaints() == []
    assert all(address.startswith("http://127.0.0.1:") for address in served.requests())


def test_search_works_where_pages_are_opened_as_files(browser, site):
    browser.show(site / "index.html", 1280)
    assert browser.value(f"{FOUND}('slurm')") == "hosts.html"
    assert browser.complaints() == []
    assert all(address.startswith("file:///") for address in browser.requests())


# Links and commands, as GitHub shows them


def prose(path):
    return re.sub(r"^( *)```.*?^\1```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(path):
    """What GitHub makes of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", prose(path), re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", FRONT, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    made = {"api.md", "commands.md", "changes.md", "contributing.md", "playground.html"}
    folder = ROOT if page == README else page.parent
    for target in re.findall(r"!?\[[^]]*\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"https?:", target) or target in made:
            continue
        name, _, anchor = target.partition("#")
        path = (folder / name).resolve() if name else page
        assert path.exists(), f"{page.name}: {target}: no such file"
        assert not anchor or anchor in anchors(path), f"{page.name}: {target}: no such heading"


def test_the_readme_is_one_that_people_read_and_ci_finds_its_commands_in():
    text = README.read_text()
    assert text.count("\n") <= 120
    for mark, ending in (("demo", "lockstep demo"), ("test", "python check.py")):
        block = re.search(rf"<!-- {mark} -->\n```bash\n(.*)\n```\n", text)
        assert block is not None and block[1].endswith(ending)


def commands_of(page):
    """The `lockstep` commands in a page's blocks, as lists of words; those with a placeholder are left out."""
    for kind, block in re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines() if kind in ("", "bash", "console", "text") else ():
            for part in re.split(r"[;&|]+", line.partition(" #")[0]):
                words = part.strip().removeprefix("$ ")
                if re.match(r"lockstep [a-z]+( |$)", words) and not re.search(r"\[|\.\.\.|\b[A-Z]\b|\{|\"\$", words):
                    yield shlex.split(words)[1:]


def test_commands_of_the_docs_are_commands(capsys):
    parser = make_parser([importlib.import_module(f"lockstep.cli.{name}") for name in COMMANDS])
    found = [(page.name, words) for page in FRONT for words in commands_of(page)]
    assert len(found) > 30
    for name, words in found:
        try:
            parser.parse_args(words)
        except SystemExit:
            pytest.fail(f"{name}: lockstep {shlex.join(words)}: {capsys.readouterr().err}")
