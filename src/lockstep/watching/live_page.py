"""The page of a run while it goes on: served to a browser of this machine, and made anew as the run's folder grows.

What a run says is its owner's, and loopback is open to every user of a machine, and to every page that a browser shows.
So the page has an address that cannot be guessed, is given to requests that name this machine only, may be kept, framed
or referred to by nobody, and nothing else is served: no file is opened by what a request says.
"""

import hmac
import html
import secrets
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from lockstep.errors import UsageError
from lockstep.watching.page import page
from lockstep.watching.run_folder import GENERATIONS, RunFolder
from lockstep.watching.run_report import read_report

HOSTS = {"127.0.0.1", "localhost"}
"""What a request may call this machine: another name that leads here belongs to a page of somebody else's."""

_REST = 4.0
"""A page is made again at the earliest after so many times what making it took: a fifth of a core at most."""

_WAITING = """\
<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="2">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width,initial-scale=1"><title>lockstep report</title>
<link rel="icon" href="data:,"><style>:root {{ color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif }}</style>
</head><body><h1>Not yet</h1><p>{}</p><p>This page tries again by itself.</p></body></html>
"""


class LivePage:
    """The newest page of a run's folder; `newest` may be called from several threads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._seen: object = None
        self._number = 0
        self._page = ""
        self._again_at = 0.0

    def newest(self) -> tuple[str, str]:
        """Its version, and the page; made anew if the folder has changed since, and if that is not too soon."""
        with self._lock:
            there = tuple(self._signs())
            begun = time.monotonic()
            if there != self._seen and begun >= self._again_at:
                self._number += 1
                try:
                    self._page = page(read_report(RunFolder(self._folder)), str(self._number))
                except UsageError as error:  # It has made no step yet, or was begun anew just now.
                    self._page = _WAITING.format(html.escape(str(error)))
                self._seen = there
                self._again_at = time.monotonic() + _REST * (time.monotonic() - begun)
            return str(self._number), self._page

    def _signs(self) -> Iterator[tuple[str, int, int]]:
        """What changes with the files that a report is made of."""
        names = ["run.json", "steps.jsonl", "trace.jsonl", GENERATIONS, "hangs/hang.json"]
        for name in names:
            try:
                facts = (self._folder / name).lstat()
            except OSError:
                continue
            yield name, facts.st_size, facts.st_mtime_ns


class LiveServer(ThreadingHTTPServer):
    """Serves a run's page at `address`, on loopback."""

    daemon_threads = True

    def __init__(self, folder: Path, port: int = 0) -> None:
        """Listen; raises UsageError where the port is taken."""
        self.live_page = LivePage(folder)
        self.path = f"/{secrets.token_urlsafe(24)}/"
        try:
            super().__init__(("127.0.0.1", port), _Request)
        except (OSError, OverflowError) as error:
            raise UsageError(
                f"port {port} of this machine cannot be listened on ({error}): give another --port."
            ) from error

    @property
    def address(self) -> str:
        """What a browser is to be given; whoever has it can see the run."""
        return f"http://127.0.0.1:{self.server_address[1]}{self.path}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away in the middle of an answer is no news."""


class _Request(BaseHTTPRequestHandler):
    server: LiveServer
    timeout = 10
    """Seconds without a word from a browser."""

    def do_GET(self) -> None:
        """The page; nothing, if the browser has this version already."""
        asked = urlsplit(self.path)
        if self.headers.get("Host", "").rpartition(":")[0] not in HOSTS:
            self._answer(403)
        elif not hmac.compare_digest(asked.path.encode(), self.server.path.encode()):
            self._answer(404)
        else:
            version, text = self.server.live_page.newest()
            if parse_qs(asked.query).get("since") == [version]:
                self._answer(204)
            else:
                self._answer(200, text.encode())

    def _answer(self, status: int, content: bytes = b"") -> None:
        self.send_response(status)
        headers = {
            "Content-Type": "text/html; charset=utf-8",
            "Content-Length": str(len(content)),
            "Content-Security-Policy": "frame-ancestors 'none'",
            "Cache-Control": "no-store",
            "Cross-Origin-Opener-Policy": "same-origin",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def version_string(self) -> str:
        """What serves is nobody's business."""
        return "lockstep"

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged: their addresses hold the secret."""
