"""An agent of OpenAI's agents library, whose tool is served by an MCP server: this file with an argument."""

import asyncio
import os
import sys


def serve() -> None:
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("adder")
    count = iter(range(9))

    @server.tool()
    def add(b: str, a: list[int]) -> str:
        """Adds."""
        return f"{next(count)} {os.environ['NEXT']}"

    server.run()


async def main() -> None:
    from agents import Agent, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
    from agents.mcp import MCPServerStdio
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=os.environ["BASE_URL"], api_key=os.environ["API_KEY"])
    params = {"command": sys.executable, "args": [__file__, "serve"], "env": {"NEXT": os.environ["NEXT"]}}
    async with MCPServerStdio(params=params, client_session_timeout_seconds=60) as server:
        model = OpenAIChatCompletionsModel("policy", client)
        agent = Agent("adder", mcp_servers=[server], model=model)
        print((await Runner.run(agent, os.environ["ASK"])).final_output)


if len(sys.argv) > 1:
    serve()
else:
    asyncio.run(main())
