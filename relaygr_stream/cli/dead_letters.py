"""`relaygr dead-letters`: list, show, replay."""

from __future__ import annotations

import asyncio
import sys

import click

from relaygr_stream.cli.options import F, scenario_option, settings_options
from relaygr_stream.settings.schema import Settings


def _filters(command: F) -> F:
    command = click.option("--reason", default="", help="Only dead letters with this reason (malformed, invalid, …).")(
        command
    )
    return click.option("--from", "origin", default="", metavar="TOPIC", help="Only dead letters from this topic.")(
        command
    )


@click.group(name="dead-letters")
def dead_letters_command() -> None:
    """List, show and replay unreadable messages.

    A dead letter's address is PARTITION:OFFSET in the dead-letter topic.
    """


@dead_letters_command.command(name="list")
@_filters
@click.option("--json", "as_lines", is_flag=True, help="One JSON object per line.")
@settings_options
@scenario_option
def list_command(settings: Settings, reason: str, origin: str, as_lines: bool) -> None:
    """List the dead letters, oldest first, with reason and origin."""
    from relaygr_stream.bus.away import Away
    from relaygr_stream.ops.dead_letters.replay import choose, read_letters
    from relaygr_stream.ops.dead_letters.table import as_json, print_letters
    from relaygr_stream.telemetry.printable import SafeConsole

    found = asyncio.run(read_letters(settings.kafka, away := Away()))
    letters = choose(found, addresses=(), reason=reason, origin=origin, prefix=settings.kafka.prefix, away=away)
    if as_lines:
        for letter in letters:
            click.echo(as_json(letter, value=False))
    else:
        print_letters(SafeConsole(), letters)
    away.check()


@dead_letters_command.command()
@click.argument("addresses", nargs=-1, required=True, metavar="ADDRESS…")
@settings_options
@scenario_option
def show(settings: Settings, addresses: tuple[str, ...]) -> None:
    """Show dead letters completely: headers, and the unpacked value, also of an unknown schema."""
    from relaygr_stream.bus.away import Away
    from relaygr_stream.ops.dead_letters.replay import choose, read_letters
    from relaygr_stream.ops.dead_letters.table import print_letter
    from relaygr_stream.telemetry.printable import SafeConsole

    found = asyncio.run(read_letters(settings.kafka, away := Away()))
    for letter in choose(found, addresses=addresses, reason="", origin="", prefix=settings.kafka.prefix, away=away):
        print_letter(SafeConsole(), letter)
    away.check()


@dead_letters_command.command()
@click.argument("addresses", nargs=-1, metavar="[ADDRESS…]")
@_filters
@click.option("--all", "everything", is_flag=True, help="All dead letters that --reason and --from select.")
@click.option(
    "--again",
    is_flag=True,
    help="Include dead letters that were replayed before, came back from a replay, or ended workers.",
)
@click.option("--dry-run", is_flag=True, help="Print what would be replayed, and send nothing.")
@settings_options
@scenario_option
def replay(
    settings: Settings,
    addresses: tuple[str, ...],
    reason: str,
    origin: str,
    everything: bool,
    again: bool,
    dry_run: bool,
) -> None:
    """Send dead letters to their original topic, with their original key and headers.

    Each dead letter is sent once: one that was replayed, came back from a replay, or ended workers, is skipped without
    --again. Exits 1 if a message was refused, 4 if a partition has no broker: then run it again.
    """
    from relaygr_stream.bus.away import Away
    from relaygr_stream.bus.topics import verified_topics
    from relaygr_stream.ops.dead_letters.letter import Letter
    from relaygr_stream.ops.dead_letters.replay import Verdict, choose, read_letters, verdict_before, why
    from relaygr_stream.ops.dead_letters.replay import replay as send_again
    from relaygr_stream.ops.dead_letters.table import line_of
    from relaygr_stream.ops.stopping import run_until_stopped

    if not (addresses or everything or reason or origin):
        raise click.UsageError("name dead letters by ADDRESS, select them with --reason or --from, or give --all")
    if addresses and everything:
        raise click.UsageError("--all means every dead letter; leave out --all, or the addresses")
    verdicts: list[Verdict] = []
    away = Away()

    def report(letter: Letter, verdict: Verdict, detail: str) -> None:
        verdicts.append(verdict)
        click.echo(line_of(letter, verdict, detail))

    async def run() -> bool:
        topics = await verified_topics(settings.kafka)
        found, prefix = await read_letters(settings.kafka, away), settings.kafka.prefix
        letters = choose(found, addresses=addresses, reason=reason, origin=origin, prefix=prefix, away=away)
        if not dry_run:
            return await send_again(settings.kafka, topics, letters, again=again, report=report, away=away)
        for letter in letters:
            verdict = verdict_before(letter, topics, again=again)
            report(letter, verdict, why(verdict))
        return True

    clean = run_until_stopped(run(), line="stopped; what was sent is marked")
    totals = {verdict: verdicts.count(verdict) for verdict in dict.fromkeys(verdicts)}
    click.echo(", ".join(f"{count} {verdict}" for verdict, count in totals.items()) or "no dead letters to replay")
    away.check()
    sys.exit(not clean)
