"""Every setting: its section, type, bounds, default and meaning. load.py reads the values."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct, structs

#: Names of settings that no log, error or traceback shows; each also has `secret` in its extra.
SECRETS = frozenset({"answer_secret", "sasl_password", "tls_key_password", "hash_key", "secret", "tokens", "password"})
SECRET_SHOWN = "********"

#: Most lanes of a relay: a consumer's statement on each of them still fits into one message.
MAX_LANES = 10_000

BYTES = {"unit": "bytes"}  # a setting with this unit also accepts "512MiB", "2GiB", …

#: A text for logs and keys, without control characters and NUL.
LABEL = Meta(max_length=128, pattern=r"\A[^\x00-\x1f\x7f-\x9f]*\Z")
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,128}$")]
Port = Annotated[int, Meta(ge=0, le=65535)]
Positive = Annotated[int, Meta(ge=1)]
Share = Annotated[float, Meta(ge=0, le=1)]
Ms = Annotated[float, Meta(gt=0, le=3.6e6)]
Kernels = Literal["auto", "torch", "triton", "amx", "avx512_bf16", "avx512"]


def _doc(text: str) -> Meta:
    return Meta(description=text)


class Section(Struct, frozen=True, kw_only=True):
    """A group of settings; its representation hides secrets."""

    def __repr__(self) -> str:
        shown = (
            f"{name}={SECRET_SHOWN if _is_secret(name, value) else repr(value)}"
            for name, value in structs.asdict(self).items()
        )
        return f"{type(self).__name__}({', '.join(shown)})"


def _is_secret(name: str, value: object) -> bool:
    return (name in SECRETS and bool(value)) or (name == "bootstrap" and "@" in str(value))


class Kafka(Section, frozen=True, kw_only=True):
    """How to reach Kafka, and the timings of its group protocol."""

    bootstrap: Annotated[str, Meta(pattern=r"^[^@/]*$"), _doc("brokers, HOST:PORT[,HOST:PORT…]")] = "localhost:9092"
    prefix: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{0,64}$"), _doc("prefix of every topic and group name")] = (
        "relaygr."
    )
    topics_dir: Annotated[str, _doc("folder with one TOML file per topic; empty: the packaged topics")] = ""
    partitions: Annotated[int, Meta(ge=0, le=MAX_LANES), _doc("number of lanes; 0: as in the topic files")] = 0
    dead_letter_values: Annotated[
        bool,
        _doc("dead letters keep the whole message, history included, for `replay`; otherwise its size and SHA-256"),
    ] = False
    replication: Annotated[int, Meta(ge=0, le=9), _doc("copies of each topic; 0: as in the topic files")] = 0
    fetch_max_wait_ms: Annotated[
        int,
        Meta(ge=1, le=10_000),
        _doc("longest fetch of lanes; moved lanes wait for it; use 12 with the embedded broker, which wakes no fetch"),
    ] = 50
    tail_max_wait_ms: Annotated[
        int, Meta(ge=1, le=10_000), _doc("longest fetch of `scores` and `worker-status`, which delays nothing else")
    ] = 500
    heartbeat_interval_ms: Annotated[
        Positive, _doc("time between heartbeats of group members; moved lanes wait for the next one")
    ] = 250
    session_timeout_ms: Annotated[
        Positive, _doc("a crashed member's lanes move after this; brokers bound the value")
    ] = 6000
    max_poll_interval_ms: Annotated[
        Positive, _doc("a worker whose device makes no progress for this long loses its lanes")
    ] = 10_000
    commit_interval_ms: Annotated[Positive, _doc("time between commits of offsets")] = 1000
    request_timeout_ms: Annotated[Positive, _doc("timeout of a request to a broker")] = 10_000
    security_protocol: Annotated[
        Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"], _doc("protocol of the brokers' listeners")
    ] = "PLAINTEXT"
    sasl_mechanism: Annotated[
        Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"], _doc("how the client proves its password; PLAIN needs TLS")
    ] = "SCRAM-SHA-512"
    plain_without_tls: Annotated[
        bool, _doc("allow PLAIN over SASL_PLAINTEXT, which sends the password unencrypted")
    ] = False
    sasl_username: Annotated[str, _doc("user of SASL_PLAINTEXT and SASL_SSL")] = ""
    sasl_password: Annotated[str, Meta(extra={"secret": True}), _doc("password of kafka.sasl_username")] = ""
    tls_ca: Annotated[
        str, _doc("PEM file of the authority that signed the brokers' certificates; empty: the system's")
    ] = ""
    tls_certificate: Annotated[str, _doc("PEM file of this process's certificate, if the brokers require one")] = ""
    tls_key: Annotated[str, _doc("PEM file of the key of kafka.tls_certificate; empty: in the certificate's file")] = ""
    tls_key_password: Annotated[str, Meta(extra={"secret": True}), _doc("password of kafka.tls_key")] = ""


class Relay(Section, frozen=True, kw_only=True):
    """Settings that must be equal in triggers, workers and clients."""

    slo_ms: Annotated[Ms, _doc("the ranking stage's P99 target")] = 50.0
    life_window_ms: Annotated[Ms, _doc("longest time from admission to ranking for which a prefix KV stays pinned")] = (
        2000.0
    )
    max_prefix_tokens: Annotated[Positive, _doc("longest prefix; a longer one is refused")] = 4096
    max_suffix_tokens: Annotated[int, Meta(ge=0), _doc("longest suffix; a longer one is refused")] = 256
    max_candidates: Annotated[Positive, _doc("most candidates in a request")] = 2048
    averaging: Annotated[
        float,
        Meta(gt=0, le=1e3),
        _doc("factor of the times over which load, demand and reuse are averaged (1, 10 and 30 s)"),
    ] = 1.0
    answer_secret: Annotated[
        str,
        Meta(pattern=r"^$|^.{16,}$", extra={"secret": True}),
        _doc("signs answers; clients that have it drop unsigned ones; 16 characters or more; empty: unsigned"),
    ] = ""

    def beyond(self, *, prefix: int = 0, suffix: int = 0, candidates: int = 0) -> str | None:
        """The first of these counts that is above its limit, as text with the setting's name; None: all are allowed.

        Example: "6 suffix behaviours, the limit is 5 (relay.max_suffix_tokens)".
        """
        for what, count, name in (
            ("prefix behaviours", prefix, "max_prefix_tokens"),
            ("suffix behaviours", suffix, "max_suffix_tokens"),
            ("candidates", candidates, "max_candidates"),
        ):
            limit: int = getattr(self, name)
            if count > limit:
                return f"{count} {what}, the limit is {limit} (relay.{name})"
        return None


class Trigger(Section, frozen=True, kw_only=True):
    """Admission: which requests are worth a pre-inference."""

    group: Annotated[Name, _doc("consumer group on `retrieval`, without kafka.prefix")] = "trigger"
    risk_share: Annotated[
        Share, _doc("a request is at risk if predicted full inference exceeds this share of the SLO")
    ] = 0.05
    stale_ms: Annotated[Ms, _doc("an event older than this is not admitted")] = 1000.0
    max_status_age_ms: Annotated[Ms, _doc("no admissions for an owner whose status is older than this")] = 3000.0
    load_burst_ms: Annotated[Ms, _doc("most device time that a lane may request at once")] = 100.0
    delegate: Annotated[
        bool, _doc("have prefix KV that a lane's owner would have too late computed by a worker with room and time")
    ] = True


class Worker(Section, frozen=True, kw_only=True):
    """A worker: one process with one device."""

    name: Annotated[
        str, Meta(pattern=r"^[A-Za-z0-9._-]{0,128}$"), _doc("name, unique per worker; empty: host and pid")
    ] = ""
    group: Annotated[Name, _doc("consumer group whose members own the lanes, without kafka.prefix")] = "workers"
    device: Annotated[str, Meta(pattern=r"^(cpu|cuda|npu)(:\d+)?$"), _doc("cpu, cuda[:N] or npu[:N]")] = "cpu"
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], _doc("type of weights, K and V")] = "float32"
    kernels: Annotated[
        Kernels,
        _doc(
            "what computes the built-in model's layers. auto: triton on cuda, the processor's instructions on cpu, "
            "and torch operators where those are absent or deviate; an instruction set: on cpu, at most its "
            "instructions. All but auto and torch refuse to start where they cannot run"
        ),
    ] = "auto"
    threads: Annotated[Positive, _doc("CPU threads of one operator")] = 1
    capacity: Annotated[
        float, Meta(gt=0, le=1e6), _doc("weight of this worker when lanes are distributed over workers")
    ] = 1.0
    hbm_bytes: Annotated[int, Meta(ge=1, extra=BYTES), _doc("size of the HBM tier: prefix KV on the device")] = 1 << 30
    dram_bytes: Annotated[
        int, Meta(ge=0, extra=BYTES), _doc("size of the DRAM tier: prefix KV in host memory; 0: no such tier")
    ] = 2 << 30
    dram_storage: Annotated[
        Literal["exact", "int8"], _doc("form of K and V in DRAM; int8 holds 2-4 times as much, and rounds scores")
    ] = "exact"
    dram_int8_deviation: Annotated[
        float,
        Meta(gt=0, le=1),
        _doc("with int8: largest relative deviation of scores; above it the start fails, and an audit logs an error"),
    ] = 0.03
    pinned_share: Annotated[Share, _doc("share of hbm_bytes for requests that are admitted and not yet ranked")] = 0.5
    pre_infer_share: Annotated[Share, _doc("share of device time that pre-inference may use")] = 0.7
    max_ranking_delay_ms: Annotated[
        Ms, _doc("longest time that a chunk of a prefill job, or a batch, delays a ranking request")
    ] = 5.0
    max_stale_tokens: Annotated[
        int,
        Meta(ge=0, le=4096),
        _doc("a stale prefix is used if it lacks at most this many newest behaviours, which are scored as suffix"),
    ] = 16
    batch: Annotated[Positive, _doc("most ranking requests per step if batching is faster; otherwise two")] = 8
    audit_share: Annotated[Share, _doc("share of ranking requests that are also scored in full, for comparison")] = 0.01
    reply_ms: Annotated[
        float, Meta(ge=0, le=1e4), _doc("time reserved before a ranking's deadline for the answer's way to its client")
    ] = 5.0
    max_queue: Annotated[
        Positive, _doc("most waiting ranking requests; further ones are answered `overloaded` at once")
    ] = 2048
    max_waiting_bytes: Annotated[
        int,
        Meta(ge=1 << 20, extra=BYTES),
        _doc(
            "most memory of unanswered requests, tokens and scores included; beyond it requests are answered "
            "`overloaded` at once. 256 MiB hold 1000 requests of the longest that relay.max_… allow by default: 10 s "
            "of work for a device that takes 10 ms each"
        ),
    ] = 256 << 20
    max_crashes: Annotated[
        int, Meta(ge=2, le=100), _doc("a ranking is answered `failed`, not run, after this many workers ended at it")
    ] = 3
    max_timeout_ms: Annotated[
        Ms, _doc("longest time that a ranking waits here, even if its sender's timeout is longer")
    ] = 60_000.0
    forward: Annotated[
        bool, _doc("forward rankings that would be late here to a worker that is in time, instead of refusing them")
    ] = True
    truncate_min_tokens: Annotated[
        int,
        Meta(ge=0),
        _doc(
            "a ranking without prefix KV that would be late in full is ranked with its newest behaviours alone: the "
            "largest multiple of this that is in time; 0: never"
        ),
    ] = 0
    status_interval_ms: Annotated[Positive, _doc("time between statuses on `worker-status`")] = 250
    drain_ms: Annotated[Positive, _doc("on SIGTERM, longest time for accepted requests to complete")] = 10_000


class Handover(Section, frozen=True, kw_only=True):
    """Handover: the prefix KV of lanes that move from worker to worker."""

    secret: Annotated[
        str,
        Meta(pattern=r"^$|^.{16,}$", extra={"secret": True}),
        _doc("shared by all workers, 16 characters or more; without it and tls_certificate there is no handover"),
    ] = ""
    tls_ca: Annotated[
        str, _doc("PEM file of the workers' certificate authority; empty: one derived from handover.secret")
    ] = ""
    tls_certificate: Annotated[
        str, _doc("PEM file of this worker's certificate, with URI:relaygr://worker/NAME and its advertised host")
    ] = ""
    tls_key: Annotated[
        str, _doc("PEM file of the key of handover.tls_certificate; empty: in the certificate's file")
    ] = ""
    networks: Annotated[
        tuple[str, ...],
        _doc("the workers' networks, in CIDR form; connections to or from others are refused"),
    ] = ("127.0.0.0/8", "::1/128", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7")
    host: Annotated[str, _doc("address on which other workers fetch the prefix KV of lanes that they gained")] = (
        "127.0.0.1"
    )
    port: Annotated[Port, _doc("port on handover.host; 0: any free one")] = 0
    advertise: Annotated[
        str, _doc("host name for other workers; empty: handover.host, or this machine's name if that is any address")
    ] = ""
    mib_per_s: Annotated[
        float, Meta(gt=0, le=1e6), _doc("most that this worker sends to all others together, in MiB per second")
    ] = 64.0


class Model(Section, frozen=True, kw_only=True):
    """The model: a user's own factory, a checkpoint, or an HSTU of this shape with random weights."""

    factory: Annotated[str, _doc("module:factory of a user's own model; empty: the built-in HSTU")] = ""
    path: Annotated[
        str, _doc("folders that hold the factory's module, separated as in PYTHONPATH; empty: installed packages")
    ] = ""
    checkpoint: Annotated[
        str, _doc("folder with config.json and model.safetensors, or a packaged one (demo); empty: random weights")
    ] = ""
    seed: Annotated[int, _doc("seed of random weights")] = 7
    layers: Annotated[Positive, _doc("STU layers")] = 4
    dim: Annotated[Positive, _doc("embedding width D")] = 128
    heads: Annotated[Positive, _doc("attention heads H")] = 4
    dqk: Annotated[Positive, _doc("query/key width per head")] = 32
    dv: Annotated[Positive, _doc("value width per head")] = 32
    vocab: Annotated[Positive, _doc("items with a row of their own: ids from 0 to below this")] = 100_000
    oov_rows: Annotated[
        int, Meta(ge=0), _doc("rows shared, by hash, by all other item ids; 0: they count modulo model.vocab")
    ] = 0
    max_positions: Annotated[Positive, _doc("rows of the position table; later positions share the last row")] = 8192
    scale_tokens: Annotated[Positive, _doc("N of the attention scale 1/N; a constant of the model")] = 1024
    contextual_seq_len: Annotated[
        int, Meta(ge=0), _doc("number of first tokens that attend to the whole prefix; requires an empty suffix")
    ] = 0
    max_attn_len: Annotated[int, Meta(ge=0), _doc("tokens attend at most this many tokens back; 0: no limit")] = 0
    relative_positions: Annotated[
        int, Meta(ge=0), _doc("distances of positions that bias attention, each with a weight a layer; 0: no such bias")
    ] = 0
    relative_times: Annotated[
        int, Meta(ge=0, le=128), _doc("buckets of times between tokens that bias attention; 0: no such bias")
    ] = 0
    group_norm: Annotated[bool, _doc("normalise attention outputs per head instead of over all heads")] = False
    tasks: Annotated[tuple[str, ...], _doc("names of the score columns")] = ("click", "like")


