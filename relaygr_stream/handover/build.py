"""Builds a worker's hand-over from the settings and the worker's parts."""

from __future__ import annotations

from relaygr_stream.engine.build import WorkerRuntime, longest_sequence
from relaygr_stream.engine.tier_file import computed_by
from relaygr_stream.errors import ConfigError
from relaygr_stream.fleet import OwnerDirectory
from relaygr_stream.handover.desk import Desk, HandoverMetrics
from relaygr_stream.handover.service import HandoverService
from relaygr_stream.handover.wire import PrefixIdentity, token_bytes
from relaygr_stream.models.api import schema_of
from relaygr_stream.settings.schema import Settings
from relaygr_stream.wire.topic_files import TopicSet
from relaygr_stream.worker.context import WorkerContext
from relaygr_stream.worker.device import Device


def hands_over(settings: Settings) -> bool:
    """Whether the settings turn the hand-over on. Raises ConfigError if they name only some of the TLS files."""
    handover = settings.handover
    given = [name for name in ("tls_ca", "tls_certificate", "tls_key") if getattr(handover, name)]
    if given and not (handover.tls_ca and handover.tls_certificate):
        raise ConfigError(
            f"of the hand-over's TLS files only {', '.join(f'`handover.{name}`' for name in given)} are set: set both "
            f"handover.tls_ca (or tls.ca) and handover.tls_certificate, or none"
        )
    return bool(handover.secret or handover.tls_certificate)


def handover_for(
    context: WorkerContext, device: Device, topics: TopicSet, peers: OwnerDirectory
) -> HandoverService | None:
    """The hand-over of this worker; None if it is off. Raises ConfigError for settings that clash."""
    settings, runtime = context.settings, device.runtime
    if not hands_over(settings):
        return None
    if not settings.worker.dram_bytes:
        raise ConfigError(
            "the hand-over is on and `worker.dram_bytes` = 0: prefix KV move from DRAM tier to DRAM tier; set "
            "worker.dram_bytes, or unset handover.secret and handover.tls_certificate"
        )
    return HandoverService(
        settings.handover,
        context.name,
        identity_of(runtime, topics.lanes),
        Desk(device.thread),
        peers,
        HandoverMetrics(context.registry),
        longest_sequence(settings, runtime.model),
        runtime.model.layout,
        token_bytes(schema_of(runtime.model)),
        runtime.scheduler,
        topics,
    )


def identity_of(runtime: WorkerRuntime, lanes: int) -> PrefixIdentity:
    """The origin and shape of this worker's prefix KV."""
    layout = runtime.model.layout
    return PrefixIdentity(
        model_version=runtime.model.version,
        layers=layout.layers,
        heads=layout.heads,
        dqk=layout.dqk,
        dv=layout.dv,
        dtype=str(layout.dtype).removeprefix("torch."),
        device=computed_by(runtime.model, runtime.device),
        lanes=lanes,
        state=layout.state,
    )
