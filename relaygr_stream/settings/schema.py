"""Every setting: its section, type, bounds, default and meaning. Where values come from is config.py's business."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct, structs

#: Settings that no log, error or traceback may show; each is marked as such where it stands.
SECRETS = frozenset({"answer_secret", "sasl_password", "tls_key_password", "hash_key", "secret"})
SECRET_SHOWN = "********"

#: Most lanes of a relay: what a consumer claims or states of each lane still fits into one message.
MAX_LANES = 10_000

BYTES = {"unit": "bytes"}  # such a setting also accepts "512MiB", "2GiB", …

#: A text without control characters and NUL, which goes into logs and keys.
LABEL = Meta(max_length=128, pattern=r"\A[^\x00-\x1f\x7f-\x9f]*\Z")
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,128}$")]
Port = Annotated[int, Meta(ge=0, le=65535)]
Positive = Annotated[int, Meta(ge=1)]
Share = Annotated[float, Meta(ge=0, le=1)]
Ms = Annotated[float, Meta(gt=0, le=3.6e6)]


def _doc(text: str) -> Meta:
    return Meta(description=text)


class Section(Struct, frozen=True, kw_only=True):
    """A group of settings, whose representation hides secrets."""

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
    topics_dir: Annotated[str, _doc("folder with one TOML file per topic; empty: those that come with the package")] = (
        ""
    )
    partitions: Annotated[int, Meta(ge=0, le=MAX_LANES), _doc("lanes; 0: as the topic files say")] = 0
    dead_letter_values: Annotated[
        bool,
        _doc("dead letters keep the whole message, its history too, which `replay` needs; else its size and SHA-256"),
    ] = False
    replication: Annotated[int, Meta(ge=0, le=9), _doc("copies of each topic; 0: as the topic files say")] = 0
    fetch_max_wait_ms: Annotated[
        int,
        Meta(ge=1, le=10_000),
        _doc("long poll for lanes, which moved ones wait for; 12 for the embedded broker, which wakes no poll"),
    ] = 50
    tail_max_wait_ms: Annotated[
        int, Meta(ge=1, le=10_000), _doc("the same where a fetch holds up nothing else: scores and worker-status")
    ] = 500
    heartbeat_ms: Annotated[Positive, _doc("heartbeat of group members; moved lanes wait for the next one")] = 250
    session_timeout_ms: Annotated[Positive, _doc("a crashed member's lanes move after this; brokers bound it")] = 6000
    max_poll_ms: Annotated[Positive, _doc("a worker whose device makes no progress this long gives its lanes up")] = (
        10_000
    )
    commit_ms: Annotated[Positive, _doc("offsets are committed this often")] = 1000
    request_timeout_ms: Annotated[Positive, _doc("one request to a broker")] = 10_000
    security_protocol: Annotated[
        Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"], _doc("what the brokers' listeners speak")
    ] = "PLAINTEXT"
    sasl_mechanism: Annotated[
        Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"], _doc("how the password is shown; PLAIN only within TLS")
    ] = "SCRAM-SHA-512"
    plain_without_tls: Annotated[
        bool, _doc("let PLAIN send the password over SASL_PLAINTEXT, where everybody on the way can read it")
    ] = False
    sasl_username: Annotated[str, _doc("user of SASL_PLAINTEXT and SASL_SSL")] = ""
    sasl_password: Annotated[str, Meta(extra={"secret": True}), _doc("its password")] = ""
    tls_ca: Annotated[str, _doc("PEM file of the authority that signed the brokers; empty: the system's")] = ""
    tls_certificate: Annotated[str, _doc("PEM file of our own certificate, where brokers ask for one")] = ""
    tls_key: Annotated[str, _doc("PEM file of its key; empty: in the certificate's file")] = ""
    tls_key_password: Annotated[str, Meta(extra={"secret": True}), _doc("password of that key")] = ""


class Relay(Section, frozen=True, kw_only=True):
    """What the trigger and the workers must agree on."""

    slo_ms: Annotated[Ms, _doc("the ranking stage's P99 target")] = 50.0
    life_window_ms: Annotated[Ms, _doc("longest time from admission to ranking for which a prefix KV stays pinned")] = (
        2000.0
    )
    max_prefix_tokens: Annotated[Positive, _doc("longest prefix; a longer one is refused")] = 4096
    max_suffix_tokens: Annotated[int, Meta(ge=0), _doc("longest suffix; a longer one is refused")] = 256
    max_candidates: Annotated[Positive, _doc("most candidates in a request")] = 2048
    answer_secret: Annotated[
        str,
        Meta(pattern=r"^$|^.{16,}$", extra={"secret": True}),
        _doc("workers sign answers with it, clients that have it take no others; ≥ 16 characters, empty: unsigned"),
    ] = ""


class Trigger(Section, frozen=True, kw_only=True):
    """Admission: which requests are worth a pre-inference (DESIGN §6)."""

    group: Annotated[Name, _doc("consumer group on `retrieval`, after the prefix")] = "trigger"
    risk_fraction: Annotated[Share, _doc("at risk when predicted full inference exceeds this share of the SLO")] = 0.05
    stale_ms: Annotated[Ms, _doc("an event older than this is not worth admitting any more")] = 1000.0
    silence_ms: Annotated[Ms, _doc("an owner whose status is older than this gets no admissions")] = 3000.0
    load_burst_ms: Annotated[Ms, _doc("device time a lane may ask for at once, in milliseconds")] = 100.0


class Worker(Section, frozen=True, kw_only=True):
    """One process, one device."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{0,128}$"), _doc("unique per worker; empty: host and pid")] = ""
    group: Annotated[Name, _doc("consumer group whose members own the lanes, after the prefix")] = "workers"
    device: Annotated[str, Meta(pattern=r"^(cpu|cuda|npu)(:\d+)?$"), _doc("cpu, cuda[:N] or npu[:N]")] = "cpu"
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], _doc("type of weights, K and V")] = "float32"
    kernels: Annotated[
        Literal["auto", "torch", "triton"],
        _doc("attention of the built-in model; auto: triton on cuda if it is there and agrees, else torch"),
    ] = "auto"
    threads: Annotated[Positive, _doc("CPU threads of one operator")] = 1
    capacity: Annotated[float, Meta(gt=0, le=1e6), _doc("weight when lanes are shared out")] = 1.0
    hbm_bytes: Annotated[int, Meta(ge=1, extra=BYTES), _doc("prefix KV on the device")] = 1 << 30
    dram_bytes: Annotated[int, Meta(ge=0, extra=BYTES), _doc("prefix KV in host memory behind it; 0: none")] = 2 << 30
    dram_storage: Annotated[
        Literal["exact", "int8"], _doc("form of K and V in DRAM; int8 holds 2-4 times as much, and rounds scores")
    ] = "exact"
    dram_int8_deviation: Annotated[
        float,
        Meta(gt=0, le=1),
        _doc("with int8: most that scores may deviate, relative; more at start refuses, in an audit is an error"),
    ] = 0.03
    pinned_share: Annotated[Share, _doc("share of hbm_bytes that admitted, not yet ranked requests may hold")] = 0.5
    pre_infer_share: Annotated[Share, _doc("share of device time that pre-inference may use")] = 0.7
    max_ranking_delay_ms: Annotated[
        Ms, _doc("longest a pre-infer chunk or a batch may keep a ranking request waiting")
    ] = 5.0
    max_stale_tokens: Annotated[
        int,
        Meta(ge=0, le=4096),
        _doc("cached prefix KV that lack at most so many of the newest behaviours serve: those are scored as suffix"),
    ] = 16
    batch: Annotated[Positive, _doc("most ranking requests scored in one step, where batches pay; two where not")] = 8
    audit_share: Annotated[Share, _doc("share of ranking requests also scored in full, to compare")] = 0.01
    warm_up: Annotated[
        bool, _doc("in idle time, bring prefix KV of users likely to return soon from DRAM back to HBM")
    ] = False
    reply_ms: Annotated[
        float, Meta(ge=0, le=1e4), _doc("rankings are due so long before their deadline: an answer's way to its client")
    ] = 5.0
    queue_limit: Annotated[Positive, _doc("ranking requests waiting; more are answered `overloaded` at once")] = 2048
    waiting_bytes: Annotated[
        int,
        Meta(ge=1 << 20, extra=BYTES),
        _doc(
            "memory of requests read and not answered, with tokens and scores; more are answered `overloaded` at once. "
            "256 MiB are 1000 of the longest that relay.max_… allow by default: 10 s of a device that takes 10 ms each"
        ),
    ] = 256 << 20
    crash_limit: Annotated[
        int, Meta(ge=2, le=100), _doc("a ranking that so many workers in a row ended at is answered `failed`, not run")
    ] = 3
    max_timeout_ms: Annotated[
        Ms, _doc("a ranking whose sender waits for longer is given up after this; no answer is worth more memory")
    ] = 60_000.0
    forward: Annotated[
        bool, _doc("send rankings that would be late here to a worker that is in time, instead of refusing them")
    ] = True
    status_ms: Annotated[Positive, _doc("worker-status is published this often")] = 250
    drain_ms: Annotated[Positive, _doc("on SIGTERM, time for accepted requests to finish")] = 10_000