class Client(Section, frozen=True, kw_only=True):
    """The client, in a recommendation service."""

    timeout_ms: Annotated[Ms, _doc("default timeout of rank()")] = 1000.0
    reply_partition: Annotated[
        int, Meta(ge=-1), _doc("partition of `scores` for this client's answers; -1: chosen at random")
    ] = -1
    max_in_flight: Annotated[Positive, _doc("most concurrent rank() calls; further ones raise Overloaded")] = 10_000
    hedge_ms: Annotated[
        float,
        Meta(ge=0, le=3.6e6),
        _doc("after this long without an answer, the request is also sent to another worker; 0: never"),
    ] = 200.0
    announce_linger_ms: Annotated[
        float, Meta(ge=0, le=1000), _doc("a request event waits this long for others, to be sent in one batch")
    ] = 10.0
    tenant: Annotated[str, LABEL, _doc("tenant of requests that do not state one")] = ""
    silence_ms: Annotated[
        Ms, _doc("if a lane's owner has stated nothing for this long, requests go to another worker at once")
    ] = 1500.0


class History(Section, frozen=True, kw_only=True):
    """The store of users' histories, for messages that refer to a history instead of having it."""

    store: Annotated[
        str,
        Meta(pattern=r"^[^@]*$"),
        _doc("redis://HOST:PORT/DB, rediss://… (TLS), sqlite:FILE, or module:factory of a user's own; empty: none"),
    ] = ""
    username: Annotated[str, _doc("user of the store; empty: its default user")] = ""
    password: Annotated[str, Meta(extra={"secret": True}), _doc("password at the store")] = ""
    tls_ca: Annotated[
        str, _doc("PEM file of the authority that signed the store's certificate; empty: the system's")
    ] = ""
    tls_certificate: Annotated[str, _doc("PEM file of this process's certificate, if the store requires one")] = ""
    tls_key: Annotated[
        str, _doc("PEM file of the key of history.tls_certificate; empty: in the certificate's file")
    ] = ""
    prefix: Annotated[str, Meta(max_length=64), _doc("prefix of the keys in Redis")] = "relaygr:history:"
    timeout_ms: Annotated[Ms, _doc("timeout of one call of the store, connecting included")] = 100.0
    retries: Annotated[
        int, Meta(ge=0, le=10), _doc("a failed read is tried so many times more, within the ranking's deadline")
    ] = 2
    reads: Annotated[Positive, _doc("most reads of a worker at a time; further ones wait")] = 32
    cache_bytes: Annotated[
        int,
        Meta(ge=0, extra=BYTES),
        _doc("histories that a worker keeps, so that a ranking behind its announcement reads nothing"),
    ] = 64 << 20
    max_behaviours: Annotated[
        int,
        Meta(ge=0),
        _doc("`relaygr history append` cuts a longer history to its newest three quarters of this; 0: never"),
    ] = 4096


