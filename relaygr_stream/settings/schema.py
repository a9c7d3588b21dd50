"""Every setting: its section, type, bounds, default and meaning. load.py reads the values."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct, structs

from relaygr_stream.errors import ConfigError
from relaygr_stream.settings.scenarios import FACTORY, LONGEST_PREFIX, RESERVE, SECTION, Scenario, served_together
from relaygr_stream.settings.section import (
    BYTES,
    LABEL,
    NAME_SIGNS,
    FilePath,
    Ms,
    Name,
    Port,
    Positive,
    Section,
    Share,
    SharedSecret,
    doc,
)
from relaygr_stream.settings.worker import Handover, Model, Worker

#: Most lanes of a relay: a consumer's statement on each of them still fits into one message.
MAX_LANES = 10_000


class Kafka(Section, frozen=True, kw_only=True):
    """How to reach Kafka, and the timings of its group protocol."""

    bootstrap: Annotated[str, Meta(pattern=r"\A[^@/\n]*\Z"), doc("brokers, HOST:PORT[,HOST:PORT…]")] = "localhost:9092"
    prefix: Annotated[
        str, Meta(max_length=LONGEST_PREFIX, pattern=NAME_SIGNS), doc("prefix of every topic and group name")
    ] = "relaygr."
    topics_dir: Annotated[FilePath, doc("folder with one TOML file per topic; empty: the packaged topics")] = ""
    partitions: Annotated[int, Meta(ge=0, le=MAX_LANES), doc("number of lanes; 0: the cluster's, or the files'")] = 0
    dead_letter_values: Annotated[
        bool,
        doc("dead letters keep the whole message, history included, for `replay`; otherwise its size and SHA-256"),
    ] = False
    replication: Annotated[int, Meta(ge=0, le=9), doc("replicas of each topic; 0: as in the topic files")] = 0
    # Longest wait of a fetch of lanes: a lane that moves waits for it, beside a heartbeat. 20 idle fetches a second.
    fetch_max_wait_ms: Annotated[int, Meta(ge=1, le=10_000)] = 50
    # Longest fetch of `scores` and `worker-status`, whose partitions do not move: 2 idle fetches a second.
    tail_max_wait_ms: Annotated[int, Meta(ge=1, le=10_000)] = 500
    # Moved lanes wait for the next heartbeat; a 24th of the session, so that one lost is no lost member.
    heartbeat_interval_ms: Positive = 250
    session_timeout_ms: Annotated[
        Positive, doc("a crashed member's lanes move after this; brokers bound the value")
    ] = 6000
    max_poll_interval_ms: Annotated[
        int,
        Meta(ge=1000),  # an idle device thread shows itself every 250 ms
        doc("a worker whose device makes no progress for this long ends; a process that reads nothing loses its lanes"),
    ] = 10_000
    # What was read since the last commit is read again after a crash: a second of a lane's records.
    commit_interval_ms: Positive = 1000
    # A broker that is silent for 20 of the longest fetches is gone.
    request_timeout_ms: Positive = 10_000
    security_protocol: Annotated[
        Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"], doc("protocol of the brokers' listeners")
    ] = "PLAINTEXT"
    sasl_mechanism: Annotated[
        Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"], doc("how the client proves its password; PLAIN needs TLS")
    ] = "SCRAM-SHA-512"
    plain_without_tls: Annotated[bool, doc("allow PLAIN over SASL_PLAINTEXT, which sends the password unencrypted")] = (
        False
    )
    sasl_username: Annotated[str, doc("user of SASL_PLAINTEXT and SASL_SSL")] = ""
    sasl_password: Annotated[str, Meta(extra={"secret": True}), doc("password of kafka.sasl_username")] = ""
    # Those of [tls], unless given here, as former settings.
    tls_ca: FilePath = ""
    tls_certificate: FilePath = ""
    tls_key: FilePath = ""
    tls_key_password: Annotated[str, Meta(extra={"secret": True})] = ""


class Tls(Section, frozen=True, kw_only=True):
    """TLS to brokers and to the history store; workers and gateways have certificates of their own."""

    ca: Annotated[
        FilePath,
        doc(
            "PEM file of the authorities that signed the certificates of brokers and of the history store; empty: the "
            "system's"
        ),
    ] = ""
    certificate: Annotated[
        FilePath, doc("PEM file of this process's certificate, for brokers and history stores that require one")
    ] = ""
    key: Annotated[FilePath, doc("PEM file of the key of tls.certificate; empty: in the certificate's file")] = ""
    key_password: Annotated[str, Meta(extra={"secret": True}), doc("password of tls.key")] = ""


class Relay(Section, frozen=True, kw_only=True):
    """Settings that must be equal in triggers, workers and clients; answers' secrets in workers and clients only."""

    slo_ms: Annotated[Ms, doc("the ranking stage's P99 target; what can be done within it is done first")] = 50.0
    life_window_ms: Annotated[Ms, doc("longest time from admission to ranking for which a prefix KV stays pinned")] = (
        2000.0
    )
    max_prefix_tokens: Annotated[Positive, doc("longest prefix; a longer one is refused")] = 4096
    max_suffix_tokens: Annotated[int, Meta(ge=0), doc("longest suffix; a longer one is refused")] = 256
    max_candidates: Annotated[Positive, doc("most candidates in a request")] = 2048
    answer_secret: Annotated[
        SharedSecret,
        doc("signs answers; clients that have it drop unsigned ones; 16 characters or more; empty: unsigned"),
    ] = ""
    accepted_answer_secret: Annotated[
        SharedSecret,
        doc("clients accept answers signed with this, too: the next answer_secret or the former one, during a change"),
    ] = ""

    def beyond(self, *, prefix: int = 0, suffix: int = 0, candidates: int = 0) -> str | None:
        """The first of these counts that is above its limit, as text with the setting's name; None: all are allowed.

        Example: "6 suffix behaviours, the limit is 5 (relay.max_suffix_tokens)".
        """
        if prefix <= self.max_prefix_tokens and suffix <= self.max_suffix_tokens and candidates <= self.max_candidates:
            return None  # the common case
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

    # Consumer group on `retrieval`, behind kafka.prefix, which keeps fleets apart: two groups would decide twice.
    group: Name = "trigger"
    max_event_age_ms: Annotated[Ms, doc("an event older than this is not admitted")] = 1000.0
    # No admissions for an owner whose status is older: twice the time after which clients take a worker for silent.
    max_status_age_ms: Ms = 3000.0
    delegate: Annotated[
        bool,
        doc(
            "let a worker with free memory and device time compute prefix KV that a lane's owner would finish too late"
        ),
    ] = True


