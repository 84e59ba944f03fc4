"""Two turns with LangChain: its own message objects hold parsed arguments, which it writes anew."""

import os

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def add(b: str, a: list[int]) -> str:
    """Adds."""
    return os.environ["NEXT"]


model = ChatOpenAI(base_url=os.environ["BASE_URL"], api_key=os.environ["API_KEY"], model="policy").bind_tools(
    [add]
)
messages = [HumanMessage(os.environ["ASK"])]
answer = model.invoke(messages)
assert len(answer.tool_calls) == 2
messages.append(answer)
for number, call in enumerate(answer.tool_calls):
    messages.append(ToolMessage(f"{number} {add.invoke(call['args'])}", tool_call_id=call["id"]))
print("".join(str(piece.content) for piece in model.stream(messages)))
