"""The groups of a fleet's scenarios on the cluster: their topics, and the routes by which clients find them."""

from __future__ import annotations

import msgspec

from relaygr_stream.bus.ages import now_ms
from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.routes import read_routes, write_routes
from relaygr_stream.bus.topic_check import topics_with
from relaygr_stream.bus.topics import apply_topics, topic_exists
from relaygr_stream.settings.schema import Settings
from relaygr_stream.telemetry.printable import Say
from relaygr_stream.wire.routes import Routes, routes_topic
from relaygr_stream.wire.topic_files import load_topics
from relaygr_stream.wire.worker_status import StatusReader


async def make_groups(settings: Settings, say: Say, *, alter: bool = False) -> None:
    """Make what is missing: the topics of the group without a name, those of each scenario's group, and its routes.

    Routes that are there stay, since users may have moved to another group, but for those to the group of another
    scenario than the file says. alter: as of apply_topics, for the scenarios'. Raises BrokerError, TopicError.
    """
    made = len((await apply_topics(settings.kafka)).created)
    topics = load_topics(settings.kafka)
    made += not await topic_exists(settings.kafka, routes_topic(topics))
    await topic_exists(settings.kafka, routes_topic(topics), create=True)
    reader = StatusReader.from_settings(settings, topics)
    await reader.prepare()
    known = await read_routes(settings.kafka, topics, reader)
    async with Producer(settings.kafka, client_id="relaygr-up") as producer:
        lanes = {}
        for name in (each.name for each in settings.scenarios if not each.served_by):
            group = settings.serving(name).kafka
            report = await apply_topics(group, alter=alter)
            made += len(report.created)
            if report.kept:
                say(f"scenario {name}: {report.kept} (--group {name})")
            lanes[name] = topics_with(group, report.rows).lanes
        names = {*known, *lanes}
        for scenario in settings.scenarios:
            before = known.get(scenario.name)
            elsewhere = () if before is None else before.groups
            if before is None or (len(elsewhere) == 1 and elsewhere[0] != scenario.group and {*elsewhere} <= names):
                epoch = max(now_ms(), 0 if before is None else before.epoch + 1)
                routes = Routes.of_one(scenario.group, lanes[scenario.group], epoch=epoch)
                routes = msgspec.structs.replace(routes, sent_ms=now_ms())
                await write_routes(producer, topics, reader, routes, scenario.name)
    told = ", ".join(each.name for each in settings.scenarios)
    say(f"made {made} topics for scenarios {told}" if made else f"the topics of scenarios {told} are there")
