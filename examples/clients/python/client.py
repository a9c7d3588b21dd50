"""Announces a request, ranks it, prints its scores. Needs confluent-kafka and msgpack, and nothing of this package."""

import struct
import time
import uuid

import msgpack
from confluent_kafka import Consumer, Producer, TopicPartition

BOOTSTRAP, REPLY_PARTITION = "localhost:9092", 3
answers = Consumer({"bootstrap.servers": BOOTSTRAP, "group.id": "unused", "enable.auto.commit": False})
low, high = answers.get_watermark_offsets(TopicPartition("relaygr.scores", REPLY_PARTITION), timeout=10)
answers.assign([TopicPartition("relaygr.scores", REPLY_PARTITION, high)])

producer = Producer({"bootstrap.servers": BOOTSTRAP, "partitioner": "murmur2_random", "linger.ms": 0})
now, n = int(time.time() * 1000), 200
prefix = {
    "items": struct.pack(f"<{n}I", *range(n)),
    "actions": bytes([1]) * n,
    "times": struct.pack(f"<{n}q", *range(now - n * 1000, now, 1000)),
}
request_id, user, correlation = str(uuid.uuid4()), "user-17", uuid.uuid4().bytes
event = {"v": 1, "request_id": request_id, "user_id": user, "prefix": prefix, "candidates": 3, "sent_ms": now}
producer.produce("relaygr.retrieval", msgpack.packb(event), key=user)
producer.flush()

time.sleep(0.08)  # retrieval and pre-processing
request = {
    "v": 1,
    "request_id": request_id,
    "user_id": user,
    "prefix": prefix,
    "candidates": struct.pack("<3I", 11, 12, 13),
    "sent_ms": int(time.time() * 1000),
    "timeout_ms": 5000.0,
}
producer.produce(
    "relaygr.ranking",
    msgpack.packb(request),
    key=user,
    headers={"relaygr-correlation-id": correlation, "relaygr-reply-partition": str(REPLY_PARTITION)},
)
producer.flush()

while True:
    message = answers.poll(5.0)
    if message is None:
        raise SystemExit("no answer within 5 s")
    if not message.error() and dict(message.headers() or []).get("relaygr-correlation-id") == correlation:
        break
reply = msgpack.unpackb(message.value())
scores = struct.unpack(f"<{len(reply['scores']) // 4}f", reply["scores"])
print(reply["status"], reply["outcome"], reply["tasks"], scores)
answers.close()
