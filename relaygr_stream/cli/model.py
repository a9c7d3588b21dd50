"""`relaygr model check`, `conformance`, `import` and `random`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, get_args

import click
from msgspec.structs import replace

from relaygr_stream.cli.options import settings_options
from relaygr_stream.errors import ConfigError
from relaygr_stream.settings.schema import Settings
from relaygr_stream.settings.worker import Kernels, Model

#: As in models/dlrm/config.py, which imports torch.
TIMES = ("query", "constant", "gap")
POSITIONS = ("end", "start", "none")
#: As in models/sasrec/config.py.
ACTIVATIONS = ("gelu", "relu", "swish", "tanh", "sigmoid")
COUNT, NATURAL = click.IntRange(1), click.IntRange(0)
DTYPES = ("float32", "bfloat16", "float16")


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",")) if text.strip() else ()


@click.group(name="model")
def model_command() -> None:
    """Check, import and make models."""


@model_command.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--dtype", type=click.Choice(DTYPES), default="float32", show_default=True)
@click.option("--kernels", type=click.Choice(get_args(Kernels)), default="auto", help="As worker.kernels.")
def conformance(file: Path, dtype: str, kernels: Kernels) -> None:
    """Compare the built-in HSTU, or DlrmHSTU, with reference arrays (FILE.npz), full and cached.

    float32: prints the largest absolute deviations of each variant; exits 1 if one exceeds 1e-4. Half precision: exits
    1 if cached, chunked or cut results deviate more from the reference than full inference in that type does. A file
    of DlrmHSTU (it has `meta/config`) is compared in float32: exits 1 if an array deviates by more than 1e-5.
    """
    from relaygr_stream.models.devices import select_device

    select_device("cpu")  # as in `worker`
    import torch

    from relaygr_stream.models.conformance import format_table, run_conformance
    from relaygr_stream.models.importer.dlrm_arrays import format_dlrm_table, is_dlrm, run_dlrm_conformance
    from relaygr_stream.models.reference_arrays import ReferenceArrays

    arrays = ReferenceArrays(file)
    if is_dlrm(arrays):
        found = run_dlrm_conformance(arrays, getattr(torch, dtype), kernels)
        click.echo(format_dlrm_table(found))
        sys.exit(not all(result.conforms for result in found))
    results = run_conformance(arrays, getattr(torch, dtype), kernels)
    click.echo(format_table(results))
    sys.exit(not all(result.conforms for result in results))


@model_command.group(name="import")
def model_import() -> None:
    """Make a folder for model.checkpoint of a model that was trained elsewhere."""


@model_import.command(name="dlrm-hstu")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--heads", default=4, show_default=True, help="Attention heads; the weights do not say how many.")
@click.option(
    "--scale-tokens",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="N of the attention scale 1/N, as in training; 0: 1 + history + candidates of each request.",
)
@click.option(
    "--times",
    type=click.Choice(TIMES),
    default="query",
    show_default=True,
    help="Rows of times: by the age at the query; constant: all times are equal, as in DLRMv3's data; gap: by the time "
    "since the behaviour before.",
)
@click.option(
    "--positions",
    type=click.Choice(POSITIONS),
    default="end",
    show_default=True,
    help="Rows of positions, counted from the newest (end) or the oldest behaviour (start); none: one row for all.",
)
@click.option(
    "--time-last-row",
    type=click.IntRange(-1),
    default=-1,
    show_default=True,
    help="Last row of times in use; -1: the table's last, as the reference's Triton kernels; its PyTorch ones stop at "
    "D - 1.",
)
@click.option(
    "--min-tokens",
    type=click.IntRange(0),
    default=20,
    show_default=True,
    help="Under so many tokens of history and candidates the user's row is left out; 0: never.",
)
@click.option("--tasks", default="rating", show_default=True, help="Names of the score columns, separated by commas.")
@click.option("--item-table", default="item_id", show_default=True, help="The items' table in the checkpoint.")
@click.option("--category-table", default="item_category_id", show_default=True, help="The categories' table.")
@click.option("--user-table", default="user_id", show_default=True, help="The users' table.")
def import_dlrm_hstu(checkpoint: Path, out: Path, tasks: str, **choices: Any) -> None:
    """Import a DlrmHSTU of meta-recsys/generative-recommenders, the model of MLPerf's DLRMv3.

    CHECKPOINT is a state dict (.pt, read with weights_only=True, or .safetensors), or the folder of a distributed
    checkpoint; OUT is a new folder. Prints what ties prefix KV to one request, and how the model is served then.

    \b
    Example:
      relaygr model import dlrm-hstu checkpoint.pt models/dlrm --time-last-row 511
      relaygr model check --set model.checkpoint=models/dlrm
    """
    from relaygr_stream.models.devices import select_device

    select_device("cpu")
    from relaygr_stream.models.importer.dlrm_hstu import Choices, describe, import_checkpoint

    made = import_checkpoint(checkpoint, out, Choices(tasks=_names(tasks), **choices))
    click.echo(f"{out}: {describe(made)}")


@model_import.command(name="sasrec")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--heads", type=COUNT, required=True, help="Attention heads, as in training; the weights do not say it.")
@click.option(
    "--activation",
    type=click.Choice(ACTIVATIONS),
    default=None,
    help="Of the feed-forward layers; by default gelu for RecBole and relu for gSASRec.",
)
@click.option(
    "--norm-eps",
    type=click.FloatRange(0, 1, min_open=True),
    default=None,
    help="Epsilon of LayerNorm; by default 1e-12 for RecBole and 1e-5 for gSASRec.",
)
def import_sasrec(checkpoint: Path, out: Path, heads: int, activation: str | None, norm_eps: float | None) -> None:
    """Import a SASRec of RecBole, or a gSASRec of gSASRec-pytorch.

    CHECKPOINT is a state dict (.pt, read with weights_only=True, or .safetensors), or the folder of a distributed
    checkpoint; OUT is a new folder. RecBole's own file has its configuration as an object, which is not read: where
    RecBole is installed, write the weights alone.

    \b
    Example:
      python -c 'import torch; torch.save(torch.load("SASRec.pth", weights_only=False)["state_dict"], "sasrec.pt")'
      relaygr model import sasrec sasrec.pt models/sasrec --heads 2
      relaygr model check --set model.checkpoint=models/sasrec
    """
    from relaygr_stream.models.devices import select_device

    select_device("cpu")
    from relaygr_stream.models.importer.sasrec import SasRecChoices, describe, import_checkpoint

    made = import_checkpoint(checkpoint, out, SasRecChoices(heads, activation or "", norm_eps or 0.0))
    click.echo(f"{out}: {describe(made)}")


@model_command.command(name="map-items")
@click.argument("checkpoint")
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float16", "bfloat16", "int8"]),
    default="float32",
    show_default=True,
    help="Of the rows; int8 has a scale for each row.",
)
@click.option(
    "--shard-gib", type=click.FloatRange(min=0, min_open=True), default=8.0, show_default=True, help="Per file."
)
def map_items_command(checkpoint: str, out: Path, dtype: Any, shard_gib: float) -> None:
    """Write a checkpoint with its item table in files that workers map, for tables larger than device or memory.

    CHECKPOINT is named as in model.checkpoint. Prints the largest error of a value. A mapped file must not change:
    write another folder for new weights.

    \b
    Example:
      relaygr model map-items models/dlrm models/dlrm-mapped --dtype int8
      relaygr up --set model.checkpoint=models/dlrm-mapped
    """
    from relaygr_stream.models.devices import select_device

    select_device("cpu")
    from relaygr_stream.models.loading import checkpoint_folder
    from relaygr_stream.models.map_items import map_items

    done = map_items(checkpoint_folder(checkpoint), out, dtype, int(shard_gib * (1 << 30)))
    click.echo(
        f"{out}: {done.rows:,} rows in {done.shards} files, {done.nbytes:,} bytes; largest error {done.error:.3g}, "
        f"{done.share:.2%} of its row's largest value"
    )


@model_command.command(name="random")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--layers", type=click.IntRange(1, 4096), default=4, help="STU layers.")
@click.option("--dim", type=COUNT, default=128, help="Embedding width D.")
@click.option("--heads", type=COUNT, default=4, help="Attention heads H.")
@click.option("--dqk", type=COUNT, default=32, help="Query/key width per head.")
@click.option("--dv", type=COUNT, default=32, help="Value width per head.")
@click.option("--vocab", type=COUNT, default=100_000, help="Items with a row of their own: ids from 0 to below this.")
@click.option(
    "--oov-rows", type=NATURAL, default=0, help="Rows shared, by hash, by other ids; 0: those modulo --vocab."
)
@click.option("--max-positions", type=COUNT, default=8192, help="Position rows; later positions share the last row.")
@click.option("--scale-tokens", type=COUNT, default=1024, help="N of the attention scale 1/N.")
@click.option(
    "--contextual-seq-len",
    type=NATURAL,
    default=0,
    help="First tokens that attend to the whole prefix; requires an empty suffix.",
)
@click.option("--max-attn-len", type=NATURAL, default=0, help="Tokens attend this many tokens back; 0: no limit.")
@click.option("--relative-positions", type=NATURAL, default=0, help="Distances of positions that bias attention.")
@click.option("--relative-times", type=click.IntRange(0, 128), default=0, help="Buckets of times that bias attention.")
@click.option("--group-norm", is_flag=True, help="Normalise attention outputs per head instead of over all heads.")
@click.option("--tasks", default="click,like", help="Names of the score columns, separated by commas.")
@click.option("--seed", type=int, default=7, help="Seed of the weights.")
def random_command(folder: Path, tasks: str, **shape: Any) -> None:
    """Write an HSTU with random weights to FOLDER, a new folder for model.checkpoint: it ranks as chance does.

    \b
    Example:
      relaygr model random --layers 8 --dim 256 --dqk 64 --dv 64 models/random
      relaygr worker --set model.checkpoint=models/random
    """
    from relaygr_stream.models.devices import select_device

    if (folder / "config.json").exists():
        raise ConfigError(f"{folder}: has a model; name a new folder")
    select_device("cpu")
    from relaygr_stream.models.loading import save_random

    try:
        save_random(Model(tasks=_names(tasks), **shape), folder)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {error.strerror or error}") from error
    click.echo(f"{folder}: an HSTU with random weights of seed {shape['seed']}")


@model_command.command(name="check")
@click.argument("factory", default="")
@click.option("--device", help="cpu, cuda[:N] or npu[:N]; short for --set worker.device=…")
@click.option("--dtype", help="float32, bfloat16 or float16; short for --set worker.dtype=…")
@click.option("--seed", default=0, show_default=True, help="Seed of the random requests.")
@settings_options
def model_check(settings: Settings, factory: str, device: str | None, dtype: str | None, seed: int) -> None:
    """Check that a model keeps the protocol and that its relayed scores equal full inference.

    FACTORY is module:factory (model.factory); by default, the settings' model. Prints a table of properties and, for
    each that failed, its usual cause; exits 1 if one failed. Check float32 first: in half precision, rounding hides
    small errors.

    \b
    Examples:
      relaygr model check relaygr_stream.models.transformer:make
      relaygr model check my_model:make --set model.path=. --dtype bfloat16
    """
    sys.exit(0 if run_check(settings, factory, device, dtype, seed) else 1)


def run_check(settings: Settings, factory: str, device: str | None, dtype: str | None, seed: int) -> bool:
    """Print the table; returns whether every property holds. Raises ConfigError, ModelError or DeviceError."""
    name = dtype or settings.worker.dtype
    if name not in DTYPES:
        raise ConfigError(f"--dtype {name}: write {', '.join(DTYPES[:-1])} or {DTYPES[-1]}")
    if seed < 0:
        raise ConfigError(f"--seed {seed}: write 0 or a positive number")
    if factory:
        settings = replace(settings, model=replace(settings.model, factory=factory))
    from relaygr_stream.models.devices import select_device

    click.echo("loading the model", err=True)  # and torch, which takes seconds
    on = select_device(device or settings.worker.device)  # before any other import of torch
    import torch

    from relaygr_stream.models.check.run import check_model, probe_for

    if on.type == "cpu":
        torch.set_num_threads(settings.worker.threads)
    probe = probe_for(settings, on, getattr(torch, name), seed)
    note = f", {probe.model.note}" if probe.model.note else ""
    name = factory or settings.model.factory or settings.model.checkpoint or "built-in HSTU"
    click.echo(f"{name}: version {probe.model.version} on {on}{note}\n")
    return check_model(probe, click.echo)
