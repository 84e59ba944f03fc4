class Agent:
    async def play(self, task: object, client: object) -> None:
        pass
