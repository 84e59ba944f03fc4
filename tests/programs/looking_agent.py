"""An agent that is shown a new picture in each turn: by the client, through the OpenAI-compatible server, and as the result of a tool."""

import base64
import io
import random

import httpx
from PIL import Image


def picture(seed):
    """Noise of some size, in PNG; some of it transparent, which is not what a model takes."""
    rng = random.Random(seed)
    size, mode = (32 * rng.randrange(1, 4), 32 * rng.randrange(1, 4)), rng.choice(("RGB", "RGBA"))
    buffer = io.BytesIO()
    Image.frombytes(mode, size, rng.randbytes(size[0] * size[1] * len(mode))).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


class Looks:
    async def run(self, task, client):
        seed = random.random()
        messages = [*task.messages]
        messages.append((await client.chat(messages)).message)
        url = {"type": "image_url", "image_url": {"url": picture(f"{seed}/1")}}
        messages.append({"role": "user", "content": [{"type": "text", "text": "and this?"}, url]})
        headers = {"Authorization": f"Bearer {client.api_key}"}
        async with httpx.AsyncClient(headers=headers) as http:
            body = {"model": client.model, "messages": messages, "temperature": 1.0}
            answer = await http.post(f"{client.base_url}/chat/completions", json=body, timeout=60)
        answer.raise_for_status()
        messages.append(answer.json()["choices"][0]["message"])
        content = [{"type": "image", "image": picture(f"{seed}/2")}, {"type": "text", "text": "a screenshot"}]
        messages.append({"role": "tool", "content": content})
        await client.chat(messages)
        return client.trajectory(reward=float(seed > 0.5))
