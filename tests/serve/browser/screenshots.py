"""Takes the pictures of docs/observe.md: `python -m tests.serve.browser.screenshots`, with Chromium installed.

They show the built-in model on this machine's CPU: the replies are its own, the load is made here.
"""

from __future__ import annotations

import asyncio
import math
import random
import tempfile
import threading
import time
from pathlib import Path

import httpx

from tests.serve.browser.webdriver import Browser
from tests.serve.running import running

IMAGES = Path(__file__).parents[3] / "docs" / "images"
SYSTEM = "You solve exercises. Show each step, then give the answer in a line of its own."
# Little room, so that the picture shows what happens where there is no more.
OPTIONS = ("--served-model-name", "strata-builtin", "--max-num-seqs", "16", "--num-pages", "200")
QUESTIONS = [
    "How many letters e are in 'sentence'?",
    "Sort these numbers: 42, 7, 93, 18, 65",
    "What is 47 + 38?",
]
LOAD_SECONDS = 150.0


async def load(url: str, seconds: float) -> None:
    """Users who come and go: at most 24 at once, in two waves."""
    start = time.monotonic()
    chance = random.Random(0)

    async def user(client: httpx.AsyncClient, number: int) -> None:
        while (passed := time.monotonic() - start) < seconds:
            if number >= 12 - 11 * math.cos(4 * math.pi * passed / seconds):
                await asyncio.sleep(0.5)
                continue
            question = f"What is {chance.randrange(100, 1000)} + {chance.randrange(100, 1000)}?"
            messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
            body = {"messages": messages, "max_tokens": chance.randrange(40, 200), "ignore_eos": True, "stream": True}
            await client.post(f"{url}/v1/chat/completions", json=body)
            await asyncio.sleep(chance.expovariate(2))

    async with httpx.AsyncClient(timeout=60) as client:
        await asyncio.gather(*(user(client, number) for number in range(24)))


def chat(browser: Browser, url: str) -> None:
    """A few conversations, the newest one open."""
    browser.open(url)
    browser.click("#settings-toggle")
    browser.write("#temperature", "0")
    browser.click("#settings-close")
    for question in QUESTIONS:
        browser.click("#new")
        ask(browser, question)
    ask(browser, "Reverse the word 'planet'.")


def ask(browser: Browser, question: str) -> None:
    browser.write("#prompt", question)
    browser.press("Enter")
    browser.wait(lambda: browser.sees("#send"), "the reply", 60)


def picture(browser: Browser, name: str, scheme: str) -> None:
    browser.cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    browser.cdp("Input.dispatchMouseEvent", type="mouseMoved", x=700, y=560)
    time.sleep(1.5)
    browser.screenshot(IMAGES / name)


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as profile,
        Browser(Path(profile), width=1280, height=900) as browser,
        running(*OPTIONS) as server,
    ):
        chat(browser, server.url)
        picture(browser, "chat-light.png", "light")
        browser.click("#settings-toggle")
        picture(browser, "chat-dark.png", "dark")
        browser.open(f"{server.url}/live")
        browser.resize(1280, 1130)
        users = threading.Thread(target=asyncio.run, args=[load(server.url, LOAD_SECONDS)])
        users.start()
        time.sleep(LOAD_SECONDS * 0.9)
        browser.cdp("Input.dispatchMouseEvent", type="mouseMoved", x=640, y=90)
        picture(browser, "live.png", "light")
        users.join()


if __name__ == "__main__":
    main()
