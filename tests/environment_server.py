"""A server that speaks as OpenEnv's servers do, without their library: an episode guesses a word. `PORT FOLDER SESSIONS [SERVICE]`

SERVICE is a port of loopback: a service that all servers use, to which each session is one connection.
"""

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from websockets import ConnectionClosed
from websockets.asyncio.server import serve

port, folder, most = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
service = int(sys.argv[4]) if len(sys.argv) > 4 else None
sessions = 0


def observation(text: str, reward: float | None = None, done: bool = False) -> dict[str, Any]:
    return {
        "type": "observation",
        "data": {"observation": {"message": text}, "reward": reward, "done": done},
    }


def note(more: int) -> None:
    with (folder / "sessions").open("a") as told:
        told.write(f"{time.monotonic()} {more}\n")


class Place:
    """A session of the service, if there is one."""

    async def __aenter__(self) -> "Place":
        if service is not None:
            self.reader, self.writer = await asyncio.open_connection("127.0.0.1", service)
            self.writer.write(f"{os.getpid()}\n".encode())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Returns when the service knows."""
        if service is not None and not self.writer.is_closing():
            self.writer.write_eof()
            await self.reader.read()
            self.writer.close()


async def session(connection: Any) -> None:
    async with Place() as place:
        await episode(connection, place)


async def episode(connection: Any, place: Place) -> None:
    global sessions
    sessions += 1
    note(1)
    word = ""
    try:
        if sessions > most:
            await connection.send(
                json.dumps({"type": "error", "data": {"message": "full", "code": "CAPACITY_REACHED"}})
            )
            return
        async for text in connection:
            asked = json.loads(text)
            if asked["type"] == "reset":
                word = asked["data"]["word"]
                reply = observation(f"!say {word}!!")
            elif word == "crash" and not (folder / "crashed").exists():
                (folder / "crashed").touch()
                print("the last words of the server", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            else:
                await asyncio.sleep(0.1 if word == "slow" else 0)
                while word == "held" and not (folder / "go").exists():
                    await asyncio.sleep(0.01)
                if right := asked["data"]["message"] == word:
                    await place.__aexit__()
                reply = observation("right" if right else "!say no!!", float(right), right)
            await connection.send(json.dumps(reply))
    except ConnectionClosed:
        pass
    finally:
        sessions -= 1
        note(-1)


async def main() -> None:
    with (folder / "starts").open("a") as starts:
        starts.write(f"{os.getpid()} ")
    async with serve(session, "127.0.0.1", port):
        await asyncio.Event().wait()


asyncio.run(main())
