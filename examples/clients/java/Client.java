// A client of the relay in Java, of docs/reference/protocol.md alone: announce, rank, cancel.
//   java -cp "$KAFKA_HOME/libs/*" Client.java HOST:PORT [PREFIX]
// Prints one line of JSON: the scores of three candidates. MessagePack is small enough to be written here.

import java.io.ByteArrayOutputStream;
import java.io.DataOutputStream;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.charset.StandardCharsets;
import java.security.SecureRandom;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.UUID;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.header.Header;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;
import org.apache.kafka.common.serialization.StringSerializer;

public class Client implements AutoCloseable {
    private static final int REPLY_PARTITION = 0;
    /** Item ids are 8 bytes each from version 4 on. Where all are below 2^32, version 1 with 4 bytes is smaller. */
    private static final int VERSION = 4;
    private final String prefix;
    private final KafkaProducer<String, byte[]> producer;
    private final KafkaConsumer<byte[], byte[]> replies;
    private final SecureRandom random = new SecureRandom();

    Client(String bootstrap, String prefix) {
        this.prefix = prefix;
        // The default partitioner is Kafka's murmur2 of the key.
        producer = new KafkaProducer<>(
            Map.of("bootstrap.servers", bootstrap, "acks", "1", "linger.ms", 0),
            new StringSerializer(), new ByteArraySerializer());
        replies = new KafkaConsumer<>(
            Map.of("bootstrap.servers", bootstrap, "enable.auto.commit", false),
            new ByteArrayDeserializer(), new ByteArrayDeserializer());
        TopicPartition scores = new TopicPartition(prefix + "scores", REPLY_PARTITION);
        replies.assign(List.of(scores)); // no group
        replies.seekToEnd(List.of(scores));
        replies.position(scores); // the end is asked for now, before anything is sent
    }

    String announce(String user, Map<String, Object> history, int candidates) throws Exception {
        String id = UUID.randomUUID().toString();
        Map<String, Object> event = new LinkedHashMap<>();
        event.put("v", VERSION);
        event.put("request_id", id);
        event.put("user_id", user);
        event.put("prefix", history);
        event.put("candidates", candidates);
        event.put("sent_ms", System.currentTimeMillis());
        producer.send(new ProducerRecord<>(prefix + "retrieval", user, MessagePack.write(event))).get();
        return id;
    }

    Map<?, ?> rank(String user, String id, Map<String, Object> history, long[] candidates, long timeoutMs) throws Exception {
        byte[] correlation = new byte[16];
        random.nextBytes(correlation);
        Map<String, Object> request = new LinkedHashMap<>();
        request.put("v", VERSION);
        request.put("request_id", id);
        request.put("user_id", user);
        request.put("prefix", history);
        request.put("candidates", items(candidates));
        request.put("sent_ms", System.currentTimeMillis());
        request.put("timeout_ms", timeoutMs);
        ProducerRecord<String, byte[]> record = new ProducerRecord<>(prefix + "ranking", user, MessagePack.write(request));
        record.headers().add("relaygr-correlation-id", correlation);
        record.headers().add("relaygr-reply-partition", Integer.toString(REPLY_PARTITION).getBytes(StandardCharsets.US_ASCII));
        producer.send(record).get();
        long deadline = System.nanoTime() + timeoutMs * 1_000_000;
        while (System.nanoTime() < deadline) {
            for (ConsumerRecord<byte[], byte[]> answer : replies.poll(Duration.ofMillis(100))) {
                Header header = answer.headers().lastHeader("relaygr-correlation-id");
                if (header == null || !Arrays.equals(header.value(), correlation)) continue; // of another call
                Map<?, ?> reply = (Map<?, ?>) MessagePack.read(answer.value());
                if (!"ok".equals(reply.get("status"))) throw new IOException(reply.get("status") + ": " + reply.get("detail"));
                if (!id.equals(reply.get("request_id"))) throw new IOException("an answer to " + reply.get("request_id"));
                return reply;
            }
        }
        throw new IOException("no answer within " + timeoutMs + " ms");
    }

    void cancel(String user, String id) throws Exception {
        byte[] value = MessagePack.write(Map.of("request_id", id));
        ProducerRecord<String, byte[]> record = new ProducerRecord<>(prefix + "ranking", user, value);
        record.headers().add("relaygr-kind", "cancel".getBytes(StandardCharsets.US_ASCII));
        producer.send(record).get();
    }

    @Override
    public void close() {
        producer.close();
        replies.close();
    }

    static byte[] items(long[] ids) {
        ByteBuffer packed = ByteBuffer.allocate(8 * ids.length).order(ByteOrder.LITTLE_ENDIAN);
        for (long id : ids) packed.putLong(id);
        return packed.array();
    }

