"""What the server answers, to whom, and what it refuses; and that it keeps what it acknowledged when it is killed."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from reviews import HOSTILE, Client, save_evaluation

from segcal.errors import ConfigError
from segcal.review import read_decisions
from segcal.review import server as review_server
from segcal.review.serving import serve_review
from segcal.review.volumes import Volumes

DATA = ("/api/cases", "/api/decisions", "/api/case?case=case_00&result=0", "/api/volume?case=case_00&result=0")


def test_the_page_and_the_list_come_with_the_token(client):
    page = client.ask(f"/?token={client.token}", x_segcal_token=None)
    assert page.status == 200
    assert page.headers["content-type"].startswith("text/html")
    (result,) = client.ask("/api/cases").json
    assert len(result["cases"]) == 12
    assert result["qualityName"] == "Expected Dice"
    means = [row[0] for row in result["quality"]]
    assert means == sorted(means)  # cases get surer one after the other


@pytest.mark.parametrize(
    "path", ["/", "/?token=", "/?token=wrong", "/?token=TOKEN&token=TOKEN", "/?token=TOKENx", "/?x=1"]
)
def test_a_page_with_a_wrong_token_is_refused(client, path):
    answer = client.ask(path.replace("TOKEN", client.token))  # a header does not open the page
    assert answer.status == 403
    assert b"case_00" not in answer.body


@pytest.mark.parametrize("fields", [12, 5000])
@pytest.mark.parametrize("path", ["/", "/api/cases"])
def test_an_address_with_many_fields_is_refused(client, path, fields):
    answer = client.ask(f"{path}?token={client.token}{'&x=1' * fields}")
    assert answer.status == 400
    assert b"too many fields" in answer.body


def test_an_unexpected_error_is_answered_with_a_sentence(client, monkeypatch, caplog):
    def broken(self, case, result):
        raise RuntimeError("no such volume")

    monkeypatch.setattr(Volumes, "facts", broken)
    answer = client.ask("/api/case?case=case_00&result=0")
    assert answer.status == 500
    assert "no such volume. Please report it" in answer.json["error"]
    assert caplog.records == []


@pytest.mark.parametrize("end_first", ["server", "client"])
def test_a_request_under_way_at_the_end_of_server_or_client_prints_nothing(results, monkeypatch, caplog, end_first):
    monkeypatch.setattr(review_server, "PATIENCE_S", 0)
    with serve_review(results) as running:
        client = Client(running.url)
        raw = socket.create_connection((client.host, client.port))
        head = {
            "Host": f"127.0.0.1:{client.port}", "Origin": client.origin, "X-Segcal-Token": client.token,
            "Content-Type": "application/json", "Content-Length": "100", "Expect": "100-continue",
        }  # fmt: skip
        lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
        raw.sendall(f"PUT /api/decisions HTTP/1.1\r\n{lines}\r\n".encode())
        assert raw.recv(100).startswith(b"HTTP/1.1 100")  # the server waits for the body
        if end_first == "client":
            raw.close()
    raw.close()
    assert caplog.records == []


@pytest.mark.parametrize("path", [*DATA, "/api/niivue.js", "/nowhere", "/../../etc/passwd"])
@pytest.mark.parametrize("token", [None, "", "wrong", "é"])
def test_data_with_a_wrong_token_is_refused(client, path, token):
    given = token.encode().decode("latin-1") if token else token
    assert client.ask(path, x_segcal_token=given).status == 403
    assert client.ask(f"{path}{'&' if '?' in path else '?'}token={client.token}", x_segcal_token=given).status == 403


@pytest.mark.parametrize("host", ["evil.example", "evil.example:PORT", "127.0.0.1", "127.0.0.1:1", "[::1]:PORT", ""])
@pytest.mark.parametrize("path", ["/?token=TOKEN", "/api/cases"])
def test_another_host_name_is_refused(client, host, path):  # DNS rebinding
    answer = client.ask(path.replace("TOKEN", client.token), host=host.replace("PORT", str(client.port)))
    assert answer.status in (400, 421)
    assert b"case_00" not in answer.body


def test_two_host_names_are_refused(client):
    with socket.create_connection((client.host, client.port)) as raw:
        name = f"127.0.0.1:{client.port}"
        head = f"GET /api/cases HTTP/1.1\r\nHost: {name}\r\nHost: evil\r\nX-Segcal-Token: {client.token}\r\n\r\n"
        raw.sendall(head.encode())
        assert raw.recv(100).split()[1] in (b"400", b"421")


def test_localhost_is_this_server_too(client):
    assert client.ask("/api/cases", host=f"localhost:{client.port}").status == 200


@pytest.mark.parametrize("site", ["cross-site", "same-site", "none"])
@pytest.mark.parametrize("path", DATA)
def test_data_is_for_the_servers_own_page(client, path, site):
    assert client.ask(path, sec_fetch_site=site).status == 403


@pytest.mark.parametrize("origin", [None, "null", "http://evil.example", "http://127.0.0.1", "https://127.0.0.1:PORT"])
def test_a_foreign_origin_cannot_write(client, server, origin):
    body = {"case": "case_00", "decision": "accept", "comment": "", "reviewer": "", "seen": 0}
    given = origin and origin.replace("PORT", str(client.port))
    assert client.ask("/api/decisions", "PUT", body=body, origin=given).status == 403
    assert client.ask("/api/decisions", "PUT", body=body, sec_fetch_site="cross-site").status == 403
    assert not server.decisions.exists()


def test_nobody_is_allowed_to_ask_from_elsewhere(client):
    asked = {"origin": "http://evil.example", "access_control_request_method": "PUT", "x_segcal_token": None}
    answer = client.ask("/api/decisions", "OPTIONS", **asked)
    assert answer.status == 403
    assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    "path",
    ["/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd", "/api/../../pyproject.toml", "/decisions.csv",
     "/api/volume/..%2f..%2fetc%2fpasswd", "/evaluation.npz"],
)  # fmt: skip
def test_no_path_leads_to_a_file(client, path):
    assert client.ask(path).status == 404


@pytest.mark.parametrize(
    "case", ["../../etc/passwd", "..%2F..%2Fetc%2Fpasswd", "/etc/passwd", "case_99", "", "case_00%00"]
)
@pytest.mark.parametrize("place", ["case", "volume"])
def test_a_case_that_is_not_in_the_list_is_refused(client, case, place):
    answer = client.ask(f"/api/{place}?case={case}&result=0&kind=image&class=0")
    assert answer.status == 400
    assert "must be one of the 12 under review" in answer.json["error"]


@pytest.mark.parametrize("result", ["1", "-1", "x", "9" * 30, "٣"])
def test_a_result_that_is_not_there_is_refused(client, result):
    from urllib.parse import quote

    assert client.ask(f"/api/case?case=case_00&result={quote(result)}").status == 400


def test_without_volumes_it_says_so(client, server):
    assert "has no predictions to show" in server.notes[0]
    answer = client.ask("/api/case?case=case_00&result=0")
    assert (answer.status, "no prediction" in answer.json["error"]) == (400, True)
    assert b"has no predictions to show" in client.ask(f"/?token={client.token}").body


def test_every_answer_is_strict_with_browsers(client):
    for path in (f"/?token={client.token}", "/", "/api/cases", "/nowhere"):
        headers = client.ask(path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == "no-store"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert "server" not in headers
        rules = dict(rule.split(maxsplit=1) for rule in headers["content-security-policy"].split("; "))
        assert rules["default-src"] == "'none'"
        assert rules["frame-ancestors"] == "'none'"
        assert "unsafe" not in headers["content-security-policy"]


@pytest.mark.parametrize("method", ["POST", "DELETE", "PATCH"])
@pytest.mark.parametrize("path", ["/?token=TOKEN", *DATA])
def test_other_methods_are_refused(client, method, path):
    assert client.ask(path.replace("TOKEN", client.token), method, body={}).status == 405


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"\xff", b'{"case": "case_00"}', b"[" * 5000, json.dumps({"case": "\ud800"}).encode(),
        {"case": "case_00", "decision": "maybe", "comment": "", "reviewer": "", "seen": 0},
        {"case": "case_00", "decision": "accept", "comment": 1, "reviewer": "", "seen": 0},
        {"case": "case_00", "decision": "accept", "comment": "", "reviewer": "", "seen": True},
        {"case": "case_00", "decision": "accept", "comment": "", "reviewer": "", "seen": 0, "more": 1},
        {"case": "../case_00", "decision": "accept", "comment": "", "reviewer": "", "seen": 0},
        {"case": "case_00", "decision": "accept", "comment": "x" * 10_001, "reviewer": "", "seen": 0},
        b" " * (1 << 18),
    ],
)  # fmt: skip
def test_what_is_no_decision_is_refused_with_a_sentence(client, server, body):
    answer = client.ask("/api/decisions", "PUT", body=body)
    assert answer.status == 400
    assert answer.json["error"]
    assert not server.decisions.exists()


def test_a_decision_must_say_that_it_is_json(client):
    body = {"case": "case_00", "decision": "accept", "comment": "", "reviewer": "", "seen": 0}
    assert client.ask("/api/decisions", "PUT", body=body, content_type="text/plain").status == 400


def test_a_decision_is_in_the_file_when_it_is_acknowledged_and_others_hear_of_it(client, server):
    made = client.decide("case_03", "reject", comment=f"={HOSTILE}", by="Ada").json
    (row,) = read_decisions(server.decisions)
    assert (row.case, row.decision, row.comment, row.reviewer) == ("case_03", "reject", f"={HOSTILE}", "Ada")
    assert made["time"] == row.time
    heard = client.ask("/api/decisions?after=0").json
    assert heard == {"revision": made["revision"], "decisions": [made]}
    assert client.ask(f"/api/decisions?after={made['revision']}").json["decisions"] == []


def test_a_conflict_is_shown_and_writes_nothing(client, server):
    theirs = client.decide("case_03", "reject", comment="theirs").json
    before = server.decisions.read_bytes()
    answer = client.decide("case_03", "accept", comment="mine")
    assert (answer.status, answer.json["theirs"]) == (409, theirs)
    assert server.decisions.read_bytes() == before
    assert client.decide("case_03", "accept", comment="mine", seen=theirs["revision"]).status == 200


def test_a_revision_of_a_case_without_a_decision_is_a_conflict(client, server):
    answer = client.decide("case_03", seen=7)
    assert (answer.status, answer.json["theirs"]["decision"], answer.json["theirs"]["revision"]) == (409, "", 0)
    assert not server.decisions.exists()


def test_a_disk_that_takes_no_more_is_told_and_nothing_is_lost(client, server, monkeypatch):
    first = client.decide("case_00").json
    before = server.decisions.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "decisions.csv")

    with monkeypatch.context() as patched:
        patched.setattr("segcal.review.decisions.write_whole", full)
        answer = client.decide("case_01")
    assert (answer.status, "No space left" in answer.json["error"]) == (500, True)
    assert server.decisions.read_bytes() == before
    assert [each["case"] for each in client.ask("/api/decisions").json["decisions"]] == ["case_00"]
    assert client.decide("case_01").json["revision"] > first["revision"]


def test_it_listens_on_this_machine_alone(server, client):
    with pytest.raises(OSError), socket.create_connection((_other_address(), client.port), timeout=2):  # noqa: PT011
        pass


def _other_address() -> str:
    """An address of this machine that is not 127.0.0.1; all of 127.0.0.0/8 are."""
    return "127.0.0.2"


def test_a_port_that_is_taken_and_a_second_server_are_refused(results, server, tmp_path):
    with pytest.raises(ConfigError, match="one review at a time"), serve_review(results):
        pass
    port = Client(server.url).port
    again = serve_review(results, decisions=tmp_path / "other.csv", port=port)
    with pytest.raises(ConfigError, match="must be one that nobody listens at"), again:
        pass


def test_every_server_has_a_token_of_its_own(results, tmp_path):
    tokens = set()
    for i in range(3):
        with serve_review(results, decisions=tmp_path / f"{i}.csv") as running:
            tokens.add(Client(running.url).token)
    assert len(tokens) == 3
    assert all(len(token) == 43 for token in tokens)  # 32 bytes


@contextmanager
def _process(results: Path, *options: str):
    """`segcal review` as a user starts it, once it has said where it is."""
    command = [sys.executable, "-m", "segcal", "review", str(results), "--no-browser", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, Client(process.stdout.readline().strip())
        finally:
            process.kill()


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such signals")
def test_what_was_acknowledged_survives_kill_9_and_the_next_server_goes_on(results):
    kept: dict[str, str] = {}  # of each case, the last comment that was acknowledged
    with _process(results) as (process, client):

        def decide(who: int) -> None:
            own = [f"case_{i:02d}" for i in range(who, 12, 3)]  # each has cases of their own
            seen = dict.fromkeys(own, 0)
            for i in range(1000):
                case = own[i % 4]
                try:
                    answer = client.decide(case, "accept", comment=str(i), seen=seen[case])
                except (OSError, http.client.HTTPException):  # it is dead
                    return
                kept[case], seen[case] = str(i), answer.json["revision"]

        threads = [threading.Thread(target=decide, args=(who,)) for who in range(3)]
        for thread in threads:
            thread.start()
        while len(kept) < 12:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)  # in the middle of it
        for thread in threads:
            thread.join()
        assert process.wait(20) == -signal.SIGKILL
    assert len(kept) == 12
    found = {each.case: each.comment for each in read_decisions(results / "decisions.csv")}
    assert found.keys() == kept.keys()
    for case, comment in kept.items():  # the last one may be in the file before it could be acknowledged
        assert int(found[case]) in (int(comment), int(comment) + 4)
    with serve_review(results) as again:
        resumed = Client(again.url).ask("/api/decisions").json["decisions"]
        assert {each["case"]: each["comment"] for each in resumed} == found


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such signals")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_with_a_sentence(results, number, code):
    with _process(results) as (process, client):
        assert client.decide("case_00").status == 200
        process.send_signal(number)
        assert process.wait(20) == code
        told = process.stderr.read()
    assert "12 cases to review; decisions: " in told
    assert told.strip().endswith("Stopped. Decisions are kept. Run the same command again to resume.")
    assert "Traceback" not in told
    assert not (results / ".decisions.csv.lock").exists()


def test_two_processes_at_once_lose_no_decision(results):
    """Two browsers of one server, each on its own connection, deciding on the same and on different cases."""
    answers: list[tuple[str, int, str]] = []
    with serve_review(results) as server:

        def decide(who: str) -> None:
            client = Client(server.url)
            for i in range(12):
                answer = client.decide(f"case_{i:02d}", "accept", comment=who)
                answers.append((f"case_{i:02d}", answer.status, who))

        threads = [threading.Thread(target=decide, args=(who,)) for who in ("one", "two")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = {each.case: each.comment for each in read_decisions(server.decisions)}
    won = {case: who for case, status, who in answers if status == 200}
    assert found == won
    assert len(found) == 12
    assert sorted(status for _, status, _ in answers) == [200] * 12 + [409] * 12


def test_nothing_to_review_is_an_error_with_a_sentence(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "segcal", "review", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "must hold results to review" in done.stderr


def test_predictions_of_several_results_need_names(tmp_path):
    for name in ("one", "two"):
        save_evaluation(tmp_path / name / "evaluation.npz", ["a", "b"])
    with (
        pytest.raises(ConfigError, match="must name their results: one, two"),
        serve_review(tmp_path, predictions=tmp_path),
    ):
        pass
    unknown = serve_review(tmp_path, predictions={"three": tmp_path})
    with pytest.raises(ConfigError, match="of the results one, two; got 'three'"), unknown:
        pass
