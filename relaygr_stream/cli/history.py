"""`relaygr history`: import, append, show, erase users' histories in the store that history.store names."""

from __future__ import annotations

import asyncio
import sys
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import click

from relaygr_stream.cli.options import AddOptions, F, settings_options
from relaygr_stream.settings.schema import Settings
from relaygr_stream.settings.worker import Model
from relaygr_stream.workload.formats import FORMATS
from relaygr_stream.workload.values import UNITS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from relaygr_stream.history.store import WritableStore
    from relaygr_stream.wire.behaviours import Behaviours
    from relaygr_stream.workload.logs import InteractionLog

#: Users that failed are shown by name up to so many.
SHOWN: Final = 5


def _named(_: click.Context, __: click.Parameter, value: str | None) -> str | None:
    if value == "":  # a variable that is not set, most likely: other users would be erased, or overwritten
        raise click.BadParameter("is empty: name a tenant, or leave it out for that of client.tenant")
    return value


def _tenant_option(words: str) -> AddOptions:
    return click.option("--tenant", metavar="NAME", callback=_named, help=f"{words}  [client.tenant]")


def _tenant(settings: Settings, given: str | None) -> str:
    """As clients, gateways and workers: who names no tenant means client.tenant."""
    return settings.client.tenant if given is None else given


def _log_options(command: F) -> F:
    for option in (
        _tenant_option("The users' tenant."),
        click.option("--time-unit", type=click.Choice(UNITS), help="Unit of times. [by magnitude]"),
        click.option(
            "--features", type=click.Path(path_type=Path), help="As in `relaygr replay`: the model's columns."
        ),
        click.option("--columns", metavar="user=A,item=B,action=C,time=D", help="As in `relaygr replay`."),
        click.option("--format", type=click.Choice(FORMATS), help="Format of FILE. [detected]"),
        click.argument("file", type=click.Path(path_type=Path)),
    ):
        command = option(command)
    return command


@click.group(name="history")
def history_command() -> None:
    """Read and write users' histories in the history store.

    Messages may refer to a history in the store instead of having it. history.store names the store; example:
    RELAYGR_HISTORY_STORE=redis://localhost:6379/0
    """


@history_command.command(name="import")
@_log_options
@settings_options
def import_command(settings: Settings, file: Path, **how: Any) -> None:
    """Make a log's interactions the whole histories of its users.

    FILE is a log as `relaygr replay` reads it (docs/reference/workloads.md). Items and actions must be numbers: those
    of the model. A history longer than history.max_behaviours or relay.max_prefix_tokens keeps its newest. Other users'
    histories stay as they are. Exits 1 if a user failed.
    """
    _write_all(settings, _log(file, settings.model, how), _tenant(settings, how["tenant"]), "imported")


@history_command.command()
@_log_options
@settings_options
def append(settings: Settings, file: Path, **how: Any) -> None:
    """Append a log's interactions to the histories of its users.

    A user's interactions must not be older than the last one in the store; otherwise the user is left as it was, and
    named. Where they are the store's newest already, nothing is appended: a command that was stopped can run again.
    Items and actions must be numbers. A history that grows beyond history.max_behaviours or relay.max_prefix_tokens
    loses its oldest behaviours. Exits 1 if a user failed.
    """
    _write_all(settings, _log(file, settings.model, how), _tenant(settings, how["tenant"]), "appended")