class Gateway(Section, frozen=True, kw_only=True):
    """The gateway: announce, rank and cancel over HTTP."""

    host: Annotated[str, _doc("address to serve on; without gateway.tokens, only this machine's own are allowed")] = (
        "127.0.0.1"
    )
    port: Annotated[Port, _doc("port on gateway.host; 0: any free one, logged at start")] = 8080
    tokens: Annotated[
        str,
        Meta(extra={"secret": True}),
        _doc(
            "TENANT:TOKEN, separated by blanks, commas or lines: bearer tokens of 16 characters or more, and the "
            "tenant of their requests; a tenant may have several. Empty: every request is client.tenant's"
        ),
    ] = ""
    tls_certificate: Annotated[str, _doc("PEM file of the certificate to serve HTTPS with; empty: HTTP")] = ""
    tls_key: Annotated[
        str, _doc("PEM file of the key of gateway.tls_certificate; empty: in the certificate's file")
    ] = ""
    max_body_bytes: Annotated[
        int, Meta(ge=1024, le=64 << 20, extra=BYTES), _doc("largest body of a request; a larger one is refused unread")
    ] = 1 << 20
    max_requests: Annotated[
        Positive,
        _doc("most concurrent requests of one tenant; further ones are answered 429. Each holds a body at most"),
    ] = 256
    read_ms: Annotated[
        Ms, _doc("time for a client to send a request's head, then its body, and to take up the answer")
    ] = 5000.0
    drain_ms: Annotated[Positive, _doc("on SIGTERM, longest time for accepted requests to complete")] = 10_000