class Handover(Section, frozen=True, kw_only=True):
    """Prefix KV of lanes that move, from worker to worker."""

    secret: Annotated[
        str,
        Meta(pattern=r"^$|^.{16,}$", extra={"secret": True}),
        _doc("shared by all workers, 16 characters or more; without it and tls_certificate nothing is handed over"),
    ] = ""
    tls_ca: Annotated[str, _doc("PEM file of the workers' authority, in place of one made from the secret")] = ""
    tls_certificate: Annotated[
        str, _doc("PEM file of this worker's certificate by it: URI:relaygr://worker/NAME, and its advertised host")
    ] = ""
    tls_key: Annotated[str, _doc("PEM file of its key; empty: in the certificate's file")] = ""
    networks: Annotated[
        str, _doc("networks of workers, in CIDR form, comma-separated: others are not connected to, nor let in")
    ] = "127.0.0.0/8,::1/128,10.0.0.0/8,172.16.0.0/12,192.168.0.0/16,fc00::/7"
    host: Annotated[str, _doc("address on which other workers fetch prefix KV of lanes that they took over")] = (
        "127.0.0.1"
    )
    port: Annotated[Port, _doc("its port; 0: any free one")] = 0
    advertise: Annotated[
        str, _doc("host by which other workers reach that; empty: handover.host, or this host's name if that is any")
    ] = ""
    mib_per_s: Annotated[float, Meta(gt=0, le=1e6), _doc("most that this worker sends to all others")] = 64.0


