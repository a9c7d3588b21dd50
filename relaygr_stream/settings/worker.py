"""Settings of a worker, of its model, and of hand-over between workers."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from relaygr_stream.settings.section import (
    BYTES,
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

Kernels = Literal["auto", "torch", "triton", "amx", "avx512_bf16", "avx512", "avx2"]


class Worker(Section, frozen=True, kw_only=True):
    """A worker: one process with one device."""

    name: Annotated[
        str, Meta(max_length=128, pattern=NAME_SIGNS), doc("name, unique per worker; empty: host and pid")
    ] = ""
    # Consumer group whose members own the lanes, behind kafka.prefix, which keeps fleets apart.
    group: Name = "workers"
    device: Annotated[str, Meta(pattern=r"\A(cpu|cuda|npu)(:\d+)?\Z"), doc("cpu, cuda[:N] or npu[:N]")] = "cpu"
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], doc("type of weights, K and V")] = "float32"
    kernels: Annotated[
        Kernels,
        doc(
            "what computes the built-in model's layers. auto: triton on cuda, the processor's instructions on cpu, "
            "and torch operators where those are absent or deviate; an instruction set: on cpu, at most its "
            "instructions. All but auto and torch refuse to start where they cannot run"
        ),
    ] = "auto"
    threads: Annotated[Positive, doc("CPU threads of one torch operator or C kernel; for device cpu")] = 1
    capacity: Annotated[
        float,
        Meta(ge=0, le=1e6),
        doc("weight of this worker when lanes are distributed over workers, 1: usual; 0: its measured speed"),
    ] = 0.0
    hbm_bytes: Annotated[int, Meta(ge=1, extra=BYTES), doc("size of the HBM tier: prefix KV on the device")] = 1 << 30
    dram_bytes: Annotated[
        int,
        Meta(ge=0, extra=BYTES),
        doc(
            "size of the DRAM tier: prefix KV in host memory; 0: no such tier. Beside an accelerator the memory is "
            "pinned, which takes the next power of two"
        ),
    ] = 2 << 30
    dram_path: Annotated[
        FilePath,
        doc(
            "folder, in memory (/dev/shm) or on a disk, for the file that holds the DRAM tier: a restarted worker of "
            "this worker.name finds its prefix KV again; empty: no file"
        ),
    ] = ""
    pinned_share: Annotated[Share, doc("share of hbm_bytes for requests that are admitted and not yet ranked")] = 0.5
    max_ranking_delay_ms: Annotated[
        float,
        Meta(ge=0, le=3.6e6),
        doc(
            "longest time that a chunk of a prefill job, or a batch, delays a ranking request; 0: by the fixed time of "
            "chunks, at most a fifth of relay.slo_ms. A chunk that is computed in one step takes up to twice its fixed "
            "time, even where that is longer"
        ),
    ] = 0.0
    max_stale_tokens: Annotated[
        int,
        Meta(ge=0, le=4096),
        doc("a stale prefix is used if it lacks at most this many newest behaviours, which are scored as suffix"),
    ] = 16
    # Most rankings scored in one batch. max_ranking_delay_ms bounds its time before: where batches are not faster, one
    # takes at most half of that, or has two rankings. Where they are, an eighth adds little.
    max_batch: Positive = 8
    audit_share: Annotated[
        Share, doc("share of rankings answered from prefix KV that are scored again in full, in idle time")
    ] = 0.01
    # Most waiting ranking requests; a further one is forwarded, takes the place of one of the client that has the most,
    # or is answered `overloaded`. 20 s of work for a device that takes 10 ms each: deadlines end a queue before.
    max_queue: Positive = 2048
    max_waiting_bytes: Annotated[
        int,
        Meta(ge=1 << 20, extra=BYTES),
        doc(
            "most memory of unanswered requests, tokens and scores included; from three quarters of it on, rankings "
            "are answered `overloaded`. 256 MiB take 900 rankings of the longest that relay.max_… allow by default: "
            "9 s of work for a device that takes 10 ms each"
        ),
    ] = 256 << 20
    # A ranking is answered `failed`, not run, after this many workers ended at it. Two may be chance: a deployment
    # stops two workers that have it, one after the other.
    max_crashes: Annotated[int, Meta(ge=2, le=100)] = 3
    # Longest time that a ranking waits here, even if its sender's timeout is longer: no caller waits a minute.
    max_timeout_ms: Ms = 60_000.0
    forward: Annotated[
        bool, doc("forward rankings that would be late here to a worker that is in time, instead of refusing them")
    ] = True
    truncate_to: Annotated[
        int,
        Meta(ge=0),
        doc(
            "a ranking that no worker would have in time in full is ranked with so many of its newest behaviours; "
            "0: it is refused"
        ),
    ] = 64  # a model of MovieLens-1M ranks with 50 as well as with 1,000
    withhold_outcomes: Annotated[
        bool,
        doc(
            "answers and statuses do not tell whether prefix KV were found: outcome `withheld`, no admission, worker, "
            "length or times of it, no reason of a refusal; metrics, logs and traces do. For fleets whose clients "
            "must not learn of each other's users"
        ),
    ] = False
    # Time between statuses on `worker-status`: the age of what triggers, clients and peers decide by.
    status_interval_ms: Positive = 250
    drain_ms: Annotated[Positive, doc("on SIGTERM, longest time for accepted requests to complete")] = 10_000


class Handover(Section, frozen=True, kw_only=True):
    """Hand-over: moves the prefix KV of lanes from worker to worker."""

    secret: Annotated[
        SharedSecret,
        doc(
            "the fleet's secret: signs statuses on worker-status, and turns the hand-over on in workers; the same in "
            "workers, triggers and trusted clients; 16 characters or more; empty: unsigned"
        ),
    ] = ""
    accepted_secret: Annotated[
        SharedSecret,
        doc(
            "processes with this secret are believed, too: the next handover.secret or the former one, during a change"
        ),
    ] = ""
    tls_ca: Annotated[FilePath, doc("PEM file of the authority that signs workers' certificates; empty: tls.ca")] = ""
    tls_certificate: Annotated[
        FilePath,
        doc(
            "PEM file of this worker's certificate, with URI:relaygr://worker/NAME and its advertised host, signed by "
            "handover.tls_ca; empty: one that is derived from handover.secret"
        ),
    ] = ""
    tls_key: Annotated[
        FilePath, doc("PEM file of the key of handover.tls_certificate; empty: in the certificate's file")
    ] = ""
    networks: Annotated[
        tuple[str, ...],
        doc("the workers' networks, in CIDR form; connections to or from others are refused"),
    ] = ("127.0.0.0/8", "::1/128", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7")
    host: Annotated[str, doc("address on which other workers fetch the prefix KV of lanes that they gained")] = (
        "127.0.0.1"
    )
    port: Annotated[Port, doc("port on handover.host; 0: any free one")] = 0
    advertise: Annotated[
        str, doc("host name for other workers; empty: handover.host, or this machine's name if that is 0.0.0.0 or ::")
    ] = ""
    mib_per_s: Annotated[
        float,
        Meta(ge=0, le=1e6),
        doc(
            "most that this worker sends to all others together, in MiB per second; 0: as fast as the wire, but while "
            "it computes, within a twentieth of a processor's time"
        ),
    ] = 0.0


class Model(Section, frozen=True, kw_only=True):
    """The model: a user's own factory, a checkpoint, or an HSTU with random weights.

    The shape is that of an HSTU with random weights, for tests and measurements.
    """

    factory: Annotated[str, doc("module:factory of a user's own model; empty: the built-in HSTU")] = ""
    path: Annotated[
        FilePath, doc("folders that hold the factory's module, separated as in PYTHONPATH; empty: installed packages")
    ] = ""
    checkpoint: Annotated[
        FilePath,
        doc(
            "folder with config.json and model.safetensors, or a packaged one (demo); empty: a small HSTU with random "
            "weights, but `relaygr up` takes demo where nothing in [model] is set"
        ),
    ] = ""
    seed: int = 7  # of random weights
    layers: Annotated[int, Meta(ge=1, le=4096)] = 4
    dim: Positive = 128
    heads: Positive = 4
    dqk: Positive = 32
    dv: Positive = 32
    vocab: Positive = 100_000
    oov_rows: Annotated[int, Meta(ge=0)] = 0
    max_positions: Positive = 8192
    scale_tokens: Positive = 1024
    contextual_seq_len: Annotated[int, Meta(ge=0)] = 0
    max_attn_len: Annotated[int, Meta(ge=0)] = 0
    relative_positions: Annotated[int, Meta(ge=0)] = 0
    relative_times: Annotated[int, Meta(ge=0, le=128)] = 0
    group_norm: bool = False
    tasks: tuple[str, ...] = ("click", "like")
