"""What all views have in common: the bar at the top, the style, keys, light and dark."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import quote, urlencode

from nicegui import Client, ui

from fsbarrier.page.render import STYLE, part

#: the views of a run, in the order of the keys 1, 2, 3, …
VIEWS = ("Now", "Curves", "Answers", "Time", "Logs", "Settings")
#: a view that is still being read is shown as such after this many seconds at the latest
RESPONSE_S = 60.0
THEMES = {"light": False, "dark": True}
#: switches between light and dark, and remembers it in this browser
SWITCH = """() => {
  const dark = document.body.classList.contains("body--dark");
  document.cookie = `fsbarrier-theme=${dark ? "light" : "dark"}; path=/; SameSite=Strict; max-age=31536000`;
  location.reload();
}"""
#: Number keys go to the views of a run, and brackets to the previous and the next item of a list, where a page has them.
KEYS = """
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || /INPUT|TEXTAREA|SELECT/.test(event.target.tagName)) return;
  const links = [...document.querySelectorAll(".top nav a")];
  const chosen = event.key === "[" ? document.querySelector("a[rel=prev]")
    : event.key === "]" ? document.querySelector("a[rel=next]") : links[Number(event.key) - 1];
  if (event.key === "/") { document.querySelector(".filters input")?.focus(); event.preventDefault(); }
  chosen?.click();
});
"""


def link(name: str, view: str = "now", **query: object) -> str:
    """The address of a view of a run."""
    words = {key: value for key, value in query.items() if value not in (None, "")}
    return f"/run/{quote(name, safe='')}/{view.lower()}" + (f"?{urlencode(words)}" if words else "")


@contextmanager
def page(client: Client, title: str, name: str | None = None, here: str | None = None) -> Iterator[None]:
    """The frame of a view. `name`: of the run that it is about; `here`: the view."""
    ui.page_title(f"{title} – fsbarrier")
    request = client.request
    theme = None if request is None else THEMES.get(request.cookies.get("fsbarrier-theme", ""))
    ui.dark_mode(theme)
    ui.add_css(STYLE)
    ui.add_head_html(f"<script>{KEYS}</script>")
    tabs = [] if name is None else [(view, link(name, view)) for view in VIEWS]
    with ui.element("header").style("position:relative"):
        html(part("top", name, "", tabs, here))
        ui.button(icon="contrast").props("flat round dense aria-label='light or dark'").style(
            "position:absolute;right:12px;top:6px"
        ).on("click", js_handler=SWITCH)
    with ui.element("div").classes("body"):
        yield


def html(content: str, **more: str) -> ui.html:
    """HTML that `render.part` made; the browser sanitizes it once more."""
    return ui.html(content, sanitize=True, **more)