@history_command.command()
@click.argument("user")
@_tenant_option("The user's tenant.")
@click.option("--last", default=10, show_default=True, type=click.IntRange(min=0), help="Newest behaviours to list.")
@settings_options
def show(settings: Settings, user: str, tenant: str | None, last: int) -> None:
    """Show a user's history: length, version, digest, the newest behaviours. Exits 1 if there is none."""
    from relaygr_stream.history.store import looked_up, open_store
    from relaygr_stream.telemetry.printable import listing, print_table

    whose = _tenant(settings, tenant)

    async def read() -> tuple[Any, Any]:
        store = open_store(settings.history)
        try:
            reference = await looked_up(store, user, whose, settings.history.timeout_ms / 1e3)
            if reference is None:
                return None, None
            start = max(0, reference.length - last)
            return reference, await store.read(user, whose, reference.version, start, reference.length)
        finally:
            await store.close()

    reference, newest = asyncio.run(read())
    if reference is None:
        click.echo(f"the store has no history of this user of {f'tenant {whose}' if whose else 'no tenant'}")
        sys.exit(1)
    earlier = ", ".join(map(str, sorted(reference.stated())[-9:-1])) or "none"
    click.echo(f"{reference.length} behaviours, version {reference.version}, digest {reference.digest.hex()}")
    click.echo(f"earlier lengths with a digest: {earlier}")
    table = listing(["position", "item", "action", "time (UTC)", *newest.table], numbers=["position", "item", "action"])
    items, actions, times = newest.arrays()
    for at in range(len(newest)):
        values = [_values(key, data, at, len(newest)) for key, data in newest.table.items()]
        row = [reference.length - len(newest) + at, items[at], actions[at], _time(int(times[at])), *values]
        table.add_row(*map(str, row))
    if len(newest):
        print_table(table)


@history_command.command()
@click.argument("user")
@_tenant_option("The user's tenant.")
@click.option(
    "--wait",
    default=15.0,
    show_default=True,
    type=click.FloatRange(0),
    help="Seconds to wait for workers and triggers.",
)
@settings_options
def erase(settings: Settings, user: str, tenant: str | None, wait: float) -> None:
    """Remove a user: the history store, every worker's and trigger's memory, the dead letters that name the user.

    First stop asking for the user: a message that comes later brings prefix KV back. Workers and triggers confirm in
    their statuses. Says which topics' retention still holds messages of the user. Exits 1 if the store failed, a worker
    or trigger did not confirm, or dead letters are left, 4 if a partition has no broker; run it again then. Run one at
    a time: two at once may write each other's dead letters anew.
    """
    from relaygr_stream.errors import HistoryUnavailable
    from relaygr_stream.ops.erase import erase_from_fleet, retained
    from relaygr_stream.telemetry.printable import printable

    whose, store_failed = _tenant(settings, tenant), False

    async def run() -> Any:
        nonlocal store_failed
        if settings.history.store:
            async with _writable(settings) as store:
                try:
                    there = await store.erase(user, whose)
                    click.echo("history store: erased" if there else "history store: it has no history of this user")
                except HistoryUnavailable as error:  # workers and dead letters can be erased all the same
                    store_failed = True
                    click.echo(f"history store: {error}", err=True)
        else:
            click.echo("history store: none is set (history.store)")
        return await erase_from_fleet(settings, user, whose, wait)

    done = asyncio.run(run())
    if done.unasked:
        click.echo(f"workers and triggers: could not be asked: {done.unasked}", err=True)
    for kind, confirmed, unconfirmed in (
        ("worker", done.confirmed, done.unconfirmed),
        ("trigger", done.triggers, done.triggers_unconfirmed),
    ):
        click.echo(f"{kind}s: {len(confirmed)} have dropped the user")
        for name in unconfirmed:
            text = f"did not confirm within {wait:g} s; it may be older, busy, or have another handover.secret"
            click.echo(f"{kind} {printable(name)}: {text}", err=True)
    if done.unread:
        click.echo(
            f"{done.unread} statuses are not believed here: their senders may have refused, too. Compare "
            f"handover.secret, and this host's clock, with theirs",
            err=True,
        )
    click.echo(f"dead letters: {done.letters} removed")
    if done.letters_left:
        click.echo(f"dead letters: could not be removed: {done.letters_left}", err=True)
    click.echo("still held by the logs, if the user was asked for in that time:")
    for topic, hours in [each for group in done.groups for each in retained(group)]:
        click.echo(f"  {topic}: up to {hours:.3g} h (retention.ms + segment.ms)")
    click.echo("  and until the brokers next look (log.retention.check.interval.ms, 5 minutes by default)")
    done.away.check()
    sys.exit(store_failed or not done.complete)


def _values(key: str, data: bytes, at: int, rows: int) -> str:
    import numpy as np

    row = np.frombuffer(data, key.rpartition(":")[2]).reshape(rows, -1)[at]
    return " ".join(f"{value:g}" for value in row)


def _time(ms: int) -> str:
    try:
        return datetime.fromtimestamp(ms / 1e3, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):
        return str(ms)


