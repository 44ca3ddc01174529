"""A small server for the page: loopback only, a fixed set of files read beforehand, every question validated."""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import re
import socketserver
import sys
from http import HTTPStatus
from typing import Any

from tilewise.errors import InvalidProblem, TilewiseError
from tilewise.explorer.page import assets, chapter_names, exported_page, served_page
from tilewise.explorer.questions import plan_of, question_of

__all__ = ["LOOPBACK", "ExplorerServer"]

LOOPBACK = "127.0.0.1"
# Ten numbers and names take 300 bytes.
LONGEST_QUESTION = 4096
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
INLINE = re.compile(r'<script type="importmap">(.*?)</script>', re.DOTALL)


class ExplorerServer(socketserver.ThreadingMixIn, http.server.HTTPServer):
    """Serves the explorer on 127.0.0.1; port 0 takes any free one. `url` says where, `shutdown` ends it.

    Files are read once, here: a request can name one of them and nothing else.
    """

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        files = assets()
        page = served_page(files)
        self.replies = {f"/{path}": _encoded(path, text) for path, text in files.items()}
        self.replies["/"] = self.replies["/index.html"] = _encoded("index.html", page)
        self.chapters = {f"/export/{name}.html": name for name in chapter_names()}
        self.policy = _content_policy(page)
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except (OSError, OverflowError) as error:
            fix = "Choose another port; 0 takes any that is free."
            raise InvalidProblem("port", "one that is free", f"{port} ({error})", fix) from error

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a browser that closes the connection during an answer; show every other error."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    @property
    def port(self) -> int:
        """The port that was taken."""
        return int(self.server_address[1])

    @property
    def url(self) -> str:
        """Where a browser finds the page."""
        return f"http://{LOOPBACK}:{self.port}/"

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names under which a browser on this machine asks; any other came by a rebound name."""
        return tuple(f"{name}:{self.port}" for name in (LOOPBACK, "localhost"))


def _encoded(path: str, text: str) -> tuple[str, bytes]:
    return f"{TYPES[path.rpartition('.')[2]]}; charset=utf-8", text.encode()


def _content_policy(page: str) -> str:
    """Nothing but the page's own files; the one inline script, the import map, is named by its hash."""
    found = INLINE.search(page)
    digest = base64.b64encode(hashlib.sha256((found[1] if found else "").encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'self' 'sha256-{digest}'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


class _Refusal(Exception):
    """A request that gets an error status and one sentence."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Handler(http.server.BaseHTTPRequestHandler):
    """One request. Silent: a page of thirty files would fill the terminal that shows how to stop."""

    server: ExplorerServer
    protocol_version = "HTTP/1.1"
    timeout = 10
    # Headers and body leave together and at once: forty files without forty waits for an acknowledgement.
    wbufsize = 1 << 16
    disable_nagle_algorithm = True
    server_version = "tilewise"
    sys_version = ""

    def do_GET(self) -> None:
        """A file of the page."""
        self._answer(self._file)

    def do_HEAD(self) -> None:
        """The headers of a file."""
        self._answer(self._file)

    def do_POST(self) -> None:
        """A question."""
        self._answer(self._plan)

    def _answer(self, respond: Any) -> None:
        try:
            self._check_origin()
            kind, body = respond()
            self._send(HTTPStatus.OK, kind, body)
        except _Refusal as refusal:
            # What the client may still be sending was not read: this connection is of no further use.
            self.close_connection = True
            self._send(refusal.status, *_as_json({"error": str(refusal)}))
        except TilewiseError as error:
            self._send(HTTPStatus.BAD_REQUEST, *_as_json({"error": str(error)}))

    def _check_origin(self) -> None:
        if self.headers.get("Host") not in self.server.hosts:
            raise _Refusal(HTTPStatus.FORBIDDEN, f"This server answers to {self.server.url} only.")
        origin = self.headers.get("Origin")
        if origin is not None and origin not in {f"http://{host}" for host in self.server.hosts}:
            raise _Refusal(HTTPStatus.FORBIDDEN, "This server answers to its own page only.")

    def _path(self) -> str:
        """What is asked for, literally: a path is looked up, never resolved."""
        return self.path.partition("?")[0]

    def _file(self) -> tuple[str, bytes]:
        chapter = self.server.chapters.get(self._path())
        if chapter is not None:
            return _encoded("chapter.html", exported_page(chapter))
        reply = self.server.replies.get(self._path())
        if reply is None:
            raise _Refusal(HTTPStatus.NOT_FOUND, "There is no such file.")
        return reply

    def _plan(self) -> tuple[str, bytes]:
        if self._path() != "/api/plan":
            raise _Refusal(HTTPStatus.NOT_FOUND, "Questions go to /api/plan.")
        if self.headers.get_content_type() != "application/json":
            raise _Refusal(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "A question is sent as application/json.")
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            raise _Refusal(HTTPStatus.LENGTH_REQUIRED, "A question comes with its Content-Length.")
        # Digits first: Python refuses to read a number of thousands of them.
        if len(length) > len(str(LONGEST_QUESTION)) or int(length) > LONGEST_QUESTION:
            raise _Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"A question has at most {LONGEST_QUESTION} bytes.")
        return _as_json(plan_of(question_of(_parsed(self.rfile.read(int(length))))).to_dict())

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", self.server.policy)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Nothing is logged."""


def _parsed(body: bytes) -> object:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidProblem("question", "JSON", str(error)[:80], "Send the fields of the form.") from error


def _as_json(value: Any) -> tuple[str, bytes]:
    return "application/json", json.dumps(value, allow_nan=False).encode()