class Telemetry(Section, frozen=True, kw_only=True):
    """Logs, metrics and health."""

    log_level: Annotated[Literal["debug", "info", "warning", "error"], _doc("least severe level logged")] = "info"
    log_format: Annotated[Literal["auto", "console", "json"], _doc("auto: console on a terminal, else json")] = "auto"
    hash_user_ids: Annotated[bool, _doc("log a keyed hash instead of user ids")] = False
    hash_key: Annotated[
        str, Meta(extra={"secret": True}), _doc("key of telemetry.hash_user_ids; empty: a new one at each start")
    ] = ""
    host: Annotated[str, _doc("address of /metrics, /healthz, /readyz")] = "127.0.0.1"
    port: Annotated[Port, _doc("port of /metrics, /healthz, /readyz; 0: any free one, logged at start")] = 0
    port_file: Annotated[str, _doc("file that receives the chosen port, for supervisors; empty: none")] = ""
    stall_ms: Annotated[Ms, _doc("/healthz fails when the event loop has not run for this long")] = 10_000.0
    traces: Annotated[
        bool,
        _doc("make spans of requests and export them by OTLP, as the variables OTEL_… say; needs the extra `otel`"),
    ] = False
    trace_share: Annotated[
        Share, _doc("share of requests traced where no caller has decided; OTEL_TRACES_SAMPLER, if set, goes before")
    ] = 0.01


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings, one section per attribute."""

    kafka: Kafka = Kafka()
    relay: Relay = Relay()
    trigger: Trigger = Trigger()
    worker: Worker = Worker()
    handover: Handover = Handover()
    model: Model = Model()
    client: Client = Client()
    history: History = History()
    gateway: Gateway = Gateway()
    telemetry: Telemetry = Telemetry()