class Client(Section, frozen=True, kw_only=True):
    """The client, in a recommendation service."""

    timeout_ms: Annotated[Ms, doc("default timeout of rank(); in a worker, that of requests which state none")] = 1000.0
    # Partition of `scores` for this client's answers; -1: chosen at random, so that clients spread over the brokers.
    reply_partition: Annotated[int, Meta(ge=-1)] = -1
    # Most concurrent rank() calls; further ones raise Overloaded. A second of 10,000 requests/s: no client sends more.
    max_in_flight: Positive = 10_000
    hedge_ms: Annotated[
        float,
        Meta(ge=0, le=3.6e6),
        doc(
            "after this long without an answer, or a third of the call's timeout if that is shorter, the request is "
            "also sent to another worker; 0: never"
        ),
    ] = 200.0
    # A request event waits this long for others, to be sent in one batch: a small part of the retrieval stage.
    announce_linger_ms: Annotated[float, Meta(ge=0, le=1000)] = 10.0
    tenant: Annotated[str, LABEL, doc("tenant of requests that do not state one")] = ""
    # If a lane's owner has stated nothing for this long, requests go to another worker at once; a worker forwards and
    # hands over to no peer that is silent for so long. Six times worker.status_interval_ms: a busy loop may miss some.
    silence_ms: Ms = 1500.0


