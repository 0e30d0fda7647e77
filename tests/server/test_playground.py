"""The chat page over HTTP: what is served, under which policy, and to whom."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from server.playground import page
from tests.server.scripted import serving


class Page(HTMLParser):
    """What a page loads, its ids, what its labels are for, and its fields."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.ids: set[str] = set()
        self.labelled: set[str] = set()
        self.fields: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attributes}
        self.loads += [given[name] for name in ("src", "href") if name in given]
        self.ids |= {given["id"]} if "id" in given else set()
        self.labelled |= {given["for"]} if "for" in given else set()
        if tag in ("input", "select", "textarea"):
            self.fields.add(given["id"])
        assert "style" not in given and not any(name.startswith("on") for name in given), tag


def test_the_page_is_public_and_nothing_else_becomes_so() -> None:
    with serving(api_key=("k",)) as server:
        for path, (name, media_type) in page.FILES.items():
            response = server.http.get(path)
            assert response.status_code == 200
            assert response.headers["content-type"].startswith(media_type)
            assert response.content == (page.FOLDER / name).read_bytes()
            assert server.http.head(path).status_code == 200
            assert server.http.post(path).status_code == 405
        near = ["/playground", "/playground/", "/playground/index.html", "/playground/page.py"]
        near += ["//", "/index.html", "/playground/../status", "/playground/app.js/"]
        for path in [*near, "/v1/models", "/status"]:
            assert server.http.get(f"{server.base_url}{path}").status_code == 401, path


@pytest.mark.parametrize("path", page.FILES)
def test_a_strict_policy_comes_with_each_file(path: str) -> None:
    with serving() as server:
        headers = server.http.get(path).headers
    rules = headers["content-security-policy"].split("; ")
    policy = {name: value for name, _, value in (rule.partition(" ") for rule in rules)}
    assert policy.pop("default-src") == "'none'"
    assert policy.pop("img-src") == "data:"
    assert set(policy.values()) == {"'self'", "'none'"}
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"


def test_it_loads_only_what_is_served_here_and_every_field_has_a_label() -> None:
    text = (page.FOLDER / "index.html").read_text()
    parsed = Page(text)
    served = {f"/{load}" for load in parsed.loads if not load.startswith("data:")}
    assert served == page.FILES.keys() - {"/"}
    assert parsed.fields <= parsed.labelled
    script = (page.FOLDER / "app.js").read_text()
    used = set(re.findall(r'part\("([\w-]+)"\)', script))
    assert used and used <= parsed.ids
    for source in (text, script, (page.FOLDER / "style.css").read_text()):
        assert "http:" not in source and "https:" not in source
    assert "innerHTML" not in script and "eval(" not in script


def test_a_server_can_do_without() -> None:
    with serving(playground=False) as server:
        for path in page.FILES:
            assert server.http.get(path).status_code == 404
    with serving(playground=False, api_key=("k",)) as server:
        for path in page.FILES:
            assert server.http.get(path).status_code == 401
