"""What is shown of an answer is what the API says of the same request: text, origins, rounds, probabilities."""

from __future__ import annotations

import math
import re
from typing import Any

import httpx
import pytest
from browsing import Screen, Viewer, until
from playwright.async_api import expect

from tests.e2e.e2e_stack import RunningStack

pytestmark = pytest.mark.storm

METHOD = {"Method": "draft_model", "Draft_length": "4"}


async def ask(stack: RunningStack, body: dict[str, Any]) -> dict[str, Any]:
    """The same request as the page's, without a stream."""
    async with httpx.AsyncClient(base_url=stack.url, timeout=120) as http:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        answer = await http.post(path, json={**body, "stream": False, "stream_options": None})
    assert answer.status_code == 200, answer.text
    whole: dict[str, Any] = answer.json()
    return whole


async def test_tokens_are_told_apart_as_they_stream(screen: Screen, stack: RunningStack) -> None:
    await screen.settings(**METHOD, Max_tokens="600")
    body = await screen.requested()
    await until(screen, 20)
    assert await screen.panel().get_attribute("aria-busy") == "true"  # they come while it runs
    await screen.until_done()
    whole = await ask(stack, body)
    choice = whole["choices"][0]
    tokens = await screen.tokens()
    assert "".join(token.text for token in tokens) == choice["text"]
    assert (
        {"accepted", "corrected", "bonus", "target"} >= {token.origin for token in tokens} >= {"accepted", "corrected"}
    )
    num_accepted = sum(token.origin == "accepted" for token in tokens)
    counts = await screen.page.locator(".legend b").all_inner_texts()
    assert counts == [str(num_accepted), str(len(tokens) - num_accepted)]
    looks = (
        await screen.panel()
        .locator(".token:not(.blank)")
        .evaluate_all(
            """spans => spans.map(span => { const style = getComputedStyle(span);
           return [span.classList[1] === "accepted", style.color, style.textDecorationLine]; })"""
        )
    )
    marked, plain = ({tuple(look[1:]) for look in looks if look[0] is wanted} for wanted in (True, False))
    # Accepted tokens differ in colour and underline, each of which alone would do; the target's own all look alike.
    assert (len(marked), len(plain)) == (1, 1)
    assert all(one != other for one, other in zip(marked.pop(), plain.pop(), strict=True))


async def test_a_token_tells_its_round(screen: Screen, stack: RunningStack) -> None:
    """Under the pointer: probability, round, drafter, method; the same that the API annotates."""
    await screen.settings(**METHOD)
    body = await screen.requested()
    await screen.until_done()
    choice = (await ask(stack, body))["choices"][0]
    tokens = await screen.tokens()
    index = next(place for place, token in enumerate(tokens) if token.origin == "accepted" and token.text.strip())
    await screen.panel().locator(f'[data-token="{index}"]').hover()
    card = screen.page.get_by_role("tooltip")
    shown = await card.inner_text()
    assert "accepted" in shown
    assert stack.state.drafters[0] in shown
    assert re.search(r"Method\s+draft_model", shown)
    assert re.search(r"Round\s+\d+: [1-4] of [1-4] accepted", shown)
    percent = float((await card.locator(".own span").inner_text()).removesuffix(" %"))
    # In exact mode the law at a token is the same whoever drafted it.
    assert percent == pytest.approx(100 * math.exp(choice["logprobs"]["token_logprobs"][index]), abs=0.51)
    await screen.picture("token")
    await screen.check_accessible()


async def test_rounds_and_figures(screen: Screen) -> None:
    """The charts say what the legend counts: every token is of one round, and a round has one that was not drafted."""
    await screen.settings(**METHOD, Max_tokens="80")
    await screen.run()
    await screen.until_done()
    summary = await screen.page.locator(".rounds svg").get_attribute("aria-label") or ""
    num_rounds, num_drafted, accepted, drafted = map(int, re.findall(r"\d+", summary))
    tokens = await screen.tokens()
    assert accepted == sum(token.origin == "accepted" for token in tokens)
    assert num_rounds <= len(tokens) <= 80
    assert len(tokens) == 80 or "the model ended its answer" in await screen.panel().locator(".state").inner_text()
    figures = [await figure.inner_text() for figure in await screen.page.locator(".charts figcaption b").all()]
    assert float(figures[0]) == pytest.approx(1 + accepted / num_drafted, abs=0.006)
    assert float(figures[1]) == pytest.approx(drafted / num_drafted, abs=0.006)
    assert int(figures[2]) > 0


