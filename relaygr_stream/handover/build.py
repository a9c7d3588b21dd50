"""Puts a worker's hand-over together from the settings and what the worker is built of."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from relaygr_stream.cache.storage import make_storage
from relaygr_stream.errors import ConfigError
from relaygr_stream.handover.desk import Desk, HandoverMetrics
from relaygr_stream.handover.service import Handover
from relaygr_stream.handover.wire import Identity
from relaygr_stream.settings.schema import Settings
from relaygr_stream.wire.fleet import OwnerDirectory
from relaygr_stream.worker.build import Inside
from relaygr_stream.worker.device import DeviceThread


def hands_over(settings: Settings) -> bool:
    """Whether the settings ask for it. ConfigError where they name a part of the TLS files only."""
    handover = settings.handover
    given = [name for name in ("tls_ca", "tls_certificate", "tls_key") if getattr(handover, name)]
    if given and not (handover.tls_ca and handover.tls_certificate):
        raise ConfigError(
            f"of the hand-over's TLS files {', '.join(f'`handover.{name}`' for name in given)} alone: give both "
            f"handover.tls_ca and handover.tls_certificate, or neither"
        )
    return bool(handover.secret or handover.tls_certificate)


def handover_for(
    settings: Settings,
    name: str,
    inside: Inside,
    device: DeviceThread,
    lanes: int,
    peers: OwnerDirectory,
    registry: CollectorRegistry,
) -> Handover | None:
    """The hand-over of this worker; None where it is off. Raises ConfigError for settings that clash."""
    if not hands_over(settings):
        return None
    if not settings.worker.dram_bytes:
        raise ConfigError(
            "`handover.secret` is set and `worker.dram_bytes` = 0: prefix KV are handed over from DRAM tier to DRAM "
            "tier; give the worker one, or unset handover.secret"
        )
    return Handover(
        settings.handover,
        name,
        identity_of(settings, inside, lanes),
        Desk(device, lanes),
        peers.workers,
        HandoverMetrics(registry),
        settings.relay.max_prefix_tokens + settings.relay.max_suffix_tokens,
        make_storage(settings.worker.dram_storage, inside.model.layout).nbytes,
    )


def identity_of(settings: Settings, inside: Inside, lanes: int) -> Identity:
    """What prefix KV of this worker are made by and of. The device's kind is part of it: the same weights give K and V
    that differ in their last bits elsewhere."""
    layout = inside.model.layout
    return Identity(
        model_version=inside.model.version,
        layers=layout.layers,
        heads=layout.heads,
        dqk=layout.dqk,
        dv=layout.dv,
        dtype=str(layout.dtype).removeprefix("torch."),
        storage=settings.worker.dram_storage,
        device=inside.device.type,
        lanes=lanes,
    )
