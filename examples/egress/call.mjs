// node examples/egress/call.mjs: a call from Node, through the gateway.
const gateway = process.env.TIDEGATE_EGRESS ?? "http://127.0.0.1:8090";
const response = await fetch(`${gateway}/openai/v1/chat/completions`, {
  method: "POST",
  headers: { Authorization: `Bearer ${process.env.RESEARCH_TOKEN}`, "Content-Type": "application/json" },
  body: JSON.stringify({ model: "gpt-4o-mini", messages: [{ role: "user", content: "Hello" }], max_tokens: 50 }),
});
const body = await response.json();
if (response.status === 429) {
  console.log(`no permit: try again in ${response.headers.get("Retry-After")} s`);
} else if (!response.ok) {
  console.log(`${response.status}: ${body.error.message}`);
} else {
  console.log(body.choices[0].message.content);
  console.log(`left: ${response.headers.get("X-Tidegate-Remaining")}`);
}
