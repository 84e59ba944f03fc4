"""How many lines of code there are, without blank lines, comments and docstrings: what somebody new has to hold in the head.

python scripts/count_code.py fsbarrier phases
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from pathlib import Path

LAYOUT = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def code_lines(source: str) -> int:
    """The lines of `source` on which some code stands."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {
        n for token in tokens if token.type not in LAYOUT for n in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            lines -= {*range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)}
    return len(lines)


def main(folders: list[str]) -> None:
    files = [path for folder in folders for path in sorted(Path(folder).rglob("*.py"))]
    total = sum(code_lines(path.read_text()) for path in files)
    print(f"{total:,} lines of code in {len(files)} files of {' and '.join(folders)}")


if __name__ == "__main__":
    main(sys.argv[1:])
