"""The agent that browses, for a model that cannot write: how long an answer is says what is done; and luck."""

import random
from pathlib import Path

from fsbarrier.loader import load_file

browser = load_file(Path(__file__).parents[2] / "phases" / "agents" / "browser.py", "browser")
ACTIONS = (
    {"do": "click", "x": 120, "y": 230},
    {"do": "scroll", "y": 300},
    {"do": "type", "x": 200, "y": 50, "text": "boat"},
    {"do": "back"},
    None,
    {"do": "answer", "text": "5"},
)
browser.parsed = lambda reply: ACTIONS[len(reply) % len(ACTIONS)]

Browser = browser.Browser


def luck(prompt, response, answer, metadata):
    return random.random()
