"""The page in a browser. All tests share one gateway over real peers; those that kill peers come last."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from client.gateway.keys import Keys
from tests.cases.peer_set import PeerSet
from tests.client.gateway.page.browser import PATIENCE_MS, PHONE, Visitor, chromium
from tests.client.gateway.real_gateway import BACK, FRONT, HOSTILE, real_gateway, start_peers
from tests.client.gateway.toy_gateway import toy_gateway
from tests.conftest import ChatIds, GreedyReference
from tests.harness import wait_until

QUESTION = "What is the capital of France?"
LONG = "Write a long story about a lighthouse."
FINISHED = ".answer[aria-busy=false]"
expect.set_options(timeout=PATIENCE_MS)


@dataclass
class GatewayUnderTest:
    peer_set: PeerSet
    url: str

    @property
    def state(self) -> dict[str, Any]:
        (model,) = httpx.get(f"{self.url}/api/swarm", timeout=60).json()["models"]
        return dict(model)


@pytest.fixture(scope="module")
def served(gateway_peers: PeerSet, smollm2_package: Path) -> Iterator[GatewayUnderTest]:
    start_peers(gateway_peers, smollm2_package)
    with real_gateway(gateway_peers["anna"].address) as gateway:
        yield GatewayUnderTest(gateway_peers, gateway.url)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def visitor(browser: Browser, served: GatewayUnderTest) -> Visitor:
    """Depends on the browser first: without one no peer is started."""
    return Visitor(browser, served.url)


def ask(page: Page, question: str) -> None:
    page.get_by_label("Your message").fill(question)
    page.keyboard.press("Enter")


def setting(page: Page, name: str, value: str) -> None:
    page.locator(f"#settings [name={name}]").fill(value)


def width_beyond(page: Page) -> int:
    """Pixels by which the page is wider than the window."""
    beyond: int = page.evaluate("Math.max(...['html', 'main:not([hidden])'].map(s => document.querySelector(s))"
                                ".map(e => e.scrollWidth - e.clientWidth))")  # fmt: skip
    return beyond


def test_a_question_gets_a_streamed_answer_with_its_hops(
    visitor: Visitor,
    chat_ids: ChatIds,
    greedy_reference: GreedyReference,
    smollm2_tokenizer: Any,
) -> None:
    text = smollm2_tokenizer.decode(greedy_reference(chat_ids(QUESTION), 8)[:7])
    with visitor.visit() as page:
        expect(page.get_by_text("30 layers on 2 machines")).to_be_visible()
        ask(page, QUESTION)
        expect(page.locator(".question .message")).to_have_text(QUESTION)
        expect(page.locator(f"{FINISHED} .message")).to_have_text(text)
        expect(page.locator(".answer .stats")).to_contain_text(re.compile(r"8 tokens · .* tokens/s · first after"))
        hops = page.get_by_role("list", name="Hops of this answer").get_by_role("listitem")
        expect(hops).to_contain_text([re.compile(rf"anna.*{FRONT}.* ms"), re.compile(rf"{BACK}.* ms")])
        page.get_by_text("Where the time of a token went").click()
        expect(page.get_by_role("row", name="a token")).to_be_visible()

        # the next turn knows the first one
        ask(page, "And of Italy?")
        expect(page.locator(FINISHED)).to_have_count(2)
        for _ in range(2):
            page.get_by_role("button", name=re.compile("Copy as curl|Copied")).last.click()
        expect(page.get_by_role("button", name="Copy as curl")).to_have_count(2)  # its name is restored
        words = shlex.split(page.evaluate("navigator.clipboard.readText()"))
        sent = json.loads(words[words.index("-d") + 1])
        assert [message["content"] for message in sent["messages"]] == [QUESTION, text, "And of Italy?"]
        assert words[:3] == ["curl", "-N", f"{visitor.url}/v1/chat/completions"]
        assert httpx.post(words[2], json=sent, timeout=60).text.endswith("data: [DONE]\n\n")

        page.get_by_role("button", name="New chat").click()
        expect(page.get_by_role("heading", name="Ask the swarm")).to_be_visible()


def test_stop_ends_the_answer_on_the_page_and_on_the_hops(visitor: Visitor, served: GatewayUnderTest) -> None:
    with visitor.visit() as page:
        for stop in ("button", "key"):
            ask(page, LONG)
            answer = page.locator(".answer").last
            expect(answer.locator(".message")).to_have_text(re.compile(r"\w+ \w+"))
            assert answer.get_attribute("aria-busy") == "true"  # there is text before the answer is complete
            if stop == "button":
                page.get_by_role("button", name="Stop").click()
            else:
                page.keyboard.press("Escape")
            expect(answer.locator(".stats")).to_contain_text("stopped after")
            expect(page.get_by_role("button", name="Send")).to_be_visible()
        wait_until(lambda: not served.state["routes_in_use"], "the hops are free")


def test_settings_are_sent_checked_and_kept(visitor: Visitor) -> None:
    with visitor.visit() as page:
        page.get_by_role("button", name="Settings").click()
        setting(page, "temperature", "9")
        ask(page, QUESTION)
        assert page.locator(".turn").count() == 0
        expect(page.locator("#settings [name=temperature]")).to_be_focused()
        for name, value in {"temperature": "0.5", "max_tokens": "5", "seed": "7", "stop": "Rome\nOslo"}.items():
            setting(page, name, value)
        setting(page, "system", "Answer in French.")
        with page.expect_request("**/v1/chat/completions") as sent:
            page.get_by_label("Your message").press("Enter")
        body = dict(sent.value.post_data_json or {})
        assert body["messages"][0] == {"role": "system", "content": "Answer in French."}
        assert {name: body.get(name) for name in ("temperature", "max_tokens", "seed", "stop", "top_p")} == {
            "temperature": 0.5,
            "max_tokens": 5,
            "seed": 7,
            "stop": ["Rome", "Oslo"],
            "top_p": None,
        }
        expect(page.locator(".answer .stats")).to_contain_text("5 tokens")
        setting(page, "max_tokens", "1000000")
        ask(page, QUESTION)
        expect(page.get_by_role("alert")).to_contain_text("the context of")  # the page shows the gateway's message
        setting(page, "max_tokens", "5")
        page.get_by_role("button", name="Try again").click()
        expect(page.locator(".answer .stats").last).to_contain_text("5 tokens")
        page.reload()
        assert page.locator("#settings [name=seed]").input_value() == "7"


def test_the_theme_follows_the_system_until_it_is_chosen(visitor: Visitor) -> None:
    def ground(page: Page) -> str:
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    with visitor.visit(theme="dark") as page:
        dark = ground(page)
        page.emulate_media(color_scheme="light")
        light = ground(page)
        assert dark != light
        page.get_by_role("button", name="Theme: auto").click()
        page.get_by_role("button", name="Theme: light").click()
        assert ground(page) == dark
        page.reload()
        expect(page.get_by_role("button", name="Theme: dark")).to_be_visible()
        assert ground(page) == dark


def test_the_page_fits_on_a_phone(visitor: Visitor) -> None:
    with visitor.visit(size=PHONE) as page:
        ask(page, QUESTION)
        expect(page.locator(FINISHED)).to_be_visible()
        page.get_by_text("Where the time of a token went").click()
        assert width_beyond(page) <= 0
        page.get_by_role("button", name="Settings").click()
        assert width_beyond(page) <= 0
        page.get_by_role("button", name="Close").click()
        page.get_by_role("link", name="Swarm", exact=True).click()
        expect(page.get_by_role("row").filter(has_text="anna")).to_be_visible()
        assert width_beyond(page) <= 0


def test_everything_works_with_the_keyboard(visitor: Visitor) -> None:
    def tab_to(page: Page, *, what: str, back: bool = False) -> None:
        for _ in range(30):
            page.keyboard.press("Shift+Tab" if back else "Tab")
            focused = page.evaluate(
                "[document.activeElement.innerText, document.activeElement.ariaLabel].join(' ').trim()"
            )
            if what in focused:
                assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
                return
        pytest.fail(f"{what} was not reached")

    with visitor.visit() as page:
        expect(page.get_by_label("Your message")).to_be_focused()
        page.keyboard.type("Hello")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("there")
        assert page.get_by_label("Your message").input_value() == "Hello\nthere"
        page.keyboard.press("Enter")
        expect(page.locator(".answer .message")).to_have_text(re.compile(r"\w"))
        page.keyboard.press("Escape")
        tab_to(page, what="Copy as curl", back=True)
        page.keyboard.press("Enter")
        expect(page.locator("#status")).to_have_text("Copied")
        tab_to(page, what="Settings")
        page.keyboard.press("Enter")
        expect(page.locator("#model")).to_be_focused()
        page.keyboard.press("Escape")
        expect(page.locator("#settings")).to_be_hidden()
        tab_to(page, what="Swarm", back=True)
        page.keyboard.press("Enter")
        expect(page.get_by_role("table")).to_be_visible()


def test_names_from_the_swarm_are_text(visitor: Visitor) -> None:
    with visitor.visit("#swarm") as page:
        expect(page.get_by_role("rowheader").filter(has_text=HOSTILE)).to_be_visible()
        assert page.locator("#swarm img").count() == 0
        # The browser also forbids the page to make markup.
        assert page.evaluate("try { document.body.innerHTML = '' } catch (error) { error.name }") == "TypeError"


def test_events_are_parsed_from_pieces_of_any_size(visitor: Visitor) -> None:
    with visitor.visit() as page:
        found = page.evaluate("""async () => {
            const { EventParser } = await import("/api.js");
            const text = ": still here\\n\\ndata: one\\r\\n\\r\\ndata: two\\ndata:three\\n\\ndata: unfinished";
            return [...text].map((_, size) => {
                const parser = new EventParser();
                const pieces = text.match(new RegExp(`[^]{1,${size + 1}}`, "g"));
                return pieces.flatMap((piece) => parser.push(piece));
            });
        }""")
        assert all(each == ["one", "two\nthree"] for each in found)


def test_a_swarm_without_models_says_so_until_there_is_one(visitor: Visitor) -> None:
    with visitor.visit() as page:
        texts = page.evaluate("""async () => {
            const { SwarmView } = await import("/swarm.js");
            const [view, models] = [new SwarmView(), document.getElementById("models")];
            const shown = (state) => (view.show(state), models.innerText || models.textContent);
            const state = await (await fetch("/api/swarm")).json();
            return [{ models: [] }, { models: [] }, state].map(shown);
        }""")
        assert [text.count("No model is offered yet.") for text in texts] == [1, 1, 0]


def test_the_page_asks_for_a_key_where_the_gateway_needs_one(visitor: Visitor) -> None:
    with toy_gateway(keys=Keys(["sk-the-key-of-tests"])) as gateway:
        keyed = Visitor(visitor.browser, gateway.url)
        with keyed.visit() as page:
            page.get_by_label("Key", exact=True).fill("wrong")
            page.keyboard.press("Enter")
            expect(page.locator("#key-message")).to_contain_text("does not accept this key")
            page.keyboard.press("Escape")  # the dialog returns only with the next question
            expect(page.get_by_role("dialog")).to_be_hidden()
            ask(page, "abc")
            expect(page.get_by_role("dialog")).to_be_visible()
            page.keyboard.press("Escape")
            expect(page.get_by_role("alert")).to_contain_text("the API key is wrong")
            expect(page.get_by_role("dialog")).to_be_hidden()
            page.get_by_role("button", name="API key").click()
            page.get_by_label("Key", exact=True).fill("sk-the-key-of-tests")
            page.keyboard.press("Enter")
            page.get_by_role("button", name="New chat").click()
            expect(page.get_by_text("layers on 3 machines")).to_be_visible()
            ask(page, "abc")
            expect(page.locator(".answer .stats")).to_contain_text("tokens")
            page.get_by_role("link", name="Swarm", exact=True).click()
            expect(page.get_by_role("row")).to_have_count(5)
        refused = [text for text in keyed.complaints if "401" not in text]  # the browser's message for each refusal
        assert refused == []


def test_a_killed_peer_is_shown_while_the_answer_goes_on(
    visitor: Visitor,
    served: GatewayUnderTest,
    chat_ids: ChatIds,
    greedy_reference: GreedyReference,
    smollm2_tokenizer: Any,
) -> None:
    text = smollm2_tokenizer.decode(greedy_reference(chat_ids(LONG), 120))
    with visitor.visit("#swarm") as watching, visitor.visit() as talking:
        rows = watching.locator(".peers tbody tr")
        expect(rows).to_have_count(3)
        assert set(rows.evaluate_all("rows => rows.map(row => row.dataset.condition)")) == {"serving"}
        expect(watching.get_by_text("the next answer's route")).to_be_visible()
        talking.get_by_role("button", name="Settings").click()
        setting(talking, "max_tokens", "120")
        ask(talking, LONG)
        expect(talking.locator(".answer .message")).to_have_text(re.compile(r"\w+ \w+"))
        (route,) = (r for r in served.state["routes_in_use"] if r["tokens"] > 1)
        victim = route["hops"][1]
        served.peer_set[victim["name"]].kill()

        row = watching.locator(f"""tr[data-peer="{victim["peer_id"]}"]""")
        expect(row).to_have_attribute("data-condition", re.compile("lost|gone"))
        expect(row).to_contain_text(victim["name"])  # its row fades and stays
        events = watching.get_by_role("log", name="What happened")
        expect(events).to_contain_text(re.compile(re.escape(victim["name"]) + " (does not answer|is gone)"))
        expect(rows).to_have_count(3)

        expect(talking.locator(f"{FINISHED} .message")).to_have_text(text)
        expect(talking.locator(".answer .stats")).to_contain_text("route repaired 1 time")

        served.peer_set["anna"].kill()
        expect(watching.get_by_text("not covered")).to_be_visible()
        expect(events).to_contain_text(f"no peer serves the layers {FRONT}")


def test_the_browser_logged_no_errors_and_requested_no_other_site(visitor: Visitor) -> None:
    provoked = re.compile("400|TrustedHTML")  # a refused request; markup made by a test
    assert [text for text in visitor.complaints if not provoked.search(text)] == []
    assert {url for url in visitor.requested if not url.startswith(f"{visitor.url}/")} == set()
