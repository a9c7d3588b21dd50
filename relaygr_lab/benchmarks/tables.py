"""An item table that is larger than memory: a worker's start, its memory, and rows gathered a second.

python relaygr_lab/benchmarks/tables.py [--gib N] [--folder FOLDER]      with CHECK=1 judges

The table is one sparse file of safetensors, D 256 in float32: pages that are read take memory as any file's do, but
none comes from the disk. Ids are Zipf (exponent 1.1) over all rows, hashed to places, 2,560 a call, as many as a
request's. `index_select` has the same ids, modulo the rows of a table of 1 GiB in memory. Two processes map the file.
All are measured in turns, on one thread.
"""

from __future__ import annotations

import json
import multiprocessing
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import click
import msgspec
import numpy as np
import torch
from judge import judge

from relaygr_stream.models.features import oov_hash
from relaygr_stream.models.hstu_model import HSTUConfig
from relaygr_stream.models.loading import CONFIG_FILE, load_any_checkpoint, random_model, save_checkpoint
from relaygr_stream.models.map_items import map_items
from relaygr_stream.models.mapped import HotRows, shard_name

DIM: Final = 256
ROW: Final = 4 * DIM
PLAIN_ROWS: Final = (1 << 30) // ROW
CALL: Final = 2560
CALLS: Final = 200
EXPONENT: Final = 1.1
#: Slots of hot rows: a sixteenth of an HBM tier of 1 GiB.
SLOTS: Final = (1 << 26) // ROW
CPU: Final = torch.device("cpu")
MIB: Final = 1 << 20
#: A worker of a large table starts as one of a small table does; its own memory is that of the small one.
START_S: Final = 10.0
OWN_MIB: Final = 64.0
#: Of the rate of index_select, warm.
RATE: Final = 0.5


def sparse(folder: Path, rows: int) -> Path:
    """A checkpoint whose item table has so many rows, all zeros, in a sparse file."""
    small = HSTUConfig(
        layers=1, dim=DIM, heads=4, dqk=64, dv=64, vocab=1024, max_positions=256, scale_tokens=256, tasks=("click",)
    )
    save_checkpoint(random_model(small, 1), folder / "small")
    map_items(folder / "small", folder / "large", "float32", 1 << 30)
    config = json.loads((folder / "large" / CONFIG_FILE).read_bytes())
    (folder / "large" / CONFIG_FILE).write_text(json.dumps(config | {"vocab": rows}))
    header = msgspec.json.encode({"rows": {"dtype": "F32", "shape": [rows, DIM], "data_offsets": [0, rows * ROW]}})
    header += b" " * (-len(header) % 8)
    with (folder / "large" / shard_name(0, 1)).open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + rows * ROW)
    return folder / "large"


