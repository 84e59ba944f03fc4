"""Two turns with LiteLLM, whose message object goes back as it is."""

import os

import litellm

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
way = {
    "model": "openai/policy",
    "api_base": os.environ["BASE_URL"],
    "api_key": os.environ["API_KEY"],
    "tools": [TOOL],
}
messages = [{"role": "user", "content": os.environ["ASK"]}]
message = litellm.completion(messages=messages, **way).choices[0].message
assert len(message.tool_calls) == 2
messages.append(message)
for number, call in enumerate(message.tool_calls):
    messages.append(
        {"role": "tool", "tool_call_id": call.id, "name": "add", "content": f"{number} {os.environ['NEXT']}"}
    )
print(litellm.completion(messages=messages, **way).choices[0].message.content)
