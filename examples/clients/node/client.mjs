// A client of the relay in Node, of docs/reference/protocol.md alone: announce, rank, cancel.
//   npm install && node client.mjs HOST:PORT [PREFIX]
// Prints one line of JSON: the scores of three candidates.
import { randomBytes, randomUUID } from "node:crypto";
import { Kafka, logLevel } from "kafkajs";
import { decode, encode } from "@msgpack/msgpack";

const [bootstrap, prefix = "relaygr."] = process.argv.slice(2);
const kafka = new Kafka({ brokers: bootstrap.split(","), logLevel: logLevel.ERROR });

// Arrays are little-endian bytes, whatever this machine is.
const packed = (values, size, put) => {
  const view = new DataView(new ArrayBuffer(size * values.length));
  values.forEach((value, at) => put(view, at * size, value));
  return new Uint8Array(view.buffer);
};
// Item ids are 8 bytes each from version 4 on. Where all are below 2³², version 1 with 4 bytes (setUint32) is smaller.
// Write ids beyond 2⁵³ as BigInt: 9007199254740993n.
const v = 4;
const items = (ids) => packed(ids, 8, (view, at, id) => view.setBigInt64(at, BigInt(id), true));
const times = (each) => packed(each, 8, (view, at, time) => view.setBigInt64(at, BigInt(time), true));

// Answers: kafkajs has groups only, so a group of our own reads all of `scores`, from its end.
const answered = new Map(); // correlation id in hex → what waits for its answer
const replies = kafka.consumer({ groupId: `relaygr-node-${randomUUID()}` });
const joined = new Promise((resolve) => replies.on(replies.events.GROUP_JOIN, resolve));
await replies.connect();
await replies.subscribe({ topic: `${prefix}scores`, fromBeginning: false });
await replies.run({
  autoCommit: false,
  eachMessage: async ({ message }) => {
    const correlation = message.headers["relaygr-correlation-id"]?.toString("hex");
    const take = answered.get(correlation);
    answered.delete(correlation); // the first answer counts
    take?.(decode(message.value));
  },
});
await joined;
// "From its end" is where the first fetch finds the end, which may be behind our first answer: name the end now.
const admin = kafka.admin();
await admin.connect();
const ends = await admin.fetchTopicOffsets(`${prefix}scores`);
await admin.disconnect();
for (const { partition, high } of ends) replies.seek({ topic: `${prefix}scores`, partition, offset: high });
const partition = ends[0].partition;
const producer = kafka.producer(); // its default partitioner is Kafka's murmur2
await producer.connect();

const send = (topic, user, value, headers = {}) =>
  producer.send({ topic: prefix + topic, messages: [{ key: user, value: Buffer.from(encode(value)), headers }] });

const announce = (user, history, candidates) => {
  const request_id = randomUUID();
  const event = { v, request_id, user_id: user, prefix: history, candidates, sent_ms: Date.now() };
  return send("retrieval", user, event).then(() => request_id);
};

const rank = async (user, request_id, history, candidates, timeout_ms) => {
  const correlation = randomBytes(16);
  const answer = new Promise((resolve, reject) => {
    answered.set(correlation.toString("hex"), resolve);
    setTimeout(() => reject(new Error(`no answer within ${timeout_ms} ms`)), timeout_ms).unref();
  });
  answer.catch(() => {}); // where sending fails, nobody waits for it
  const request = {
    v, request_id, user_id: user, prefix: history, candidates: items(candidates), sent_ms: Date.now(), timeout_ms,
  };
  const headers = { "relaygr-correlation-id": correlation, "relaygr-reply-partition": String(partition) };
  let reply;
  try {
    await send("ranking", user, request, headers);
    reply = await answer;
  } finally {
    answered.delete(correlation.toString("hex"));
  }
  if (reply.request_id !== request_id) throw new Error(`an answer to ${reply.request_id}`);
  if (reply.status !== "ok") throw new Error(`${reply.status}: ${reply.detail}`);
  return reply;
};

const cancel = (user, request_id) => send("ranking", user, { v: 1, request_id }, { "relaygr-kind": "cancel" });

const user = "用户-17", now = Date.now(), length = 200;
const numbers = [...Array(length).keys()];
const history = {
  items: items(numbers.map((number) => (number * 37) % 1000)),
  actions: new Uint8Array(length).fill(1),
  times: times(numbers.map((number) => now - 60_000 * (length - number))),
};
try {
  const request_id = await announce(user, history, 3);
  await new Promise((resolve) => setTimeout(resolve, 300)); // retrieval
  const reply = await rank(user, request_id, history, [11, 12, 2n ** 63n - 1n], 20_000);
  const unused = await announce(user, history, 3);
  await cancel(user, unused); // retrieval found nothing to rank
  const bytes = reply.scores, view = new DataView(bytes.buffer, bytes.byteOffset, bytes.length);
  const scores = Array.from({ length: bytes.length / 4 }, (_, at) => view.getFloat32(4 * at, true));
  const { status, outcome, tasks } = reply;
  console.log(JSON.stringify({ request_id, cancelled: unused, status, outcome, tasks, scores }));
} finally {
  await Promise.all([producer.disconnect(), replies.disconnect()]);
}
