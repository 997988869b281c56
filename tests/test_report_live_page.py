"""The page of a run under way: who may see it, that it follows the run, what of it a reader's choices survive."""

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from report_browser import CHROMIUM, Browser
from report_run import write_hang, write_run

from lockstep.cli.main import main
from lockstep.watching import live_page
from lockstep.watching.live_page import LivePage, LiveServer

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&\x1b]0;name\x07"
SOURCE = str(Path(live_page.__file__).parents[2])


@contextlib.contextmanager
def serving(folder):
    with LiveServer(folder) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(write_run(tmp_path_factory.mktemp("run"), steps=60)) as server:
        yield server


def ask(server, path, method="GET", **headers):
    """The status, the headers and the body of an answer."""
    connection = http.client.HTTPConnection(*server.server_address, timeout=20)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.headers), answer.read().decode()
    finally:
        connection.close()


def test_who_knows_the_address_sees_the_page(server):
    status, headers, text = ask(server, server.path)
    assert status == 200 and "Worker 2 holds everyone up" in text
    assert headers["Cache-Control"] == "no-store" and headers["Referrer-Policy"] == "no-referrer"
    assert headers["Content-Security-Policy"] == "frame-ancestors 'none'"
    version = re.search(r'<body data-version="(\d+)">', text)[1]
    assert ask(server, f"{server.path}?since={version}")[0] == 204
    assert ask(server, f"{server.path}?since=0")[0] == 200


def test_nobody_else_does(server):
    token = server.path.strip("/")
    assert len(token) >= 32 and server.server_address[0] == "127.0.0.1"
    others = ["/", "//", f"/{token[:-1]}/", f"/{token}x/", f"/{token}", f"/{token}/run.json", f"/{token}/../run.json"]
    for path in [*others, "/run.json", "/../etc/passwd", f"/?token={token}", "//["]:
        try:
            status, _, text = ask(server, path)
        except http.client.RemoteDisconnected:  # What is no address at all.
            continue
        assert (status, text) == (404, ""), path
    for host in ("evil.example", f"evil.example:{server.server_address[1]}", "127.0.0.1.evil.example:80", ""):
        assert ask(server, server.path, Host=host)[0] == 403, host
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "HEAD"):
        assert ask(server, server.path, method)[0] == 501
    assert ask(server, server.path, Host="localhost:8000")[0] == 200  # As through ssh -L 8000.


def test_two_servers_have_two_addresses(server, tmp_path):
    with LiveServer(tmp_path) as other:
        assert other.path != server.path


def add_steps(folder, first, last):
    """As the run does: lines at the end, one of them not yet whole."""
    lines = (folder / "steps.jsonl").read_text().splitlines()
    with (folder / "steps.jsonl").open("a") as file:
        for step in range(first, last):
            file.write(json.dumps(json.loads(lines[-1]) | {"step": step}) + "\n")
        file.write('{"step": ')


def test_a_page_is_made_anew_when_the_run_has_gone_on(tmp_path, monkeypatch):
    monkeypatch.setattr(live_page, "_REST", 0.0)
    live = LivePage(tmp_path / "<img src=x>")
    version, text = live.newest()
    assert "Not yet" in text and "&lt;img src=x&gt;" in text and "<img" not in text
    write_run(tmp_path / "<img src=x>", steps=20)
    second, text = live.newest()
    assert second != version and "the last is step 19" in text
    assert live.newest() == (second, text)
    add_steps(tmp_path / "<img src=x>", 20, 25)
    third, text = live.newest()
    assert third not in (version, second) and "the last is step 24" in text and "could not be read" not in text


def test_making_it_takes_a_fifth_of_a_core_at_most(tmp_path, monkeypatch):
    monkeypatch.setattr(live_page, "_REST", 1e6)
    live = LivePage(write_run(tmp_path, steps=20))
    first = live.newest()
    add_steps(tmp_path, 20, 25)
    assert live.newest() == first


