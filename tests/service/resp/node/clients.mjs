// Calls the RESP port with node-redis and ioredis, unmodified, and prints the replies as JSON. Arguments: port, token.
import { createRequire } from "node:module";

const [port, token] = process.argv.slice(2);
const require = createRequire(`${process.cwd()}/`);
const { createClient } = require("redis");
const { Redis } = require("ioredis");
const commands = [
  ["PING"],
  ["TG.ACQUIRE", "api", "node"],
  ["TG.ACQUIRE", "api", "node", "COST", "9"],
  ["TG.USAGE", "api", "node"],
  ["CL.THROTTLE", "node", "15", "30", "60"],
];
const replies = {};

async function settle(promise) {
  try {
    return await promise;
  } catch (error) {
    return `error: ${error.message}`;
  }
}

for (const RESP of [2, 3]) {
  const client = createClient({ url: `redis://default:${token}@127.0.0.1:${port}`, RESP, disableOfflineQueue: true });
  client.on("error", (error) => { throw error; });
  await client.connect();
  const found = [];
  for (const words of commands) found.push(await settle(client.sendCommand(words)));
  const pipelined = Array.from({ length: 10 }, () => client.sendCommand(["TG.ACQUIRE", "api", `node-pipelined${RESP}`]));
  found.push((await Promise.all(pipelined)).map((reply) => Number(reply[0])));
  found.push(await settle(client.sendCommand(["GET", "x"])));
  replies[`node-redis ${RESP}`] = found;
  await client.close();
}

const client = new Redis({ port: Number(port), password: token, maxRetriesPerRequest: 1 });
const found = [];
for (const [name, ...words] of commands) found.push(await settle(client.call(name, ...words)));
const pipeline = client.pipeline();
for (let number = 0; number < 10; number += 1) pipeline.call("TG.ACQUIRE", "api", "pipelined-io");
found.push((await pipeline.exec()).map(([, reply]) => Number(reply[0])));
found.push(await settle(client.call("GET", "x")));
replies.ioredis = found;
await client.quit();

const stranger = new Redis({ port: Number(port), password: "wrong-token-0123456", retryStrategy: null, lazyConnect: true });
stranger.on("error", () => {});
replies.wrong = await settle(stranger.connect());
stranger.disconnect();
console.log(JSON.stringify(replies));
