"""The explorer without a browser: who is answered, what is refused, what an exported page holds, the command."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from making import invoke
from tilewise.errors import InvalidProblem
from tilewise.explorer import ExplorerServer
from tilewise.explorer.page import assets

QUESTION: dict[str, Any] = {
    "batch": 2, "context": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16", "device": "h100",
    "phase": "prefill", "causal": True, "window": None,
}  # fmt: skip


class Reply:
    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.headers = response.headers
        self.body = response.read()

    @property
    def error(self) -> str:
        message: str = json.loads(self.body)["error"]
        return message


def ask(server: ExplorerServer, method: str, path: str, body: bytes | None = None, **headers: str) -> Reply:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    try:
        connection.putrequest(method, path, skip_host="host" in headers)
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value)
        if body is not None and "content_length" not in headers:
            connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body)
        return Reply(connection.getresponse())
    finally:
        connection.close()


def plan(server: ExplorerServer, question: object, **headers: str) -> Reply:
    headers = {"content_type": "application/json", **headers}
    return ask(server, "POST", "/api/plan", json.dumps(question).encode(), **headers)


# --- who is answered


def test_listens_on_loopback_only(server: ExplorerServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    assert server.url == f"http://127.0.0.1:{server.port}/"
    # Linux answers on all of 127/8 where a socket is bound to every address.
    with socket.socket() as other, pytest.raises(OSError, match="refused"):
        other.connect(("127.0.0.2", server.port))


def test_a_taken_port_is_named(server: ExplorerServer) -> None:
    with pytest.raises(InvalidProblem, match=f"port: expected one that is free, got {server.port}"):
        ExplorerServer(server.port)


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1", "localhost:1", ""])
def test_other_host_names_are_refused(server: ExplorerServer, host: str) -> None:
    reply = ask(server, "GET", "/", host=host)
    assert reply.status == 403
    assert server.url in reply.error


def test_both_names_of_this_machine_are_answered(server: ExplorerServer) -> None:
    for host in server.hosts:
        assert ask(server, "GET", "/", host=host).status == 200


def test_other_pages_cannot_ask(server: ExplorerServer) -> None:
    assert plan(server, QUESTION, origin="http://evil.example").status == 403
    assert plan(server, QUESTION, origin=server.url.rstrip("/")).status == 200


@pytest.mark.parametrize("leave_early", [False, True])
def test_the_terminal_stays_silent(
    server: ExplorerServer, capfd: pytest.CaptureFixture[str], leave_early: bool
) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        host = f"Host: 127.0.0.1:{server.port}\r\n"
        if leave_early:
            # Closed with an answer unread, a socket is reset.
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.sendall((f"GET / HTTP/1.1\r\n{host}\r\n" * 200).encode())
        else:
            client.sendall(f"GET http://[x HTTP/1.1\r\n{host}\r\n".encode())
            assert client.recv(100).startswith(b"HTTP/1.1 404")
    assert ask(server, "GET", "/").status == 200
    assert capfd.readouterr().err == ""


def test_an_endless_content_length_is_refused(server: ExplorerServer) -> None:
    assert plan(server, QUESTION, content_length="9" * 5000).status == 413


# --- files


def test_every_file_of_the_page_is_served(server: ExplorerServer) -> None:
    files = assets()
    assert {"index.html", "css/base.css", "js/main.js", "js/engine/attention.js"} <= files.keys()
    for path, text in files.items():
        reply = ask(server, "GET", f"/{path}")
        assert reply.status == 200
        if path != "index.html":
            assert reply.body.decode() == text


OUTSIDE = ["/../page.py", "/js/../../page.py", "/js/..%2f..%2fpage.py", "/%2e%2e/page.py", "//etc/passwd"]
OUTSIDE += ["/etc/passwd", "/js/", "/js", "/nothing.js", "/index.html/", "/js/main.js%00.html"]


@pytest.mark.parametrize("path", OUTSIDE)
def test_nothing_outside_its_folder(server: ExplorerServer, path: str) -> None:
    assert ask(server, "GET", path).status == 404


def test_headers(server: ExplorerServer) -> None:
    reply = ask(server, "HEAD", "/")
    assert (reply.status, reply.body) == (200, b"")
    assert reply.headers["X-Content-Type-Options"] == "nosniff"
    policy = reply.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_other_methods_are_refused(server: ExplorerServer) -> None:
    for method in ("PUT", "DELETE", "OPTIONS"):
        assert ask(server, method, "/").status == 501
    assert ask(server, "GET", "/api/plan").status == 404
    assert ask(server, "POST", "/js/main.js", b"{}", content_type="application/json").status == 404


def test_a_chapter_can_be_saved_as_one_file(server: ExplorerServer) -> None:
    reply = ask(server, "GET", "/export/fa2.html")
    assert (reply.status, reply.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert b'"chapter":"fa2"' in reply.body
    assert ask(server, "GET", "/export/fa9.html").status == 404


# --- questions


def test_a_question_is_answered_by_explain(server: ExplorerServer) -> None:
    reply = plan(server, QUESTION)
    answer = json.loads(reply.body)
    assert reply.status == 200
    assert answer["backend"] == "hopper"
    assert answer["device"]["name"] == "NVIDIA H100 SXM"
    assert answer["problem"]["num_heads"] == 32
    assert answer["tiled"]["seconds"] > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": 0}, "batch: expected a whole number from 1 to 4096, got 0"),
        ({"batch": True}, "batch: expected a whole number"),
        ({"context": 10**9}, "context: expected a whole number from 128 to 4194304"),
        ({"context": 4096.0}, "context: expected a whole number"),
        ({"heads": "32"}, "heads: expected a whole number"),
        ({"head_dim": 100}, "head_dim: expected one of 64, 80"),
        ({"dtype": "int8"}, "dtype: expected one of bfloat16"),
        ({"device": "h300"}, "device: expected one of cpu, v100"),
        ({"device": ["h100"]}, "device: expected one of cpu"),
        ({"phase": "left out"}, "phase: "),
        ({"phase": "dream"}, "phase: expected one of prefill"),
        ({"causal": 1}, "causal: expected one of True, False"),
        ({"window": -1}, "window: expected a whole number from 0 to 4194304, or null"),
        ({"kv_heads": 5}, "num_heads: expected a multiple"),
        ({"extra": 1}, "extra: expected no such field"),
        ({"dtype": "x" * 1000}, "dtype: expected one of"),
    ],
)
def test_bad_questions_get_400_and_the_reason(server: ExplorerServer, change: dict[str, Any], message: str) -> None:
    reply = plan(server, {name: value for name, value in (QUESTION | change).items() if value != "left out"})
    assert reply.status == 400
    assert reply.error.startswith(message)
    assert len(reply.error) < 400


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'"x"', b"NaN", b"\xff", b"[" * 4000])
def test_what_is_no_question_gets_400(server: ExplorerServer, body: bytes) -> None:
    reply = ask(server, "POST", "/api/plan", body, content_type="application/json")
    assert reply.status == 400
    assert reply.error.startswith("question: expected")


def test_the_shape_of_a_request_is_judged_first(server: ExplorerServer) -> None:
    body = json.dumps(QUESTION).encode()
    assert ask(server, "POST", "/api/plan", body, content_type="text/plain").status == 415
    assert ask(server, "POST", "/api/plan", content_type="application/json").status == 411
    assert ask(server, "POST", "/api/plan", content_type="application/json", content_length="-1").status == 411
    assert ask(server, "POST", "/api/plan", content_type="application/json", content_length="99999").status == 413


# --- the exported page


@pytest.mark.xdist_group("browser")  # whose tests open the page
def test_the_exported_page_is_one_small_file_without_outside_addresses(exported: Path) -> None:
    text = exported.read_text(encoding="utf-8")
    assert len(text.encode()) < 600 * 1024
    # The name of SVG is an identifier that is never fetched.
    addresses = set(re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}[^\s\"'`)]*", text))
    assert addresses <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<(?:script|link|img)[^>]+(?:src|href)=\"(?!data:)", text)
    assert text.count("data-module=") == sum(path.startswith("js/") for path in assets()) - 1


# --- the command


def test_export_writes_a_page_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewise.cli.explore.exported_page", lambda _chapter: "<!doctype html> µ")
    target = tmp_path / "page.html"
    result = invoke("explore", "--export", str(target))
    assert result.exit_code == 0, result.output
    assert "needs no server" in result.stdout
    assert target.read_text(encoding="utf-8").startswith("<!doctype html>")
    answer = json.loads(invoke("explore", "--export", str(target), "--json").stdout)
    assert answer == {"file": str(target), "bytes": target.stat().st_size}


def test_a_chapter_is_exported_alone(tmp_path: Path) -> None:
    target = tmp_path / "chapter.html"
    result = invoke("explore", "--export", str(target), "--chapter", "online-softmax")
    assert result.exit_code == 0, result.output
    text = target.read_text(encoding="utf-8")
    data = json.loads(re.findall(r'id="tilewise-data">(.*?)</script>', text, re.DOTALL)[0])
    assert data["chapter"] == "online-softmax"
    assert "kernels" not in data


def test_an_unknown_chapter_is_named_with_the_known_ones() -> None:
    result = invoke("explore", "--chapter", "softmax-online", "--no-browser")
    assert result.exit_code == 2
    assert "--chapter: expected one of" in result.stderr
    assert "online-softmax" in result.stderr


@pytest.mark.parametrize("name", ["page.txt", "page", "file/page.html"])
def test_an_export_that_cannot_be_is_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    result = invoke("explore", "--export", str(tmp_path / name))
    assert result.exit_code == 2
    assert "export: expected" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_taken_port_is_one_line(server: ExplorerServer) -> None:
    result = invoke("explore", "--no-browser", "--port", str(server.port))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: port: expected one that is free")


@pytest.mark.slow
def test_the_command_says_where_it_is_and_stops_when_told() -> None:
    # A background job of a shell ignores SIGINT, and so do its children unless they ask for it.
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    start = f"{heard}; from tilewise.__main__ import main; main()"
    words = [sys.executable, "-c", start, "explore", "--no-browser", "--port", "0", "--chapter", "fa2"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process, contextlib.ExitStack() as end:
        end.callback(process.kill)
        assert process.stdout is not None
        first, second = process.stdout.readline(), process.stdout.readline()
        address, chapter = first.strip().split("#")
        assert chapter == "fa2"
        port = int(address.rsplit(":", 1)[1].strip("/"))
        assert first.startswith("tilewise explorer at http://127.0.0.1:")
        assert "Stop it with Ctrl+C" in second
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("GET", "/")
        assert connection.getresponse().status == 200
        connection.close()
        process.send_signal(signal.SIGINT)
        assert process.stdout.read().strip() == "stopped"
        assert process.wait(timeout=10) == 0
