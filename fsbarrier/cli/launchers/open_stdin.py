"""Runs a program with an empty standard input that stays open as long as the program lives: `python open_stdin.py PROGRAM ...`.

Standard input is a pipe that the program itself also holds open for writing, so EOF occurs only when the program is gone.
"""

import os
import sys


def main(argv: list[str]) -> None:
    reader, _ = os.pipe()
    # One descriptor for both ends, because ssh closes all descriptors except the first three.
    os.dup2(os.open(f"/proc/self/fd/{reader}", os.O_RDWR), 0)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        sys.exit(f"{argv[0]}: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])