def zipf(rows: int, seed: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """CALLS calls of CALL ids."""
    ranks = np.random.default_rng(seed).zipf(EXPONENT, (CALLS, CALL)) % rows
    return (oov_hash(ranks) % np.uint64(rows)).astype(np.int64)


def memory() -> dict[str, float]:
    """This process's memory in MiB, by smaps_rollup."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    found = {line.split(":")[0]: int(line.split()[1]) / 1024 for line in lines}
    return {"private": found["Private_Dirty"], "shared": found["Rss"] - found["Private_Dirty"], "pss": found["Pss"]}


def worker(folder: Path, rows: int, pipe: Connection) -> None:
    """A process that loads the model and gathers rows: seconds to load, memory before and after."""
    torch.set_num_threads(1)
    before, started = memory(), time.perf_counter()
    model = load_any_checkpoint(folder)
    table = model.embedding.table
    assert table is not None
    start_s = time.perf_counter() - started
    for ids in zipf(rows, 1):
        table.rows(ids)
    pipe.send("gathered")
    pipe.recv()  # the other one has the same pages by now
    pipe.send((start_s, {name: value - before[name] for name, value in memory().items()}))


def workers(folder: Path, rows: int, count: int) -> list[tuple[float, dict[str, float]]]:
    """What so many processes say that hold the table at the same time."""
    spawned = multiprocessing.get_context("spawn")
    pipes = [spawned.Pipe() for _ in range(count)]
    running = [spawned.Process(target=worker, args=(folder, rows, child)) for _, child in pipes]
    for each in running:
        each.start()
    for step in ("wait", "go on"):
        if step == "go on":
            for pipe, _ in pipes:
                pipe.send(step)
        said = [pipe.recv() for pipe, _ in pipes]
    for each in running:
        each.join()
    return said


def rate(gather: Callable[[Any], Any], calls: Any) -> float:
    """Rows a second, by the median call."""
    seconds = []
    for ids in calls:
        started = time.perf_counter()
        gather(ids)
        seconds.append(time.perf_counter() - started)
    return CALL / statistics.median(seconds)


@click.command()
@click.option("--gib", type=click.FloatRange(0.01), default=64.0, show_default=True, help="Size of the table.")
@click.option(
    "--folder", type=click.Path(path_type=Path), help="Where the file is made; a file system that has sparse files."
)
def main(gib: float, folder: Path | None) -> None:
    """Print the table."""
    judge(partial(measure, gib, folder))


def measure(gib: float, folder: Path | None) -> list[str]:
    """The same; returns the bounds not kept."""
    torch.set_num_threads(1)
    rows, broken = int(gib * (1 << 30)) // ROW, list[str]()
    place = Path(tempfile.mkdtemp(prefix="tables-", dir=folder))
    try:
        large = sparse(place, rows)
        print(f"{rows:,} rows of {ROW} bytes in one sparse file: {gib:g} GiB\n")
        for count in (1, 2):
            for number, (start_s, grown) in enumerate(workers(large, rows, count)):
                sizes = (
                    f"{grown['private']:.0f} its own, {grown['shared']:.0f} shared, {grown['pss']:.0f} its part of all"
                )
                print(f"worker {number + 1} of {count}: loaded in {start_s:.2f} s; memory in MiB: {sizes}")
                broken += [f"a start takes {start_s:.1f} s; bound: {START_S:g} s"] * (start_s > START_S)
                own = grown["private"]
                broken += [f"a worker has {own:.0f} MiB of its own; bound: {OWN_MIB:g}"] * (own > OWN_MIB)
        table = load_any_checkpoint(large).embedding.table
        assert table is not None
        plain, hot = torch.zeros((PLAIN_ROWS, DIM)), HotRows(SLOTS, DIM, CPU, torch.float32)
        calls = zipf(rows, 1)
        first = rate(table.rows, zipf(rows, 2))
        found: dict[str, list[float]] = {"index_select": [], "mapped": [], "hot rows": []}
        for _ in range(3):
            found["index_select"].append(
                rate(lambda ids: plain.index_select(0, torch.from_numpy(ids % PLAIN_ROWS)), calls)
            )
            found["mapped"].append(rate(table.rows, calls))
            found["hot rows"].append(rate(lambda ids: hot.rows(ids, table.rows), calls))
        base = statistics.median(found["index_select"])
        print(f"\nmapped, new ids: {first / 1e6:.2f} million rows/s")
        for name, each in found.items():
            middle = statistics.median(each)
            print(f"{name}: {middle / 1e6:.2f} million rows/s, {middle / base:.2f} of index_select")
        share = hot.found / (hot.found + hot.missed)
        print(f"hot rows: {SLOTS:,} slots have {share:.0%} of the distinct rows of a call")
        ratio = statistics.median(found["mapped"]) / base
        broken += [f"mapped rows come at {ratio:.2f} of index_select; bound: at least {RATE:g}"] * (ratio < RATE)
    finally:
        shutil.rmtree(place)
    return broken


if __name__ == "__main__":
    main()
