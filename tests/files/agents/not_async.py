class Agent:
    def run(self, task: object, client: object) -> None:
        pass