def test_the_command_serves_until_it_is_interrupted(tmp_path):
    write_run(tmp_path, steps=20)
    before = sorted(tmp_path.iterdir())
    words = [sys.executable, "-c", "import sys; from lockstep.cli.main import main; sys.exit(main())"]
    environ = {**os.environ, "PYTHONPATH": SOURCE}
    # In a shell's background job SIGINT may be ignored, and that is inherited.
    started = subprocess.Popen(
        [*words, "report", str(tmp_path), "--live"],
        env=environ,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        port, path = re.fullmatch(r"live: http://127\.0\.0\.1:(\d+)(/\S+/)\n", started.stdout.readline()).groups()
        connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=30)
        connection.request("GET", path)
        assert "Worker 2 holds everyone up" in connection.getresponse().read().decode()
        connection.close()
        started.send_signal(signal.SIGINT)
        assert started.wait(30) == 0
    finally:
        started.kill()
        started.communicate()
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--live", "--output", "x"], "--live writes none"),
        (["--port", "80"], "--port is for --live"),
        (["--live", "--port", "99999"], "port 99999"),
    ],
)
def test_what_cannot_be_is_refused(words, part, tmp_path, capsys):
    write_run(tmp_path, steps=2)
    assert main(["report", str(tmp_path), *words]) == 2
    assert part in capsys.readouterr().err


def test_a_terminal_obeys_nothing_that_a_run_has_written(tmp_path, capsys):
    write_run(tmp_path, steps=20, name=HOSTILE)
    assert main(["report", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "<img src=x" in said and "\x1b" not in said and "\x07" not in said


# In a browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if CHROMIUM is None:
        pytest.skip("no Chromium on the PATH")
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


def wait_for(browser, expression):
    give_up = time.monotonic() + 20
    while not browser.value(expression):
        assert time.monotonic() < give_up, expression


def test_it_follows_the_run_and_keeps_what_the_reader_chose(browser, tmp_path, monkeypatch):
    monkeypatch.setattr(live_page, "_REST", 0.0)
    write_run(tmp_path, steps=60)
    with serving(tmp_path) as server:
        browser.show(server.address, 1280)
        browser.value(
            "document.querySelector('#pick').selectedIndex = 2;"
            "document.querySelector('#pick').dispatchEvent(new Event('change'));"
            "document.querySelectorAll('.pick button')[1].click();"
            "document.querySelector('.chart details').open = true; setZoom([10, 20])"
        )
        picked = browser.value("document.querySelector('#pick').value")
        facts = json.loads((tmp_path / "run.json").read_text()) | {"script": HOSTILE, "hosts": [HOSTILE, "b", "c", "d"]}
        (tmp_path / "run.json").write_text(json.dumps(facts))
        write_hang(tmp_path, text=HOSTILE)
        add_steps(tmp_path, 60, 80)
        wait_for(browser, "document.querySelector('.tiles').innerText.includes('the last is step 79')")
        assert browser.value("document.querySelector('h1').textContent") == HOSTILE
        assert HOSTILE in browser.value("document.querySelector('.timeline').textContent")
        assert browser.value("document.querySelectorAll('img, iframe, script:not(#data)').length") == 2
        assert browser.value("[document.querySelector('#pick').value, figure.dataset.step]") == [picked, picked]
        assert browser.value("[zoom, wide, document.querySelector('.chart details').open]") == [[10, 20], 2, True]
        assert browser.value("document.querySelectorAll('.plot canvas').length") == 9
        assert browser.value("drawn.every(each => each.scales.x.min === 10 && each.scales.x.max === 20)")
        assert browser.value("document.querySelector('.live').textContent") == "live"
        assert browser.complaints() == []
        assert all(url.startswith(server.address) for url in browser.requests())
    wait_for(browser, "document.querySelector('.live').textContent.startsWith('no longer live')")


def test_a_run_that_has_not_begun_is_waited_for(browser, tmp_path):
    with serving(tmp_path) as server:
        browser.show(server.address, 375)
        assert browser.value("document.querySelector('h1').textContent") == "Not yet"
        write_run(tmp_path, steps=20)
        wait_for(browser, "document.querySelector('h1')?.textContent === 'train.py'")
        assert browser.value("document.documentElement.scrollWidth") <= 375
        assert browser.complaints() == []
