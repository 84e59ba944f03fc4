"""What functions do that run alone in a program elsewhere."""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import tempfile


class TooLate(Exception):
    pass


def _late(number, frame):
    raise TooLate


def alarm(prompt, response, answer, metadata):
    signal.signal(signal.SIGALRM, _late)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        while response == "endless":
            pass
        return 1.0
    except TooLate:
        return -0.5
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def own_loop(prompt, response, answer, metadata):
    async def judged():
        await asyncio.sleep(0)
        return float(response == answer)

    return asyncio.run(judged())


def elsewhere(prompt, response, answer, metadata):
    """Leaves the folder that it works in, which is then removed."""
    assert os.getcwd() == metadata["home"]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        done = subprocess.run([sys.executable, "-c", "print(7)"], capture_output=True, text=True, check=True)
    return float(done.stdout.strip() == answer)


def crashes(prompt, response, answer, metadata):
    if response == "crash":
        ctypes.string_at(0)
    return float(response == answer)


def leaves(prompt, response, answer, metadata):
    os._exit(3) if response == "leave" else None
    return float(response == answer)