class History(Section, frozen=True, kw_only=True):
    """The store of users' histories, for messages that refer to a history instead of having it."""

    store: Annotated[
        FilePath,
        Meta(pattern=r"\A[^@]*\Z"),
        doc("redis://HOST:PORT/DB, rediss://… (TLS), sqlite:FILE, or module:factory of a user's own; empty: none"),
    ] = ""
    username: Annotated[str, doc("user of the store; empty: its default user")] = ""
    password: Annotated[str, Meta(extra={"secret": True}), doc("password at the store")] = ""
    # Those of [tls], unless given here, as former settings.
    tls_ca: FilePath = ""
    tls_certificate: FilePath = ""
    tls_key: FilePath = ""
    tls_key_password: Annotated[str, Meta(extra={"secret": True, "internal": True})] = ""
    # Prefix of the keys in Redis. Fleets that share a Redis have a database each, by the DB of `store`.
    prefix: Annotated[str, Meta(max_length=64)] = "relaygr:history:"
    timeout_ms: Annotated[Ms, doc("timeout of one call of the store, connecting included")] = 100.0
    # A failed read is tried so many times more, within the ranking's deadline: for a closed connection, and once more.
    max_retries: Annotated[int, Meta(ge=0, le=10)] = 2
    # Most reads of a worker at a time; further ones wait. At 1 ms a read 32,000 a second, more than a device ranks.
    max_reads: Positive = 32
    cache_bytes: Annotated[
        int,
        Meta(ge=0, extra=BYTES),
        doc("histories that a worker keeps, so that a ranking behind its announcement reads nothing"),
    ] = 64 << 20
    max_behaviours: Annotated[
        int,
        Meta(ge=0),
        doc(
            "a history that `relaygr history append` makes longer than this, or than relay.max_prefix_tokens, is cut "
            "to its newest three quarters of that; 0: never"
        ),
    ] = 4096


class Gateway(Section, frozen=True, kw_only=True):
    """The gateway: announce, rank and cancel over HTTP."""

    host: Annotated[
        str, doc("address to serve on; without gateway.tokens, only 127.0.0.1, ::1 and localhost are allowed")
    ] = "127.0.0.1"
    port: Annotated[Port, doc("port on gateway.host; 0: any free one, logged at start")] = 8080
    tokens: Annotated[
        str,
        Meta(extra={"secret": True}),
        doc(
            "TENANT:TOKEN, separated by blanks, commas or lines: bearer tokens of 16 characters or more, and the "
            "tenant of their requests; a tenant may have several. Empty: every request is client.tenant's"
        ),
    ] = ""
    tls_certificate: Annotated[FilePath, doc("PEM file of the certificate to serve HTTPS with; empty: HTTP")] = ""
    tls_key: Annotated[
        FilePath, doc("PEM file of the key of gateway.tls_certificate; empty: in the certificate's file")
    ] = ""
    max_body_bytes: Annotated[
        int,
        Meta(ge=0, le=64 << 20, extra=BYTES),
        doc(
            "largest body of a request; a larger one is refused unread. 0: twice what relay.max_prefix_tokens, "
            "max_suffix_tokens and max_candidates take as JSON lists, and 64 KiB; raise it for wide features"
        ),
    ] = 0
    max_requests: Annotated[
        Positive,
        doc("most concurrent requests of one tenant; further ones are answered 429. Each holds a body at most"),
    ] = 256
    max_rate: Annotated[
        float,
        Meta(gt=0, le=1e6),
        doc(
            "requests a second of one tenant, as many at once; further ones are answered 429. A refused body counts as "
            "one more for each KiB. An address without a valid token has a tenth"
        ),
    ] = 1000.0
    # Time for a client to send a request's head, then its body, and to take up the answer: 100 kB at 160 kbit/s.
    read_ms: Ms = 5000.0
    # On SIGTERM, longest time for accepted requests to complete: as worker.drain_ms.
    drain_ms: Positive = 10_000


