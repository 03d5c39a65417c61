"""The dashboard's files, as a browser gets them."""

from __future__ import annotations

import re
from importlib import resources

import pytest

from tests.server.support import Server, problem


async def test_the_page_is_html_and_may_load_nothing_from_elsewhere() -> None:
    response = await Server().client.get("/")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'self'" in response.headers["content-security-policy"]
    assert "frame-ancestors 'none'" in response.headers["content-security-policy"]
    assert response.headers["referrer-policy"] == "no-referrer"
    assert response.headers["x-content-type-options"] == "nosniff"


async def test_everything_that_the_page_names_is_there() -> None:
    server = Server()
    page = (await server.client.get("/")).text
    names = re.findall(r'(?:src|href)="(/?static/[^"]+)"', page)
    assert names
    for name in names:
        assert (await server.client.get(f"/{name.lstrip('/')}")).status_code == 200


@pytest.mark.parametrize(
    ("ending", "media_type"), [(".js", "text/javascript; charset=utf-8"), (".css", "text/css; charset=utf-8")]
)
async def test_files_have_their_types(ending: str, media_type: str) -> None:
    folder = resources.files("headgate_server").joinpath("static")
    names = [file.name for file in folder.iterdir() if file.name.endswith(ending)]
    assert names
    for name in names:
        response = await Server().client.get(f"/static/{name}")
        assert response.headers["content-type"] == media_type
        assert response.content == folder.joinpath(name).read_bytes()


async def test_a_file_that_is_known_is_not_sent_again() -> None:
    client = Server().client
    first = await client.get("/")
    again = await client.get("/", headers={"if-none-match": f'"other", {first.headers["etag"]}'})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == first.headers["etag"]
    assert "content-length" not in again.headers
    assert (await client.get("/", headers={"if-none-match": '"other"'})).status_code == 200


async def test_a_head_has_no_body_but_its_length() -> None:
    client = Server().client
    head, page = await client.head("/"), await client.get("/")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(page.content))


@pytest.mark.parametrize(
    "name", ["nothing.js", "%2e%2e", "%2e%2e%2fapp.py", "../__init__.py", "index.html%00"]
)
async def test_other_files_are_not_there(name: str) -> None:
    assert problem(await Server().client.get(f"/static/{name}"), 404)
