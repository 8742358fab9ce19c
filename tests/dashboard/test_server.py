"""Nobody sees anything without the token, and whoever has it cannot leave the tables of what is served."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from urllib.parse import urlencode, urlsplit

import pytest

from gradwire.dashboard import pages
from gradwire.dashboard.server import DashboardServer, _names
from gradwire.dashboard.store import Store
from gradwire.errors import ConfigError
from tests.dashboard.folders import append, many_steps, note, step, whole_run
from tests.workers.warm import gradwire

SECRETS = (b"hidden-run", b"int4", b"head.weight", b"script", b"canvas", b"gradwire.")
API = ["/api/runs", "/api/series?run=run0", "/api/part?run=run0&part=layers", "/api/layer?run=run0&name=a"]
PATHS = ["/", "/nothing", "/api/", *API, "/api/timeline?run=run0", *pages.assets()]


@pytest.fixture
def server(tmp_path):
    whole_run(tmp_path / "hidden-run")
    with Store([tmp_path]) as store, DashboardServer(store, port=0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        until(lambda: all(run["step"] == 50 and not run["reading"] for run in store.overview(-1)["runs"]))
        yield server
        server.shutdown()
        thread.join()


def until(what, seconds=20):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.02)


def ask(server, path, method="GET", token=True, host=None, headers=None):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    given = {"Host": f"127.0.0.1:{server.port}" if host is None else host, **(headers or {})}
    if token:
        given["Cookie"] = f"{server.cookie}={server.token}"
    connection.request(method, path, headers=given)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer, body


def tell(server, path):
    answer, body = ask(server, path)
    assert answer.status == 200, body
    return json.loads(body)


def assert_refused(answer, body, method="GET"):
    assert answer.status == 401
    assert len(body) < 100
    assert method == "HEAD" or body.startswith(b"401")
    assert answer.headers["Set-Cookie"] is None
    assert answer.headers["Content-Type"].startswith("text/plain")
    everything = body + str(answer.headers).replace("Content-Security-Policy", "").encode()
    assert not [secret for secret in SECRETS if secret in everything]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PROPFIND"])
def test_without_the_token_there_is_nothing(server, path, method):
    assert_refused(*ask(server, path, method, token=False), method)


@pytest.mark.parametrize("token", ["", "x", "é", "%00", "a" * 5000])
@pytest.mark.parametrize("path", ["/", "/app.js", "/api/runs"])
def test_with_a_wrong_token_there_is_nothing(server, path, token):
    assert_refused(*ask(server, f"{path}?{urlencode({'token': token})}", token=False))
    cookies = [
        f"{server.cookie}={token}".encode().decode("latin-1"),
        f"other={server.token}",
        "=;=",
        '"',
        server.token,
    ]
    for cookie in cookies:
        assert_refused(*ask(server, path, token=False, headers={"Cookie": cookie}))
    assert_refused(*ask(server, f"{path}?token={server.token[:-1]}", token=False))


def test_a_wrong_token_is_wrong_beside_the_right_cookie(server):
    assert_refused(*ask(server, "/api/runs?token=wrong"))


def test_the_printed_address_opens_the_page_and_sets_a_cookie(server):
    url = urlsplit(server.url)
    assert (url.hostname, url.port) == ("127.0.0.1", server.port)
    answer, body = ask(server, f"/?{url.query}", token=False)
    assert answer.status == 200
    assert b"<!doctype html>" in body
    assert re.fullmatch(rf"gradwire-{server.port}=\S+; HttpOnly; SameSite=Strict; Path=/", answer.headers["Set-Cookie"])
    cookie = answer.headers["Set-Cookie"].split(";")[0]
    for path in pages.assets():
        assert f"{path}" in ("/icon.svg", *[f"/{name}" for name in (*pages.STYLES, *pages.SCRIPTS)])
        assert ask(server, path, token=False, headers={"Cookie": cookie})[0].status == 200


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("token", [True, False])
def test_every_answer_has_the_headers(server, path, token):
    answer, body = ask(server, path, token=token)
    policy = answer.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'self';")
    assert "unsafe" not in policy
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["Referrer-Policy"] == "no-referrer"
    assert answer.headers["Cache-Control"] == "no-store"
    assert answer.headers["Server"] == "gradwire"
    assert "Access-Control-Allow-Origin" not in answer.headers
    assert int(answer.headers["Content-Length"]) == len(body)


@pytest.mark.parametrize("path", ["/", "/api/runs", "/app.js"])
def test_other_names_than_ours_are_refused(server, path):
    port = server.port
    for good in (f"127.0.0.1:{port}", f"localhost:{port}", f"LOCALHOST:{port}"):
        assert ask(server, path, host=good)[0].status == 200, good
    bad = [
        "evil.example",
        f"evil.example:{port}",
        f"127.0.0.1.evil.example:{port}",
        "127.0.0.1",
        f"127.0.0.1:{port + 1}",
    ]
    bad += [
        "",
        f"localhost@evil.example:{port}",
        f"evil@localhost:{port}",
        "[::1",
        f"localhost:{port}/x",
        f"0.0.0.0:{port}",
    ]
    bad += [f"localhost:{port}x", "localhost:99999999"]
    for host in bad:
        answer, body = ask(server, path, host=host)
        assert answer.status == 403, host
        assert not [secret for secret in SECRETS if secret in body]


def test_a_server_for_all_addresses_takes_addresses_but_no_names(tmp_path):
    with Store([tmp_path]) as store, DashboardServer(store, host="0.0.0.0", port=0) as server:
        for good in ("192.168.1.7", "127.0.0.1", "[::1]", "localhost", socket.gethostname()):
            assert server.knows(f"{good}:{server.port}"), good
        assert not server.knows(f"evil.example:{server.port}")
    assert "*" not in _names("192.168.1.7")


@pytest.mark.parametrize("method", ["HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND"])
def test_only_get_is_allowed(server, method):
    answer, _ = ask(server, "/api/runs", method)
    assert answer.status == 405
    assert answer.headers["Allow"] == "GET"


def test_no_path_leaves_the_tables(server, tmp_path):
    (tmp_path / "secret.txt").write_text("very secret")
    tries = [
        "/../secret.txt",
        "/..%2fsecret.txt",
        "/%2e%2e/%2e%2e/etc/passwd",
        "//etc/passwd",
        "/page/app.js",
        "/app.js/",
    ]
    tries += [
        "/./app.js",
        "/app.js%00",
        "/server.py",
        f"{tmp_path}/secret.txt",
        "/hidden-run/rank-0.jsonl",
        "/app%2ejs",
    ]
    for path in tries:
        answer, body = ask(server, path)
        assert answer.status == 404, path
        assert body == b"not found\n"
    for run in ("..", "hidden-run", str(tmp_path / "hidden-run"), "run0/../run0", "run99", ""):
        for path in ("series", "part", "layer", "timeline"):
            query = urlencode({"run": run, "part": "layers", "name": "../../etc/passwd"})
            assert ask(server, f"/api/{path}?{query}")[0].status == 404
    assert ask(server, "/api/part?run=run0&part=__class__")[0].status == 404
    assert tell(server, "/api/layer?run=run0&name=../../etc/passwd") == {"step": [], "error": [], "residual": []}


WRONG = ["runs?since=x", "series?run=run0&groups=x", "series?run=run0&axis=x", "series?run=run0&from=nan"]
WRONG += ["timeline?run=run0&step=x", "runs?" + "&".join("a=1" for _ in range(50))]


@pytest.mark.parametrize("path", WRONG)
def test_a_wrong_question_is_said_to_be_one(server, path):
    assert ask(server, f"/api/{path}")[0].status == 400


def test_what_is_no_http_is_refused_in_a_line(server):
    for data in (
        b"\x00\x01\x02\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
            connection.sendall(data)
            answer = b""
            while more := connection.recv(65536):
                answer += more
        # What looks like HTTP/0.9 is answered as such: without a status.
        assert answer.startswith((b"HTTP/1.1 4", b"HTTP/1.1 5", b"bad request"))
        assert answer.endswith(b"bad request\n")
        assert not [secret for secret in SECRETS if secret in answer.replace(b"Content-Security-Policy", b"")]
    assert ask(server, "/api/runs")[0].status == 200


def test_the_answers_hold_what_is_in_the_files(server):
    (run,) = tell(server, "/api/runs")["runs"]
    assert (run["name"], run["state"], run["step"], run["loss"], run["ratio"]) == (
        "hidden-run",
        "done",
        50,
        0.04,
        0.125,
    )
    shown = tell(server, "/api/series?run=run0&groups=loss,bytes")
    assert shown["loss"]["values"]["loss"][:2] == [2, 1]
    assert shown["loss"]["bytes"][1] == 2_000_000
    assert set(shown["bytes"]["values"]["ratio"]) == {0.125}
    assert [each["name"] for each in tell(server, "/api/part?run=run0&part=layers")] == [
        "head.weight",
        "body.weight",
        "tail.weight",
    ]
    assert tell(server, "/api/layer?run=run0&name=head.weight")["step"] == [10, 20]
    assert len(tell(server, "/api/timeline?run=run0")["rows"]) == 2
    assert tell(server, "/api/timeline?run=run0&step=3")["rows"][0]["step"] == 3
    assert tell(server, "/api/part?run=run0&part=plans")[0]["reason"] == "the link is slow"
    assert tell(server, "/api/part?run=run0&part=coordinator")["staleness"] == [[0, 5], [2, 7]]
    assert tell(server, "/api/part?run=run0&part=coordinator")["values"]["rate"] == [None, 3, 3, 3, 3]
    assert tell(server, "/api/part?run=run0&part=validations") == [
        {"step": 50, "seconds": pytest.approx(5.0), "bytes": 50_000_000, "loss": 0.125, "accuracy": 0.5}
    ]


def test_an_idle_page_costs_a_few_bytes_and_news_comes(server, tmp_path):
    version = tell(server, "/api/runs")["version"]
    assert len(ask(server, f"/api/runs?since={version}")[1]) < 40
    append(tmp_path / "hidden-run", "rank-0.jsonl", step(51), note(51, "news"))
    until(lambda: tell(server, f"/api/runs?since={version}").get("runs", [{}])[0].get("step") == 51)
    assert tell(server, "/api/part?run=run0&part=notes")["notes"][-1]["what"] == "news"


def test_answers_come_soon_while_much_is_read(tmp_path):
    (tmp_path / "large").mkdir()
    many_steps(tmp_path / "large" / "rank-0.jsonl", 300_000)
    with Store([tmp_path]) as store, DashboardServer(store, port=0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        took = []
        while (run := tell(server, "/api/runs")["runs"][0])["reading"] or not took:
            begun = time.monotonic()
            tell(server, "/api/series?run=run0")
            took.append(time.monotonic() - begun)
            time.sleep(0.05)
        assert run["step"] == 300_000
        server.shutdown()
        thread.join()
    assert len(took) > 5
    assert sorted(took)[len(took) // 2] < 3  # ten times what it takes


def test_a_port_that_is_taken_is_said_or_another_is_found(tmp_path):
    with Store([tmp_path]) as store, DashboardServer(store, port=0) as first:
        with pytest.raises(ConfigError, match=rf"`--port` {first.port} cannot be served at"):
            DashboardServer(store, port=first.port)
    with Store([tmp_path]) as store, DashboardServer(store) as first, DashboardServer(store) as second:
        assert first.port != second.port
        assert first.token != second.token
    with Store([tmp_path]) as store, pytest.raises(ConfigError, match="`--host`"):
        DashboardServer(store, host="no.such.host.invalid")


def test_the_command_prints_the_address_and_ends_well(tmp_path):
    whole_run(tmp_path / "run")
    command = [sys.executable, "-m", "gradwire", "dash", str(tmp_path), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        url = urlsplit(process.stdout.readline().strip())
        assert (url.scheme, url.hostname, url.query[:6]) == ("http", "127.0.0.1", "token=")
        connection = http.client.HTTPConnection("127.0.0.1", url.port, timeout=10)
        connection.request("GET", f"/api/runs?{url.query}")
        assert json.loads(connection.getresponse().read())["runs"][0]["name"] == "run"
        connection.close()
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(20) == 0
        assert process.stderr.read() == ""


def test_the_command_warns_where_others_can_reach_it_and_names_what_is_no_folder(tmp_path):
    command = [sys.executable, "-m", "gradwire", "dash"]
    refused = gradwire("dash", str(tmp_path / "no"), status=2)
    assert "`RUN_DIR` must be a folder of a run, or of runs" in refused.stderr
    arguments = [*command, str(tmp_path), "--host", "0.0.0.0", "--port", "0"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(20) == 0
        assert "warning: 0.0.0.0 is reached from other machines" in process.stderr.read()
