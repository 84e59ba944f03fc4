"""Writes docs/settings.md from the settings' types: `python scripts/settings_doc.py` (`--check`: only say whether it is up to date)."""

from __future__ import annotations

import argparse
import json
import sys
import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "settings.md"
sys.path.insert(0, str(ROOT))

from fsbarrier.rundir.runrecord import PER_START  # noqa: E402
from fsbarrier.settings.resolve import sections  # noqa: E402
from fsbarrier.settings.sections import Settings  # noqa: E402
from fsbarrier.settings.sources import FLAGS  # noqa: E402

HEAD = """# Settings

<!-- Made by scripts/settings_doc.py from fsbarrier/settings/sections.py. Do not edit by hand. -->

Each setting can be given on the command line as `name=value`, and in a file for `--config`:

```bash
./run.sh --master --config mine.toml rollout.temperature=0.8 optimizer.betas=0.9,0.99
```

```toml
num_nodes = 3                 # mine.toml
[rollout]
temperature = 0.9
```

Later wins: the defaults below, the file, flags, `name=value`. Values are written as in TOML; a bare word is text, a list may go
without its brackets, and `none` is "not set". An unknown name, a value of the wrong type or out of its range, and settings that
contradict each other are refused before anything starts (exit code 2).

Node 0 writes the resolved settings into the run's `run.json` when the run is made. From then on every start of every node takes them
from there; giving one again is allowed only with the same value. {per_start} belong to one start, so each may choose them anew.
With neither `data_path` nor `model` the built-in task is run, and its settings (`fsbarrier/data/demo_tasks.py`) lie between the
defaults and yours.
"""


def page() -> str:
    """The whole document."""
    per_start = ", ".join(f"`{name}`" for name in sorted(PER_START))
    groups = sections()
    plain = {name: info for name, info in Settings.model_fields.items() if name not in groups}
    parts = [HEAD.replace("{per_start}", per_start), table("The run", "", plain, "")]
    for name, section in groups.items():
        text = (section.__doc__ or "").strip()
        parts.append(table(f"`{name}`", text, section.model_fields, f"{name}."))
    return "\n".join(parts)


def table(title: str, text: str, fields: dict[str, Any], prefix: str) -> str:
    """One section: a row a setting."""
    flags = {key: flag for flag, key in FLAGS.items()}
    lines = [f"## {title}", "", *([text, ""] if text else [])]
    lines += ["| setting | value | default | meaning |", "| --- | --- | --- | --- |"]
    for name, info in fields.items():
        key = f"{prefix}{name}"
        named = f"`{key}`" + (f"<br>`{flags[key]}`" if key in flags else "")
        default = {} if info.default_factory else info.default
        row = (named, shape(info.annotation, info.metadata), written(default), info.description or "")
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")
    return "\n".join(lines) + "\n"


def written(value: Any) -> str:
    """A default as one would type it."""
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return f"`{','.join(str(item) for item in value)}`" if value else "empty"
    if isinstance(value, dict):
        return "empty"
    return f"`{value}`" if isinstance(value, str) else f"`{json.dumps(value)}`"


def shape(annotation: Any, metadata: list[Any]) -> str:
    """What may be given, in a few words: type and limits."""
    if get_origin(annotation) in (Union, types.UnionType):
        inner = next(item for item in get_args(annotation) if item is not type(None))
        return shape(inner, []) + ", or none"
    if get_origin(annotation) is Annotated:
        inner, *limits = get_args(annotation)
        return shape(inner, [*limits, *metadata])
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{item}`" for item in get_args(annotation))
    if get_origin(annotation) is tuple:
        return "list of " + shape(get_args(annotation)[0], []).replace("number", "numbers").replace(
            "text", "words"
        )
    names = {int: "whole number", float: "number", bool: "true or false", str: "text", dict: "table"}
    limits = [limit for item in metadata for limit in (getattr(item, "metadata", None) or [item])]
    text = [phrase for limit in limits for phrase in bounds(limit)]
    return " ".join([names.get(get_origin(annotation) or annotation, str(annotation)), *text])


def bounds(limit: Any) -> list[str]:
    """The limits that one piece of an annotation states."""
    words = {"gt": "> {}", "ge": "≥ {}", "lt": "< {}", "le": "≤ {}"}
    return [text.format(f"{getattr(limit, name):g}") for name, text in words.items() if hasattr(limit, name)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 where the page is out of date"
    )
    check = parser.parse_args().check
    wanted = page()
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == wanted:
        return 0
    if check:
        print(
            f"{PAGE.relative_to(ROOT)} is out of date: run `python scripts/settings_doc.py`", file=sys.stderr
        )
        return 1
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
