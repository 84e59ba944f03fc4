import no_such_package  # type: ignore[import-not-found]


class Agent:
    async def run(self, task: object, client: object) -> None:
        no_such_package.go()
