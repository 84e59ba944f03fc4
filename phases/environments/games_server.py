"""Serves games of Gymnasium and TextArena: `PYTHON games_server.py PORT`, as `environment.command`. It needs nothing of fsbarrier.

It is for openenv.py. PYTHON has `pip install websockets`, and `gymnasium` or `textarena` or both. A task's field `reset` names the game:

    {"gymnasium": "FrozenLake-v1", "seed": 3, "options": {"is_slippery": false}}      the options are for gymnasium.make
    {"textarena": "GuessTheNumber-v0", "seed": 3}                                     games for one player

Gymnasium's games must have numbers as actions (Discrete). The last number of an answer is the action; the policy sees the game's own
drawing in text, or else the observation. A WebSocket is one episode, and its answers are OpenEnv's.
"""

from __future__ import annotations

import json
import re
import sys
from threading import Lock
from typing import Any

from websockets.sync.server import ServerConnection, serve

#: what the policy sees, the reward, and whether the game is over
Seen = tuple[str, float, bool]
#: held while a game is made, because TextArena draws from Python's global random numbers
drawing = Lock()


class Gymnasium:
    def __init__(self, name: str, seed: int | None, options: dict[str, Any]) -> None:
        import gymnasium

        game: Any = gymnasium.make(name, **options)
        if "ansi" in game.metadata["render_modes"]:
            game = gymnasium.make(name, render_mode="ansi", **options)
        if not isinstance(game.action_space, gymnasium.spaces.Discrete):
            raise ValueError(f"{name}: its actions are no numbers but {game.action_space}")
        self.game = game
        first, last = int(game.action_space.start), int(game.action_space.start + game.action_space.n) - 1
        self.ask = f"Answer with a number from {first} to {last}."
        seen, _ = game.reset(seed=seed)
        self.first = f"{self.drawn(seen)}\n{self.ask}"

    def drawn(self, seen: object) -> str:
        """The game's drawing in text, with brackets around coloured parts; without a drawing, the observation."""
        if self.game.render_mode is None:
            return str(seen)
        return re.sub(r"\x1b\[[0-9;]*m(.*?)\x1b\[0m", r"[\1]", self.game.render()).strip()

    def step(self, answer: str) -> Seen:
        numbers = re.findall(r"-?\d+", answer)
        if not numbers or not self.game.action_space.contains(int(numbers[-1])):
            return self.ask, 0.0, False
        seen, reward, ended, cut, _ = self.game.step(int(numbers[-1]))
        return self.drawn(seen), float(reward), ended or cut


class TextArena:
    def __init__(self, name: str, seed: int | None) -> None:
        import textarena

        with drawing:
            self.game = textarena.make(name)
            self.game.reset(num_players=1, seed=seed)
        self.told = ""
        self.first = self.news()

    def news(self) -> str:
        """The new part of the player's observation, which repeats the game so far."""
        _, told = self.game.get_observation()
        new, self.told = str(told).removeprefix(self.told), str(told)
        return new.strip()

    def step(self, answer: str) -> Seen:
        over, _ = self.game.step(answer)
        if not over:
            return self.news(), 0.0, False
        rewards, _ = self.game.close()
        return "", float(rewards[0]), True


def begin(gymnasium: str = "", textarena: str = "", seed: int | None = None, options: Any = None) -> Any:
    return Gymnasium(gymnasium, seed, options or {}) if gymnasium else TextArena(textarena, seed)


def episode(connection: ServerConnection) -> None:
    game: Any = None
    for message in connection:
        request = json.loads(message)
        try:
            if request["type"] == "reset":
                game = begin(**request["data"])
            seen = (
                (game.first, 0.0, False)
                if request["type"] == "reset"
                else game.step(request["data"]["message"])
            )
        # A game that does not exist, or that fails, ends its own episode only.
        except Exception as error:
            failure = {"message": f"{type(error).__name__}: {error}", "code": "GAME_FAILED"}
            connection.send(json.dumps({"type": "error", "data": failure}))
            return
        text, reward, over = seen
        answer = {"observation": {"message": text}, "reward": reward, "done": over}
        connection.send(json.dumps({"type": "observation", "data": answer}))


if __name__ == "__main__":
    with serve(episode, "127.0.0.1", int(sys.argv[1])) as server:
        server.serve_forever()
