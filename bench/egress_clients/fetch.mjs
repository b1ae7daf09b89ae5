// Node's own fetch: node fetch.mjs URL TOKEN CONNECTIONS SECONDS
const [url, token, connections, seconds] = process.argv.slice(2);
const end = Date.now() + Number(seconds) * 1000;
const seen = {};
const headers = { Authorization: `Bearer ${token}`, "Content-Type": "application/json" };
const body = JSON.stringify({ model: "gpt-4o-mini", max_tokens: 100, messages: [{ role: "user", content: "Hello" }] });

async function worker() {
  while (Date.now() < end) {
    let found;
    try {
      const response = await fetch(`${url}/openai/v1/chat/completions`, { method: "POST", headers, body });
      await response.json();
      found = response.status;
    } catch (error) {
      found = error.cause?.code ?? error.name;
      await new Promise((resume) => setTimeout(resume, 300));
    }
    seen[found] = (seen[found] ?? 0) + 1;
  }
}

await Promise.all(Array.from({ length: Number(connections) }, worker));
console.log(JSON.stringify(seen));