@pytest.mark.parametrize("sampling", [{"Temperature": "0"}, {"Temperature": "1", "Seed": "7"}])
async def test_side_by_side(screen: Screen, stack: RunningStack, sampling: dict[str, str]) -> None:
    await screen.settings(**METHOD, **sampling)
    await screen.page.get_by_role("switch", name="Compare").check()
    body = await screen.requested()
    for title in ("Speculation on", "Speculation off"):
        await screen.until_done(title)
    verdict = screen.page.locator(".verdict")
    await expect(verdict).to_contain_text("Identical.")
    assert await verdict.locator("svg.sign").is_visible()
    await expect(screen.page.locator(".speeds")).to_have_text(
        re.compile(r"^Speculation made .*: \d+ tokens per second with it, \d+ without\.$")
    )
    saved = re.compile(r"; speculation (saved|cost) (about [\d.]+ m?s|nothing here)$")
    await expect(screen.panel("Speculation on").locator(".figures")).to_have_text(saved)
    await expect(screen.panel("Speculation off").locator(".figures")).not_to_contain_text("speculation")
    expected = (await ask(stack, body))["choices"][0]["text"]
    assert await screen.text("Speculation on") == await screen.text("Speculation off") == expected
    assert {token.origin for token in await screen.tokens("Speculation off")} == {"target"}
    assert "accepted" in {token.origin for token in await screen.tokens("Speculation on")}
    await screen.check_accessible()


async def test_without_a_seed_two_draws_may_differ_and_the_page_says_so(screen: Screen) -> None:
    await screen.settings(**METHOD, Temperature="1.5", Seed="")
    await screen.page.get_by_role("switch", name="Compare").check()
    await screen.run()
    for title in ("Speculation on", "Speculation off"):
        await screen.until_done(title)
    assert await screen.text("Speculation on") != await screen.text("Speculation off")
    await expect(screen.page.locator(".verdict")).to_contain_text("Two samples of one distribution.")


async def test_a_chat(screen: Screen) -> None:
    page = screen.page
    await screen.choose("Chat")
    await page.get_by_role("button", name="gravity").click()
    await expect(page.get_by_label("Message", exact=True)).to_have_value("What is gravity?")
    await page.get_by_text("System message and tools").click()
    await screen.settings(System_message="Answer in code.", Max_tokens="24")
    for message in ("Write a stack.", "Now a queue."):
        await page.get_by_label("Message", exact=True).fill(message)
        async with page.expect_request("**/v1/chat/completions") as sent:
            await page.get_by_role("button", name="Send").click()
        body = (await sent.value).post_data_json
        # Until the question is drawn, what is drawn is the answer before it.
        await expect(page.locator(".turn.user .said").last).to_have_text(message)
        await screen.until_done()
    first, said, asked, second = [turn["content"] for turn in body["messages"]]
    assert (first, said, second) == ("Answer in code.", "Write a stack.", "Now a queue.")
    assert [turn["role"] for turn in body["messages"]] == ["system", "user", "assistant", "user"]
    assert (await page.locator(".turn.assistant .markdown").inner_text()).split() == asked.split()
    assert await screen.num_tokens() == 0
    await page.get_by_role("switch", name="Mark accepted tokens").check()
    assert await screen.num_tokens() > 0
    await page.get_by_role("button", name="New chat").click()
    await expect(page.get_by_text("Ask something")).to_be_visible()


async def test_the_form_says_what_is_asked(screen: Screen) -> None:
    await screen.page.get_by_text("Penalties and stop strings").first.click()
    await screen.settings(
        Method="ngram",
        Draft_length="3",
        Mode="rejection",
        Max_tokens="8",
        Temperature="0.9",
        Seed="5",
        Top_p="0.8",
        Top_k="40",
        Min_p="0.01",
        Presence="0.1",
        Frequency="0.2",
        Repetition="1.1",
        Predicted_output="class Stack:\n",
    )
    await screen.page.get_by_label("Stop strings, one per line").fill("never said\n\nnor this")
    await screen.page.get_by_label("Draft a tree of tokens").check()
    body = await screen.requested()
    assert body["speculation"] == {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "mode": "rejection",
        "token_tree": True,
        "annotate": True,
    }
    sampling = {"max_tokens": 8, "temperature": 0.9, "seed": 5, "top_p": 0.8, "top_k": 40, "min_p": 0.01}
    penalties = {"presence_penalty": 0.1, "frequency_penalty": 0.2, "repetition_penalty": 1.1}
    assert body.items() >= {**sampling, **penalties, "stop": ["never said", "nor this"]}.items()
    assert body["prediction"] == {"type": "content", "content": "class Stack:\n"}
    await screen.until_done()


async def test_pictures(viewer: Viewer, stack: RunningStack) -> None:
    """A comparison in dark colours, which the documentation shows; axe looks at it too."""
    screen = await viewer.open(stack.url, scheme="dark")
    await screen.check_accessible()
    await screen.page.get_by_role("switch", name="Compare").check()
    await screen.run()
    await expect(screen.page.locator(".verdict")).to_contain_text("Identical.")
    await screen.check_accessible()
    await screen.picture("compare")
