"""Log formats, with real lines of servers."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate_server.replay.errors import BadLine, ReplayError
from headgate_server.replay.fields import LogFormat
from headgate_server.replay.formats import choose_format
from headgate_server.replay.recording import record_line
from headgate_server.replay.times import TimeReader

COMBINED = (
    '203.0.113.7 - frank [10/Oct/2000:13:55:36 -0700] "GET /apache_pb.gif?size=2 HTTP/1.0" 200 2326 '
    '"http://www.example.com/start.html" "Mozilla/4.08 [en] (Win98; I \\"quoted\\")"'
)
CADDY = json.dumps(
    {
        "level": "info",
        "ts": 1646861401.5241024,
        "logger": "http.log.access",
        "msg": "handled request",
        "request": {
            "remote_ip": "127.0.0.1",
            "remote_port": "41342",
            "client_ip": "203.0.113.7",
            "proto": "HTTP/2.0",
            "method": "GET",
            "host": "localhost",
            "uri": "/apache_pb.gif?size=2",
            "headers": {"User-Agent": ["curl/7.82.0"], "X-Api-Key": ["k1"]},
        },
        "bytes_read": 0,
        "user_id": "frank",
        "duration": 0.000929675,
        "size": 2326,
        "status": 200,
    }
)
TRAEFIK = json.dumps(
    {
        "ClientAddr": "203.0.113.7:41342",
        "ClientHost": "203.0.113.7",
        "ClientPort": "41342",
        "ClientUsername": "frank",
        "DownstreamContentSize": 2326,
        "DownstreamStatus": 200,
        "Duration": 929675,
        "RequestHost": "localhost",
        "RequestMethod": "GET",
        "RequestPath": "/apache_pb.gif?size=2",
        "RequestProtocol": "HTTP/2.0",
        "RouterName": "web@docker",
        "StartLocal": "2022-03-09T21:30:01.524102456Z",
        "StartUTC": "2022-03-09T21:30:01.524102456Z",
        "level": "info",
        "msg": "",
        "request_User-Agent": "curl/7.82.0",
        "time": "2022-03-09T21:30:02Z",
    }
)
ENVOY = json.dumps(
    {
        "start_time": "2022-03-09T21:30:01.524Z",
        "method": "GET",
        "path": "/apache_pb.gif?size=2",
        "protocol": "HTTP/2",
        "response_code": 200,
        "response_flags": "-",
        "bytes_received": 0,
        "bytes_sent": 2326,
        "duration": 1,
        "x_forwarded_for": "198.51.100.9",
        "user_agent": "curl/7.82.0",
        "user": "frank",
        "request_id": "a4cadca4-662f-4a9c-9c9c-000000000000",
        "authority": "localhost",
        "upstream_host": "10.0.0.4:8080",
        "downstream_remote_address": "203.0.113.7:41342",
    }
)
PLAIN = json.dumps(
    {
        "timestamp": "2022-03-09T21:30:01.524102Z",
        "ip": "203.0.113.7",
        "url": "/apache_pb.gif?size=2",
        "status": 200,
    }
)
NGINX_OWN = '$msec "$request" $status $remote_addr [$http_x_api_key] $request_time'
APACHE_OWN = '%v:%p %a %l %u %t \\"%r\\" %>s %O \\"%{Referer}i\\" \\"%{User-Agent}i\\" %D'


def detected(line: str) -> LogFormat:
    return choose_format("auto", [line], "log", None)[0]


def field(log_format: LogFormat, line: str, name: str) -> str | None:
    return log_format.getter(name)(log_format.read(line))


def at(log_format: LogFormat, line: str) -> int:
    return TimeReader().read(log_format.time()(log_format.read(line)))


@pytest.mark.parametrize(
    ("line", "name", "time"),
    [
        (COMBINED, "combined", 971_211_336_000_000),
        (CADDY, "json", 1_646_861_401_524_102),
        (TRAEFIK, "json", 1_646_861_401_524_102),
        (ENVOY, "json", 1_646_861_401_524_000),
        (PLAIN, "json", 1_646_861_401_524_102),
    ],
)
def test_formats_are_detected_and_have_the_common_fields(line: str, name: str, time: int) -> None:
    log_format = detected(line)
    assert log_format.name == name
    assert at(log_format, line) == time
    assert (field(log_format, line, "client") or "").startswith("203.0.113.7")
    assert field(log_format, line, "path") == "/apache_pb.gif"
    assert field(log_format, line, "query") == "size=2"
    assert field(log_format, line, "target") == "/apache_pb.gif?size=2"
    assert field(log_format, line, "status") == "200"
    if line != PLAIN:
        assert field(log_format, line, "method") == "GET"
        assert field(log_format, line, "user") == "frank"
        assert field(log_format, line, "bytes") == "2326"
        assert field(log_format, line, "agent")


def test_common_lines_and_those_of_traefik_are_combined() -> None:
    common = '203.0.113.7 - - [10/Oct/2000:13:55:36 -0700] "GET / HTTP/1.0" 200 -'
    traefik = f'{common} "-" "-" 17 "web@docker" "http://10.0.0.4:80" 3ms'
    for line in (common, traefik):
        log_format = detected(line)
        assert field(log_format, line, "client") == "203.0.113.7"
        assert field(log_format, line, "user") is None
        assert field(log_format, line, "bytes") is None
        assert field(log_format, line, "agent") is None


def test_user_names_with_spaces_and_invalid_requests() -> None:
    line = '203.0.113.7 - frank n. stein [10/Oct/2000:13:55:36 -0700] "\\x16\\x03\\x01" 400 157 "-" "-"'
    log_format = detected(line)
    assert field(log_format, line, "user") == "frank n. stein"
    assert field(log_format, line, "method") is None
    assert field(log_format, line, "path") is None


def test_fields_have_their_names_in_the_log() -> None:
    caddy, traefik = detected(CADDY), detected(TRAEFIK)
    assert field(caddy, CADDY, "request.headers.X-Api-Key") == "k1"
    assert field(caddy, CADDY, "request.remote_ip") == "127.0.0.1"
    assert field(caddy, CADDY, "request.nothing.at.all") is None
    assert field(caddy, CADDY, "request") is None
    assert field(traefik, TRAEFIK, "RouterName") == "web@docker"
    assert field(detected(COMBINED), COMBINED, "http_referer") == "http://www.example.com/start.html"
    dotted = '{"time": 5, "http.user": "a", "ok": true, "none": [], "many": [[1]]}'
    assert field(detected(dotted), dotted, "http.user") == "a"
    assert field(detected(dotted), dotted, "ok") == "true"
    assert field(detected(dotted), dotted, "none") is None
    assert field(detected(dotted), dotted, "many") is None


def test_a_format_of_nginx() -> None:
    line = '1646861401.524 "GET /a?b=1 HTTP/1.1" 200 203.0.113.7 [key-1] 0.003'
    log_format, _ = choose_format(NGINX_OWN, [], "log", None)
    assert at(log_format, line) == 1_646_861_401_524_000
    assert field(log_format, line, "client") == "203.0.113.7"
    assert field(log_format, line, "http_x_api_key") == "key-1"
    assert field(log_format, line, "method") == "GET"
    assert field(log_format, line, "path") == "/a"
    assert field(log_format, line, "request_time") == "0.003"
    braces, _ = choose_format("${remote_addr}x${time_iso8601}", [], "log", None)
    assert field(braces, "1.2.3.4x2022-03-09T21:30:01Z", "client") == "1.2.3.4"
    apart, _ = choose_format("$time_iso8601|$request_method|$request_uri|$uri|$args", [], "log", None)
    row = "2022-03-09T21:30:01Z|GET|/a?b=1|/a|b=1"
    assert [field(apart, row, name) for name in ("method", "target", "path", "query")] == [
        "GET",
        "/a?b=1",
        "/a",
        "b=1",
    ]


def test_a_format_of_apache() -> None:
    line = 'www.example.org:443 203.0.113.7 - - [10/Oct/2000:13:55:36 -0700] "GET /a HTTP/1.1" 200 2326 "-" "curl/7" 1234'
    log_format, _ = choose_format(APACHE_OWN, [], "log", None)
    assert at(log_format, line) == 971_211_336_000_000
    assert field(log_format, line, "client") == "203.0.113.7"
    assert field(log_format, line, "host") == "www.example.org"
    assert field(log_format, line, "agent") == "curl/7"
    assert field(log_format, line, "D") == "1234"
    epoch, _ = choose_format("%{usec}t %h %m %U%% %{session}C", [], "log", None)
    assert at(epoch, "971211336000123 203.0.113.7 GET /a% s1") == 971_211_336_000_123
    assert field(epoch, "971211336000123 203.0.113.7 GET /a% s1", "cookie_session") == "s1"


def test_csv_with_a_header_and_with_columns_given() -> None:
    header = "time;client;path;cost"
    log_format, has_header = choose_format("auto", [header, "2024-05-01T12:00:00Z;a;/x;3"], "log", None)
    assert (log_format.name, has_header) == ("csv", True)
    line = '2024-05-01T12:00:00Z;"a;b";/x?y;3'
    assert at(log_format, line) == 1_714_564_800_000_000
    assert field(log_format, line, "client") == "a;b"
    assert field(log_format, line, "cost") == "3"
    given_columns, has_header = choose_format("csv:when,who,url", ["5,a,/x?y=1"], "log", None)
    assert not has_header
    assert field(given_columns, "5,a,/x?y=1", "who") == "a"
    assert field(given_columns, "5,a,/x?y=1", "path") == "/x"
    named, _ = choose_format("csv", ["Zeit,IP"], "log", "Zeit")
    assert at(named, "1714564800, 1.2.3.4") == 1_714_564_800_000_000


def test_recordings_of_headgate() -> None:
    line = record_line(5, "api", "hit", "alice", 2, "pro", True)
    log_format = detected(line)
    assert log_format.name == "headgate"
    assert log_format.read(line) == json.loads(line)


@pytest.mark.parametrize(
    ("wanted", "line", "reason"),
    [
        ("combined", "what is this", "does not match the format combined"),
        ("json", "{", "not JSON"),
        ("json", "[1]", "not a JSON object"),
        ("json", '{"a": 1} x', "not JSON"),
        ("json", "[" * 100_000, "not JSON"),
        ("json", '{"a": ' + "9" * 5_000 + "}", "not JSON"),
        ("csv:a,b,time", "1,2", "not 3 columns"),
        ("csv:a,b,time", '"1,2,3', "not CSV"),
        ("csv:a,time", "x" * 200_000 + ",2", "not CSV"),
        ("headgate", "{}", "not recorded by Headgate"),
        ("headgate", "x", "not JSON"),
        (NGINX_OWN, "x", "does not match the format custom"),
    ],
)
def test_invalid_lines_have_a_reason(wanted: str, line: str, reason: str) -> None:
    with pytest.raises(BadLine) as raised:
        choose_format(wanted, [], "log", None)[0].read(line)
    assert raised.value.reason == reason


@pytest.mark.parametrize(
    ("wanted", "lines", "problem"),
    [
        ("combine", [], "unknown format 'combine'; use combined"),
        (
            "auto",
            ["what is this"],
            "log: the format was not detected; it begins with 'what is",
        ),
        ("auto", [], "it is empty"),
        ("$remote_addr$status", [], "a separator between remote_addr and status"),
        ("cost: $", [], "has no fields"),
        ("%{%d/%b}t %h", [], "is not supported; use %t"),
        ("csv:a,a", [], "must have a different name for each column"),
        ("csv", [], "must have a different name for each column"),
    ],
)
def test_an_invalid_format_is_an_error(wanted: str, lines: list[str], problem: str) -> None:
    with pytest.raises(ReplayError) as raised:
        choose_format(wanted, lines, "log", None)
    assert problem in str(raised.value)


def test_the_error_for_an_unknown_field_lists_the_fields() -> None:
    with pytest.raises(
        ReplayError, match=r"unknown field 'clinet' in this log \(combined\); use one of client, user"
    ):
        detected(COMBINED).getter("clinet")
    with pytest.raises(ReplayError, match=r"no time; set its field with --time.* The fields are a, b"):
        choose_format("csv:a,b", [], "log", None)[0].time()
    with pytest.raises(ReplayError, match="unknown field 'client' in this log"):
        choose_format("csv:a,time", [], "log", None)[0].getter("client")
    with pytest.raises(ReplayError, match="the format has no time"):
        choose_format("$remote_addr $status", [], "log", None)[0].time()


def test_the_format_is_detected_after_an_incomplete_line() -> None:
    assert choose_format("auto", ['{"ts": 1, "req', CADDY], "log", None)[0].name == "json"
    assert choose_format("auto", ["garbage", COMBINED], "log", None)[0].name == "combined"


@pytest.mark.parametrize("wanted", ["auto", "csv"])
@pytest.mark.parametrize("first_line", ["a,b\rc,d", "x" * 200_000 + ",y"])
def test_an_invalid_header_is_an_error(wanted: str, first_line: str) -> None:
    with pytest.raises(ReplayError, match="--format"):
        choose_format(wanted, [first_line], "log", None)


@given(st.text(), st.sampled_from(["auto", "csv"]))
def test_any_first_line_is_accepted_or_an_error(first_line: str, wanted: str) -> None:
    with suppress(ReplayError):
        choose_format(wanted, [first_line], "log", None)


@given(st.text(), st.sampled_from(["combined", "json", "csv:a,b,time", "headgate", NGINX_OWN, APACHE_OWN]))
def test_any_line_is_accepted_or_invalid(line: str, wanted: str) -> None:
    log_format, _ = choose_format(wanted, [], "log", None)
    with suppress(BadLine):
        assert log_format.read(line)
