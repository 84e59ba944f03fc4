class Agent:
    def __init__(self, model: str) -> None:
        self.model = model

    async def run(self, task: object, client: object) -> None:
        pass