class Model(Section, frozen=True, kw_only=True):
    """The model: a user's own factory, a checkpoint, or a seeded random HSTU of this shape."""

    factory: Annotated[str, _doc("module:factory of a user's own model; empty: the built-in HSTU")] = ""
    path: Annotated[
        str, _doc("folders to find that module in, separated as in PYTHONPATH; empty: where packages are installed")
    ] = ""
    checkpoint: Annotated[str, _doc("folder with config.json and model.safetensors; empty: random weights")] = ""
    seed: Annotated[int, _doc("seed of random weights")] = 7
    layers: Annotated[Positive, _doc("STU layers")] = 4
    dim: Annotated[Positive, _doc("embedding width D")] = 128
    heads: Annotated[Positive, _doc("attention heads H")] = 4
    dqk: Annotated[Positive, _doc("query/key width per head")] = 32
    dv: Annotated[Positive, _doc("value width per head")] = 32
    vocab: Annotated[Positive, _doc("rows of the item table; ids are taken modulo this")] = 100_000
    max_positions: Annotated[Positive, _doc("rows of the position table; later positions share the last")] = 8192
    scale_tokens: Annotated[Positive, _doc("N of the attention scale 1/N; a constant of the model")] = 1024
    contextual_seq_len: Annotated[int, Meta(ge=0), _doc("first tokens that see the whole prefix; needs no suffix")] = 0
    max_attn_len: Annotated[int, Meta(ge=0), _doc("tokens attend at most this far back; 0: to everything")] = 0
    group_norm: Annotated[bool, _doc("normalise attention outputs per head instead of over all heads")] = False
    tasks: Annotated[str, _doc("names of the score columns, comma-separated")] = "click,like"


class Client(Section, frozen=True, kw_only=True):
    """The recommendation service's side."""

    timeout_ms: Annotated[Ms, _doc("default timeout of rank()")] = 1000.0
    reply_partition: Annotated[
        int, Meta(ge=-1), _doc("partition of `scores` to be answered on; -1: chosen at random")
    ] = -1
    max_in_flight: Annotated[Positive, _doc("concurrent rank() calls; more raise Overloaded")] = 10_000
    hedge_ms: Annotated[
        float, Meta(ge=0, le=3.6e6), _doc("without an answer this long, another worker is asked as well; 0: never")
    ] = 200.0
    announce_linger_ms: Annotated[
        float, Meta(ge=0, le=1000), _doc("a request event waits this long for others, to travel with them")
    ] = 10.0
    tenant: Annotated[str, LABEL, _doc("whose users they are, where a request does not say")] = ""
    silence_ms: Annotated[Ms, _doc("a lane whose owner has said nothing this long is asked elsewhere at once")] = 1500.0


class Telemetry(Section, frozen=True, kw_only=True):
    """Logs, metrics, health."""

    log_level: Annotated[Literal["debug", "info", "warning", "error"], _doc("least severe level logged")] = "info"
    log_format: Annotated[Literal["auto", "console", "json"], _doc("auto: console on a terminal, else json")] = "auto"
    hash_user_ids: Annotated[bool, _doc("log a keyed hash in place of user ids")] = False
    hash_key: Annotated[str, Meta(extra={"secret": True}), _doc("key of that hash; empty: new at each start")] = ""
    host: Annotated[str, _doc("address of /metrics, /healthz, /readyz")] = "127.0.0.1"
    port: Annotated[Port, _doc("port of /metrics, /healthz, /readyz; 0: any free one, logged at start")] = 0
    port_file: Annotated[str, _doc("file to write the chosen port into, for supervisors; empty: none")] = ""
    stall_ms: Annotated[Ms, _doc("/healthz fails when the event loop has not run for this long")] = 10_000.0


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole configuration, one section per attribute."""

    kafka: Kafka = Kafka()
    relay: Relay = Relay()
    trigger: Trigger = Trigger()
    worker: Worker = Worker()
    handover: Handover = Handover()
    model: Model = Model()
    client: Client = Client()
    telemetry: Telemetry = Telemetry()