def _log(file: Path, model: Model, how: dict[str, Any]) -> InteractionLog:
    from relaygr_stream.errors import InputError
    from relaygr_stream.wire.features import NO_FEATURES, FeatureSchema
    from relaygr_stream.workload.columns import ColumnMap
    from relaygr_stream.workload.rows import read_log_for

    log = read_log_for(
        file,
        model,
        format=how["format"],
        columns=ColumnMap.parse(how["columns"]) if how["columns"] else None,
        time_unit=how["time_unit"] or "auto",
        features=FeatureSchema.read(how["features"]) if how["features"] else NO_FEATURES,
    )
    if log.item_names or log.action_names:
        what, names = ("items", log.item_names) if log.item_names else ("actions", log.action_names)
        raise InputError(
            f"{file}: {what} are names, or numbers beyond what travels ({names[0][:40]!r}, …); each file would number "
            f"them anew, and no model knows these numbers: write the model's own"
        )
    click.echo(f"{file}: {log.facts()}", err=True)
    if log.halves:
        click.echo(
            f"{file}: actions have halves: all are stored doubled, 4.5 as 9, unlike those of a file without halves",
            err=True,
        )
    return log


def _write_all(settings: Settings, log: InteractionLog, tenant: str, done: Literal["imported", "appended"]) -> None:
    """Write every user of the log, so many at a time as history.max_reads says, and say what became of them."""
    from rich.progress import Progress

    from relaygr_stream.errors import HistoryMismatch, HistoryUnavailable, InputError
    from relaygr_stream.telemetry.printable import SafeConsole, printable

    if broken := log.broken_text():
        click.echo(broken, err=True)
    failed: list[str] = []
    there = 0
    users, most = log.histories(), settings.longest_history

    async def write(store: WritableStore, user: str, behaviours: Behaviours) -> None:
        nonlocal there
        if done == "appended" and await _ends_with(store, user, tenant, behaviours):
            there += 1
        elif done == "appended":
            await store.append(user, tenant, behaviours, most)
        else:
            newest = behaviours.slice(max(0, len(behaviours) - most), len(behaviours)) if most else behaviours
            await store.replace(user, tenant, newest)

    async def run() -> None:
        async with _writable(settings) as store:
            with Progress(console=SafeConsole(stderr=True), transient=True, disable=not sys.stderr.isatty()) as shown:
                bar = shown.add_task("users", total=len(log.users))

                async def work() -> None:
                    for user, behaviours in users:
                        try:
                            async with asyncio.timeout(10 * settings.history.timeout_ms / 1e3):
                                await write(store, user, behaviours)
                        except (InputError, HistoryMismatch) as error:
                            failed.append(f"{printable(user)}: {error}")
                        except TimeoutError as error:
                            raise HistoryUnavailable("the history store does not answer in time") from error
                        shown.advance(bar)

                await asyncio.gather(*(work() for _ in range(settings.history.max_reads)))

    asyncio.run(run())
    for line in failed[:SHOWN]:
        click.echo(line, err=True)
    if len(failed) > SHOWN:
        click.echo(f"{len(failed) - SHOWN} more users failed", err=True)
    kept = f"; there already: {there}" if there else ""
    click.echo(f"{done}: {len(log.users) - len(failed) - there} users{kept}; failed: {len(failed)}")
    sys.exit(bool(failed))


async def _ends_with(store: WritableStore, user: str, tenant: str, behaviours: Behaviours) -> bool:
    """Whether these are the user's newest behaviours in the store."""
    from relaygr_stream.history.packed import pack

    reference = await store.reference(user, tenant)
    if reference is None or not 0 < len(behaviours) <= reference.length:
        return False
    start = reference.length - len(behaviours)
    newest = await store.read(user, tenant, reference.version, start, reference.length)
    return newest.table == behaviours.table and pack(newest, wide=True) == pack(behaviours, wide=True)


@asynccontextmanager
async def _writable(settings: Settings) -> AsyncIterator[WritableStore]:
    from relaygr_stream.errors import ConfigError
    from relaygr_stream.history.store import WritableStore, open_store

    store = open_store(settings.history)
    try:
        if not isinstance(store, WritableStore):
            raise ConfigError(f"history.store = {settings.history.store} is read-only: it has no append and replace")
        yield store
    finally:
        await store.close()
