"""The chat page in a real Chromium, in front of a real front end: what a person types, sees and
hears, by keyboard alone, and that nothing but this server is ever asked."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

from engine.messages import Submit
from engine.types import TokenOut
from tests.server.scripted import MODEL_NAME, Script, Server, reply, serving
from tests.server.stream import SPOKEN, TEXT

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
# Nothing of the browser's own may go anywhere either: every name but this machine is unknown.
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]
FIGURES = re.compile(
    r"^first token after [\d.]+ m?s · \d+ prompt tokens, \d+ cached · \d+ answer tokens"
    r" · [\d.]+ tokens/s$"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield started
        started.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as running:
        running.add_worker(reply(SPOKEN))
        yield running


@dataclass
class Seen:
    """What a page has done beside showing itself."""

    urls: list[str] = field(default_factory=list)
    bodies: list[Any] = field(default_factory=list)  # of what was asked
    complaints: list[str] = field(default_factory=list)  # of the browser: errors, refused loads


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
def page(browser: Browser, seen: Seen) -> Iterator[Page]:
    context = browser.new_context()
    context.set_default_timeout(60_000)
    opened = context.new_page()
    opened.on("request", lambda request: seen.urls.append(request.url))
    opened.on("request", lambda r: r.post_data and seen.bodies.append(r.post_data_json))
    opened.on("pageerror", lambda error: seen.complaints.append(str(error)))
    opened.on(
        "console",
        lambda said: said.type == "error" and seen.complaints.append(said.text),
    )
    yield opened
    context.close()


def opened(page: Page, server: Server) -> Page:
    page.goto(f"{server.base_url}/")
    expect(page.get_by_label("Model")).to_have_value(MODEL_NAME)
    return page


def prompt_of(page: Page) -> Locator:
    return page.get_by_role("textbox", name="Message", exact=True)


def gated(num_tokens: int) -> tuple[Script, threading.Event]:
    """Says so many tokens of SPOKEN, and the rest once the event is set."""
    goes_on = threading.Event()

    def script(submit: Submit) -> Iterator[TokenOut | None]:
        for number, out in enumerate(reply(SPOKEN)(submit)):
            while number == num_tokens and not goes_on.is_set():
                yield None
            yield out

    return script, goes_on


def test_a_question_is_answered_as_it_streams_and_figures_are_shown(page: Page, seen: Seen) -> None:
    script, goes_on = gated(4)
    with serving() as server:
        server.add_worker(script)
        opened(page, server)
        prompt_of(page).fill("hello <b>you</b>")
        page.get_by_role("button", name="Send").click()
        answer = page.locator(".assistant .text")
        expect(answer).not_to_be_empty()
        shown = answer.inner_text()
        assert TEXT.startswith(shown) and shown != TEXT, "a part of it, while it streams"
        expect(page.locator(".assistant")).to_have_attribute("aria-busy", "true")
        expect(page.get_by_role("button", name="Send")).to_be_disabled()
        goes_on.set()
        expect(answer).to_have_text(TEXT)
        expect(page.locator(".assistant .figures")).to_have_text(FIGURES)
        expect(page.locator(".user .text")).to_have_text("hello <b>you</b>")
        expect(page.get_by_role("status")).to_contain_text(TEXT)  # what a screen reader says
        expect(page.get_by_role("button", name="Send")).to_be_enabled()

        prompt_of(page).fill("and then?")
        prompt_of(page).press("Enter")
        expect(page.locator(".assistant .text")).to_have_count(2)
        expect(page.locator(".assistant .figures").nth(1)).to_have_text(FIGURES)
        roles = [message["role"] for message in seen.bodies[-1]["messages"]]
        assert roles == ["user", "assistant", "user"]
        page.get_by_role("button", name="New chat").click()
        expect(page.locator(".assistant")).to_have_count(0)
        assert seen.complaints == []


@pytest.mark.parametrize("how", ["Escape", "button"])
def test_an_answer_can_be_stopped(page: Page, how: str) -> None:
    script, _ = gated(4)
    with serving() as server:
        worker = server.add_worker(script)
        opened(page, server)
        prompt_of(page).fill("hello")
        page.keyboard.press("Enter")
        expect(page.locator(".assistant .text")).not_to_be_empty()
        if how == "Escape":
            page.keyboard.press("Escape")
        else:
            page.get_by_role("button", name="Stop").click()
        expect(page.locator(".assistant .figures")).to_contain_text("stopped")
        expect(page.get_by_role("button", name="Stop")).to_be_disabled()
        expect(prompt_of(page)).to_be_focused()
        assert worker.aborts.get(timeout=60).rid == worker.submits.get(timeout=60).request.rid


def test_everything_is_reached_by_keyboard(page: Page, server: Server, seen: Seen) -> None:
    opened(page, server)
    expect(prompt_of(page)).to_be_focused()
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    expect(prompt_of(page)).to_have_value("one\ntwo")

    reached = []
    for _ in range(7):
        page.keyboard.press("Tab")
        focused = "document.activeElement"
        reached.append(page.evaluate(f"{focused}.id || {focused}.tagName"))
        if reached[-1] == "SUMMARY":
            page.keyboard.press("Enter")  # opens the settings
    assert reached == ["send", "SUMMARY", "model", "temperature", "max-tokens", "key", "system"]
    page.get_by_label("Most tokens").focus()
    page.keyboard.press("Control+A")
    page.keyboard.type("3")
    page.get_by_label("Temperature").focus()
    page.keyboard.press("ArrowUp")
    page.get_by_label("System message").focus()
    page.keyboard.type("Be brief.")
    prompt_of(page).focus()
    page.keyboard.press("Enter")
    expect(page.locator(".assistant .figures")).to_contain_text("ended at its most tokens")
    asked = seen.bodies[-1]
    assert (asked["max_tokens"], asked["temperature"], asked["model"]) == (3, 0.1, MODEL_NAME)
    assert asked["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one\ntwo"},
    ]


def test_nothing_but_this_server_is_asked(page: Page, server: Server, seen: Seen) -> None:
    opened(page, server)
    prompt_of(page).fill("hello")
    page.keyboard.press("Enter")
    expect(page.locator(".assistant .figures")).to_have_text(FIGURES)
    assert {url for url in seen.urls if not url.startswith("data:")} == {
        f"{server.base_url}{path}"
        for path in (
            "/",
            "/playground/style.css",
            "/playground/app.js",
            "/v1/models",
            "/v1/chat/completions",
        )
    }
    # The policy holds: neither markup nor another server is let in.
    refused = page.evaluate(
        """async () => {
          const script = document.createElement("script");
          script.textContent = "window.got_in = true";
          document.body.append(script);
          const fetched = fetch("https://example.com/");
          return [window.got_in ?? false, await fetched.then(() => "let in", () => "refused")];
        }"""
    )
    assert refused == [False, "refused"]
    assert sum("Content Security Policy" in said for said in seen.complaints) >= 2


def test_a_key_is_asked_for_and_kept_in_the_tab_only(page: Page) -> None:
    with serving(api_key=("sesame",)) as server:
        server.add_worker(reply(SPOKEN))
        page.goto(f"{server.base_url}/")
        expect(page.get_by_role("alert")).to_contain_text("an API key is needed")
        key = page.get_by_label("API key")
        expect(key).to_be_visible()
        key.fill("wrong")
        key.blur()
        expect(page.get_by_role("alert")).to_contain_text("is not one of this server's")
        key.fill("sesame")
        key.blur()
        expect(page.get_by_label("Model")).to_have_value(MODEL_NAME)
        expect(page.get_by_role("alert")).to_be_hidden()
        page.reload()
        expect(page.get_by_label("Model")).to_have_value(MODEL_NAME)
        prompt_of(page).fill("hello")
        page.keyboard.press("Enter")
        expect(page.locator(".assistant .text")).to_have_text(TEXT)
        assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]


def test_errors_are_shown_in_the_servers_words(page: Page, server: Server) -> None:
    opened(page, server)
    page.get_by_text("Settings").click()
    page.get_by_label("Most tokens").fill("100000")
    prompt_of(page).fill("hello")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("100000")
    expect(prompt_of(page)).to_have_value("hello")  # to be asked again
    expect(page.locator("#log li")).to_have_count(0)

    page.get_by_label("Most tokens").fill("0")  # the page knows itself that this is none
    prompt_of(page).press("Enter")
    expect(page.get_by_label("Most tokens")).to_be_focused()

    page.get_by_label("Most tokens").fill("")
    script, _ = gated(3)
    with serving() as ending:
        ending.add_worker(script)
        opened(page, ending)
        prompt_of(page).fill("hello")
        page.keyboard.press("Enter")
        expect(page.locator(".assistant .text")).not_to_be_empty()
        ending.call(lambda: ending.client.requests.fail_all("the server is shutting down"))
        expect(page.get_by_role("alert")).to_have_text("the server is shutting down")
        expect(page.locator(".assistant .text")).not_to_be_empty()  # what came stays


def test_a_server_that_is_gone_is_said(page: Page) -> None:
    with serving() as server:
        server.add_worker(reply(SPOKEN))
        opened(page, server)
    prompt_of(page).fill("hello")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_have_text("the server cannot be reached")


def test_light_and_dark_follow_the_system_and_can_be_read(page: Page, server: Server) -> None:
    opened(page, server)
    backs = []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        style = "getComputedStyle(document.body)"
        back, text = page.evaluate(f"[{style}.backgroundColor, {style}.color]")
        backs.append(back)
        assert contrast(back, text) >= 7
        quiet = page.evaluate('getComputedStyle(document.getElementById("keys")).color')
        assert contrast(back, quiet) >= 4.5
    assert luminance(backs[0]) > 0.8 and luminance(backs[1]) < 0.1


def luminance(color: str) -> float:
    """Relative, of rgb(r, g, b), as WCAG 2 defines it."""
    channels = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)
