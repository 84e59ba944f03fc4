"""Serves a browser for browser.py's episodes, and a small shop to browse. It needs nothing of fsbarrier.

    python3 -m venv /shared/envs/mine
    /shared/envs/mine/bin/pip install playwright websockets
    /shared/envs/mine/bin/python browser_server.py PORT     serves until Chromium ends; environment.command does this
    python3 browser_server.py --tasks DIR                       writes train.jsonl and test.jsonl, about the shop

It uses the system's Chromium (`apt install chromium`), or else the one that `playwright install chromium` has fetched. A WebSocket is one
episode, and has a private window. It takes one action after the other, as JSON, and answers what the window then shows. A path, such as
/item/3, is a page of the shop; `open` takes any other address too.
"""

from __future__ import annotations

import asyncio
import base64
import html
import json
import os
import random
import shutil
import sys
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

if TYPE_CHECKING:
    from playwright.async_api import Browser, BrowserContext
    from websockets.asyncio.server import ServerConnection

SIZE = {"width": 1280, "height": 768}
#: the time limit of an action, and the pause after it in which the page settles: nothing signals when a page has finished
ACTION_S, SETTLE_S = 120, 0.3
GOODS = [
    " ".join(words)
    for words in product(
        ("red", "small", "old", "silent", "heavy", "striped"), ("lamp", "chair", "clock", "kettle", "boat")
    )
]
HEAD = """<!doctype html><meta charset="utf-8"><title>Shop</title><style>
body { font: 28px sans-serif; margin: 0 60px; color: #222 } header { padding: 24px 0; border-bottom: 4px solid #27c }
a { color: #15a; display: block; padding: 14px 0 } input, button { font: inherit; padding: 8px 20px; width: 500px }
b { font-size: 60px; color: #b20 }
</style><header><form action="/search"><input name="q" placeholder="Search the shop"></form></header>"""


# --- the shop -------------------------------------------------------------------------------------------------------------


def facts(number: int) -> tuple[str, int]:
    """The price of a good, and the number that its order gets."""
    rng = random.Random(number)
    return f"{rng.randrange(3, 90)}.{rng.randrange(10, 100)}", rng.randrange(1000, 10000)


def page(address: str) -> str | None:
    """A page of the shop; None: there is no such page."""
    url = urlsplit(address)
    match url.path.strip("/").split("/"):
        case ["" | "search"]:
            words = parse_qs(url.query).get("q", [""])[0].lower().split()
            matches = [n for n, name in enumerate(GOODS) if all(word in name for word in words)]
            links = "".join(f'<a href="/item/{n}">{GOODS[n]}</a>' for n in matches)
            return f"{HEAD}<h2>{html.escape(' '.join(words)) or 'All goods'}</h2>{links or 'Nothing found.'}"
        case ["item" | "order" as what, number] if number.isdecimal() and int(number) < len(GOODS):
            price, order = facts(int(number))
            button = f'<form action="/order/{number}"><button>Order it</button></form>'
            text = f"<p><b>{price}</b><p>{button}" if what == "item" else f"<p>Your order: <b>{order}</b>"
            return f"{HEAD}<h2>A {GOODS[int(number)]}</h2>{text}"
    return None


class Shop(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        content = page(self.path)
        self.send_response(200 if content else 404)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write((content or "not found").encode())

    def log_message(self, *_: object) -> None:
        pass


def write_tasks(folder: Path) -> None:
    """Write tasks of three levels: prices of goods at the top are easy, others must be searched for, and an order takes one more step."""
    order = random.Random(0).sample(range(len(GOODS)), len(GOODS))
    for split, numbers in (("train", order[6:]), ("test", order[:6])):
        lines = []
        for number in numbers:
            price, ordered = facts(number)
            asked = (
                (1 if number < 8 else 4, f"What does the {GOODS[number]} cost?", price),
                (7, f"Order the {GOODS[number]}. What is the number of your order?", str(ordered)),
            )
            for level, text, answer in asked:
                prompt = [{"role": "user", "content": text}]
                lines.append({"prompt": prompt, "answer": answer, "url": "/", "difficulty": level})
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


# --- the browser ----------------------------------------------------------------------------------------------------------


async def do(context: BrowserContext, site: str, action: dict[str, Any]) -> None:
    page = context.pages[-1]
    match action:
        case {"do": "open", "url": url}:
            await page.goto(f"{site}{url}" if url.startswith("/") else url)
        case {"do": "click", "x": x, "y": y}:
            await page.mouse.click(x, y)
        case {"do": "type", "x": x, "y": y, "text": text}:
            await page.mouse.click(x, y, click_count=3)
            await page.keyboard.type(text)
            await page.keyboard.press("Enter")
        case {"do": "scroll", "y": y}:
            await page.mouse.wheel(0, y)
        case {"do": "back"}:
            await page.go_back()
    await asyncio.sleep(SETTLE_S)
    await context.pages[-1].wait_for_load_state()


async def episode(browser: Browser, site: str, connection: ServerConnection) -> None:
    from playwright.async_api import Error

    context = await browser.new_context(viewport=SIZE, accept_downloads=False)
    context.set_default_timeout(ACTION_S * 1000)
    await context.new_page()
    try:
        async for text in connection:
            error = ""
            try:
                await do(context, site, json.loads(text))
            except Error as failed:
                error = f"({failed.message.splitlines()[0]})"
            shown = context.pages[-1]
            image = base64.b64encode(await shown.screenshot(animations="disabled")).decode()
            seen = {"url": shown.url.removeprefix(site), "error": error}
            await connection.send(json.dumps({**seen, "image": f"data:image/png;base64,{image}"}))
    finally:
        await context.close()


async def serve_windows(port: int) -> None:
    from playwright.async_api import async_playwright
    from websockets.asyncio.server import serve

    shop = ThreadingHTTPServer(("127.0.0.1", 0), Shop)
    Thread(target=shop.serve_forever, daemon=True).start()
    flags = ["--disable-gpu", "--disable-dev-shm-usage"]
    async with async_playwright() as playwright:
        sandboxed = os.geteuid() != 0
        own = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
        browser = await playwright.chromium.launch(
            executable_path=own, args=flags, chromium_sandbox=sandboxed
        )
        ended = asyncio.Event()
        browser.on("disconnected", lambda _: ended.set())
        site = f"http://127.0.0.1:{shop.server_port}"
        async with serve(partial(episode, browser, site), "127.0.0.1", port, max_size=None):
            await ended.wait()
    sys.exit("Chromium ended")


if __name__ == "__main__":
    if sys.argv[1] == "--tasks":
        write_tasks(Path(sys.argv[2]))
    else:
        asyncio.run(serve_windows(int(sys.argv[1])))