    public static void main(String[] arguments) throws Exception {
        int length = 200;
        long now = System.currentTimeMillis();
        long[] items = new long[length];
        byte[] actions = new byte[length];
        ByteBuffer times = ByteBuffer.allocate(8 * length).order(ByteOrder.LITTLE_ENDIAN);
        for (int at = 0; at < length; at++) {
            items[at] = at * 37 % 1000;
            actions[at] = 1;
            times.putLong(now - 60_000L * (length - at));
        }
        Map<String, Object> history = new LinkedHashMap<>();
        history.put("items", items(items));
        history.put("actions", actions);
        history.put("times", times.array());
        String user = "用户-17";
        try (Client client = new Client(arguments[0], arguments.length > 1 ? arguments[1] : "relaygr.")) {
            String id = client.announce(user, history, 3);
            Thread.sleep(300); // retrieval
            Map<?, ?> reply = client.rank(user, id, history, new long[] {11, 12, Long.MAX_VALUE}, 20_000);
            String unused = client.announce(user, history, 3);
            client.cancel(user, unused); // retrieval found nothing to rank
            ByteBuffer scores = ByteBuffer.wrap((byte[]) reply.get("scores")).order(ByteOrder.LITTLE_ENDIAN);
            List<Float> numbers = new ArrayList<>();
            while (scores.hasRemaining()) numbers.add(scores.getFloat());
            List<String> tasks = new ArrayList<>();
            for (Object task : (List<?>) reply.get("tasks")) tasks.add('"' + task.toString() + '"');
            System.out.printf("{\"request_id\":\"%s\",\"cancelled\":\"%s\",\"status\":\"%s\",\"outcome\":\"%s\",\"tasks\":%s,\"scores\":%s}%n",
                id, unused, reply.get("status"), reply.get("outcome"), tasks, numbers);
        }
    }

    /** What the protocol needs of MessagePack: maps, arrays, text, bytes, numbers. */
    static final class MessagePack {
        static byte[] write(Object value) throws IOException {
            ByteArrayOutputStream bytes = new ByteArrayOutputStream();
            put(new DataOutputStream(bytes), value);
            return bytes.toByteArray();
        }

        static Object read(byte[] data) {
            return get(ByteBuffer.wrap(data));
        }

        private static void put(DataOutputStream out, Object value) throws IOException {
            if (value instanceof Map<?, ?> map) {
                out.writeByte(0xdf);
                out.writeInt(map.size());
                for (Map.Entry<?, ?> entry : map.entrySet()) {
                    put(out, entry.getKey());
                    put(out, entry.getValue());
                }
            } else if (value instanceof byte[] bytes) {
                out.writeByte(0xc6);
                out.writeInt(bytes.length);
                out.write(bytes);
            } else if (value instanceof Number number) { // integers may have any width
                out.writeByte(0xd3);
                out.writeLong(number.longValue());
            } else {
                byte[] text = value.toString().getBytes(StandardCharsets.UTF_8);
                out.writeByte(0xdb);
                out.writeInt(text.length);
                out.write(text);
            }
        }

        private static Object get(ByteBuffer in) {
            int kind = in.get() & 0xff;
            if (kind < 0x80) return (long) kind;
            if (kind < 0x90) return map(in, kind & 0x0f);
            if (kind < 0xa0) return array(in, kind & 0x0f);
            if (kind < 0xc0) return text(in, kind & 0x1f);
            if (kind >= 0xe0) return (long) (byte) kind;
            return switch (kind) {
                case 0xc0 -> null;
                case 0xc2, 0xc3 -> kind == 0xc3;
                case 0xc4 -> bytes(in, in.get() & 0xff);
                case 0xc5 -> bytes(in, in.getShort() & 0xffff);
                case 0xc6 -> bytes(in, in.getInt());
                case 0xca -> (double) in.getFloat();
                case 0xcb -> in.getDouble();
                case 0xcc -> (long) (in.get() & 0xff);
                case 0xcd -> (long) (in.getShort() & 0xffff);
                case 0xce -> in.getInt() & 0xffffffffL;
                case 0xcf, 0xd3 -> in.getLong();
                case 0xd0 -> (long) in.get();
                case 0xd1 -> (long) in.getShort();
                case 0xd2 -> (long) in.getInt();
                case 0xd9 -> text(in, in.get() & 0xff);
                case 0xda -> text(in, in.getShort() & 0xffff);
                case 0xdb -> text(in, in.getInt());
                case 0xdc -> array(in, in.getShort() & 0xffff);
                case 0xdd -> array(in, in.getInt());
                case 0xde -> map(in, in.getShort() & 0xffff);
                case 0xdf -> map(in, in.getInt());
                default -> throw new IllegalArgumentException("MessagePack type " + Integer.toHexString(kind));
            };
        }

        private static byte[] bytes(ByteBuffer in, int size) {
            byte[] found = new byte[size];
            in.get(found);
            return found;
        }

        private static String text(ByteBuffer in, int size) {
            return new String(bytes(in, size), StandardCharsets.UTF_8);
        }

        private static List<Object> array(ByteBuffer in, int size) {
            List<Object> found = new ArrayList<>();
            for (int at = 0; at < size; at++) found.add(get(in));
            return found;
        }

        private static Map<Object, Object> map(ByteBuffer in, int size) {
            Map<Object, Object> found = new LinkedHashMap<>();
            for (int at = 0; at < size; at++) found.put(get(in), get(in));
            return found;
        }
    }
}