class Telemetry(Section, frozen=True, kw_only=True):
    """Logs, metrics and health."""

    log_level: Annotated[Literal["debug", "info", "warning", "error"], doc("least severe level logged")] = "info"
    log_format: Annotated[Literal["auto", "console", "json"], doc("auto: console on a terminal, else json")] = "auto"
    hash_user_ids: Annotated[bool, doc("log a keyed hash instead of user ids")] = False
    hash_key: Annotated[
        str, Meta(extra={"secret": True}), doc("key of telemetry.hash_user_ids; empty: a new one at each start")
    ] = ""
    host: Annotated[str, doc("address of /metrics, /healthz, /readyz")] = "127.0.0.1"
    port: Annotated[Port, doc("port of /metrics, /healthz, /readyz; 0: any free one, logged at start")] = 0
    port_file: Annotated[FilePath, doc("file that receives the chosen port, for supervisors; empty: none")] = ""
    # /healthz fails when the event loop has not run for this long: a hundred times as long as an idle loop takes.
    stall_ms: Annotated[float, Meta(ge=500, le=3.6e6)] = 10_000.0
    traces: Annotated[
        bool,
        doc("make spans of requests and export them by OTLP, as the variables OTEL_… say; needs the extra `otel`"),
    ] = False
    trace_share: Annotated[
        Share,
        doc("share of requests traced where no caller has decided; OTEL_TRACES_SAMPLER, if set, overrides it"),
    ] = 0.01


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings, one section per attribute."""

    kafka: Kafka = Kafka()
    tls: Tls = Tls()
    relay: Relay = Relay()
    trigger: Trigger = Trigger()
    worker: Worker = Worker()
    handover: Handover = Handover()
    model: Model = Model()
    client: Client = Client()
    history: History = History()
    gateway: Gateway = Gateway()
    telemetry: Telemetry = Telemetry()
    #: Those of the sections [scenario.NAME], and the name of the group that this process serves; "": none.
    scenarios: tuple[Scenario, ...] = ()
    scenario: str = ""
    #: Those of the whole fleet, where these are of a process that serves one scenario.
    fleet: Settings | None = None

    def serving(self, name: str) -> Settings:
        """The settings of a process that serves this scenario: with the group, the SLO and the model of its section.

        Where its group serves others, too, with the tightest SLO of them. Of a process that serves another one, too.
        Raises ConfigError for a name without a section.
        """
        if self.fleet is not None:
            return self.fleet.serving(name)
        scenario = next((each for each in self.scenarios if each.name == name), None)
        if scenario is None:
            there = ", ".join(each.name for each in self.scenarios) or "none: give the fleet's file with --config"
            raise ConfigError(f"no scenario {name!r}: no file has a section [{SECTION}{name}]; there are {there}")
        if scenario.served_by:
            return self.serving(scenario.served_by)
        replace, model = structs.replace, self.model
        if scenario.model:
            is_factory = FACTORY.fullmatch(scenario.model)
            factory, checkpoint = (scenario.model, "") if is_factory else ("", scenario.model)
            model = replace(model, factory=factory, checkpoint=checkpoint)
        return replace(
            self,
            scenario=name,
            fleet=self,
            kafka=replace(self.kafka, prefix=f"{self.kafka.prefix}{name}."),
            relay=replace(self.relay, slo_ms=min(each.slo_ms for each in served_together(self.scenarios, name))),
            model=model,
        )

    def standing_by(self) -> Settings:
        """The settings of a worker of the reserve. Raises ConfigError where there are no scenarios to stand by for."""
        if not self.scenarios:
            raise ConfigError("a reserve is for scenarios, and there are none: give the fleet's file with --config")
        return structs.replace(self, scenario=RESERVE, fleet=self)

    @property
    def sharing(self) -> dict[str, Scenario]:
        """The scenarios that this process serves, by name, its group's own first; empty: one at most."""
        found = served_together(self.scenarios, self.scenario) if self.scenario else ()
        return {each.name: each for each in found} if len(found) > 1 else {}

    def slo_ms_of(self, scenario: str) -> float:
        """Of a ranking that names this scenario; one that this process does not serve counts as its group's own."""
        sharing = self.sharing
        found = sharing.get(scenario) or sharing.get(self.scenario)
        return self.relay.slo_ms if found is None else found.slo_ms

    @property
    def slo_in_words(self) -> str:
        """That of this process's rankings, for people."""
        return "their scenario's SLO" if self.sharing else f"{self.relay.slo_ms:g} ms"

    @property
    def longest_history(self) -> int:
        """The length at which a history in the store is cut; 0: never. Workers reject a longer prefix than theirs."""
        return min(self.history.max_behaviours, self.relay.max_prefix_tokens)
