// Node's openai package, with streamed answers: node openai.mjs URL TOKEN CONNECTIONS SECONDS
import OpenAI from "openai";

const [url, token, connections, seconds] = process.argv.slice(2);
const end = Date.now() + Number(seconds) * 1000;
const seen = {};
const client = new OpenAI({ baseURL: `${url}/openai/v1`, apiKey: token });
const call = {
  model: "gpt-4o-mini",
  max_tokens: 100,
  messages: [{ role: "user", content: "Hello" }],
  stream: true,
  stream_options: { include_usage: true },
};

async function worker() {
  while (Date.now() < end) {
    let found = "no usage";
    try {
      for await (const chunk of await client.chat.completions.create(call)) if (chunk.usage) found = 200;
    } catch (error) {
      found = error.status ?? error.name;
      await new Promise((resume) => setTimeout(resume, 300));
    }
    seen[found] = (seen[found] ?? 0) + 1;
  }
}

await Promise.all(Array.from({ length: Number(connections) }, worker));
console.log(JSON.stringify(seen));
