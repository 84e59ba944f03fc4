"""Two turns with the OpenAI client, the second streamed; the answer goes back as the client's own object, dumped to JSON."""

import json
import os

from openai import OpenAI

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
client = OpenAI(base_url=os.environ["BASE_URL"], api_key=os.environ["API_KEY"])
messages = [{"role": "user", "content": os.environ["ASK"]}]
first = client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
message = first.choices[0].message
assert first.choices[0].finish_reason == "tool_calls" and len(message.tool_calls) == 2
messages.append(message.model_dump(exclude_unset=os.environ.get("DUMP") != "all"))
for number, call in enumerate(message.tool_calls):
    json.loads(call.function.arguments)
    messages.append({"role": "tool", "tool_call_id": call.id, "content": f"{number} {os.environ['NEXT']}"})
stream = client.chat.completions.create(model="policy", messages=messages, tools=[TOOL], stream=True)
print("".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices))
