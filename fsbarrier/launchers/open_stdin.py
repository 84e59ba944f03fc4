"""Run a program whose standard input stays open and empty for as long as it lives: `python open_stdin.py PROGRAM ...`.

Its input is a pipe that it holds open for writing, too, so there is an end of it only when the program is gone, however it ended.
"""

import os
import sys


def main(argv: list[str]) -> None:
    reader, _ = os.pipe()
    # One descriptor for both ends: ssh closes all descriptors but the first three.
    os.dup2(os.open(f"/proc/self/fd/{reader}", os.O_RDWR), 0)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        sys.exit(f"{argv[0]}: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])
