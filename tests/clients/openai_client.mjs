// Two turns with the OpenAI client for JavaScript; the tools are run by its own loop, which streams.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.env.BASE_URL, apiKey: process.env.API_KEY });
let count = 0;
const runner = client.chat.completions.runTools({
  model: "policy",
  stream: true,
  messages: [{ role: "user", content: process.env.ASK }],
  tools: [
    {
      type: "function",
      function: {
        name: "add",
        parse: JSON.parse,
        parameters: { type: "object", properties: {} },
        function: () => `${count++} ${process.env.NEXT}`,
      },
    },
  ],
});
console.log(await runner.finalContent());
