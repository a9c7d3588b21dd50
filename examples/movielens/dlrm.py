"""What do prefix KV that stay valid cost a DlrmHSTU in quality? Trains it in both forms on a log of ratings, and says.

    python -m examples.movielens.dlrm --data FILE [--epochs N] [--seed N] [--quick]

`published` is as in DLRMv3: positions count from the newest behaviour, times are ages at the query, N of the scale 1/N
is the request's, and the user's row is left out of short requests, so prefix KV serve one request. The others are
incremental: positions count from the oldest, N is a constant, and times are gaps (`gaps`) or not known (`no times`).
All start from the same seed and see the same requests in the same order. The file needs times and ratings.

The test asks for each user's last ratings, and prints AUC, normalised entropy (cross entropy over that of the mean
rate) and NDCG@10 (a liked one gains 1) of the models as they are served, beside the mean ratings of user and item.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from examples.dlrmv3.measures import Flags, auc, entropies, ndcg
from examples.movielens.data import DataError, Histories, Ints, exit_code, read_histories
from examples.movielens.dlrm_task import ASKED, BITS, FEWEST, DlrmRun, Floats, Request, chances
from examples.movielens.evaluate import Gain, paired_gain
from examples.movielens.recipe import Recipe
from examples.movielens.training import PROGRESS_FILE, epoch_line
from relaygr_stream.models.dlrm.config import DlrmConfig, changed
from relaygr_stream.models.dlrm.model import DlrmHSTU
from relaygr_stream.models.loading import load_any_checkpoint

RECIPE: Final = Recipe(
    layers=2, dim=64, heads=2, longest=200, positions=4, epochs=15, learning_rate=1e-3, averaging=0.01, dropout=0.2,
    validate_every=3,
)  # fmt: skip
PUBLISHED: Final = "published"


def forms(recipe: Recipe, users: int, items: int) -> dict[str, DlrmConfig]:
    """The model in each form; tables and widths are the same."""
    width, dim = recipe.dim // recipe.heads, recipe.dim
    published = DlrmConfig(
        layers=recipe.layers, dim=dim, heads=recipe.heads, dqk=width, dv=width, scale_tokens=0, table_dim=dim,
        items=items, categories=1, users=users, action_weights=BITS, action_dim=8, hidden=dim, item_hidden=dim,
        head_hidden=dim, position_rows=recipe.longest + 2, time_rows=2049, time_last_row=2048, tasks=("rating",),
    )  # fmt: skip
    constant: dict[str, Any] = {"scale_tokens": 1 + recipe.longest + ASKED, "positions": "start", "min_tokens": 0}
    return {
        PUBLISHED: published,
        "gaps": changed(published, times="gap", **constant),
        "no times": changed(published, times="constant", **constant),
    }


def check(data: Histories, file: Path) -> None:
    """Raise DataError for a log that does not have what the task needs."""
    if not data.has_times:
        raise DataError(f"{file}: has no times, which the published form reads; expected ratings.dat, u.data or a CSV")
    for name in filter(None, data.actions):
        if not name.replace(".", "", 1).isdigit() or float(name) >= len(BITS) + 1:
            raise DataError(f"{file}: the action {name!r}; expected ratings of 0 to {len(BITS)}")
    if not any(data.actions):
        raise DataError(f"{file}: has no ratings; expected a column `rating`, or ratings.dat or u.data")
    if not any(len(user) >= FEWEST for user in data.users):
        raise DataError(f"{file}: no user has {FEWEST} ratings or more ({len(data.users)} users)")


def trained(run: DlrmRun, name: str) -> DlrmHSTU:
    """Train, or go on with, one form; a line an epoch. Returns the best epoch's model."""
    if (run.folder / PROGRESS_FILE).exists():
        run.resume()
    run.folder.mkdir(parents=True, exist_ok=True)
    weights = sum(value.numel() for value in run.model.parameters())
    print(f"— {name}: {weights:,} weights, {len(run.users):,} users", flush=True)
    for epoch in run.epochs():
        print(epoch_line(epoch, run.recipe.epochs), flush=True)
    model = load_any_checkpoint(run.folder)
    assert isinstance(model, DlrmHSTU)
    return model


def means(run: DlrmRun) -> Floats:
    """(users, ASKED): by how much more often than on average user and item were liked in what training sees."""
    users = [run.data.users[user].slice(0, len(run.data.users[user]) - 2 * ASKED) for user in run.users]
    liked, items = [run.liked(user) for user in users], np.concatenate([user.items for user in users])
    count = len(run.data.names)
    more = np.bincount(items, np.concatenate(liked) - np.concatenate(liked).mean(), count)
    item = more / (np.bincount(items, minlength=count) + 1)
    return np.stack([its.mean() + item[one.asked.items] for its, one in zip(liked, run.last_requests(0), strict=True)])


def auc_gain(first: Floats, second: Floats, liked: Flags, resamples: int = 1000) -> Gain:
    """AUC of first − second, (users, ASKED) each, over all users, and a 95 % interval from resampled users."""
    draw = np.random.default_rng(0)

    def gain(users: Ints) -> float:
        return auc(first[users].ravel(), liked[users].ravel()) - auc(second[users].ravel(), liked[users].ravel())

    count = len(liked)
    low, high = np.percentile([gain(draw.integers(0, count, count)) for _ in range(resamples)], [2.5, 97.5])
    return Gain(gain(np.arange(count)), float(low), float(high))


def report(found: dict[str, Floats], by_means: Floats, requests: list[Request]) -> Iterator[str]:
    """The table: each form, and what it has more than the published one."""
    liked = np.stack([one.liked for one in requests])
    yield f"{len(liked):,} users, {ASKED} candidates each, {liked.mean():.1%} of them liked"
    yield f"{'':>10}  {'AUC':>6}  {'NE':>6}  {'NDCG@10':>7}"
    for name, one in found.items():
        yield (
            f"{name:>10}  {auc(one.ravel(), liked.ravel()):.4f}  {entropies(one, liked).mean():.4f}  "
            f"{ndcg(one, liked).mean():7.4f}"
        )
    yield f"{'means':>10}  {auc(by_means.ravel(), liked.ravel()):.4f}  {'':6}  {ndcg(by_means, liked).mean():7.4f}"
    base = found[PUBLISHED]
    for name, one in found.items():
        if name != PUBLISHED:
            yield f"{name} − {PUBLISHED}, paired 95 % intervals over users:"
            yield f"    AUC {auc_gain(one, base, liked)}"
            yield f"    NE {paired_gain(entropies(one, liked), entropies(base, liked))}"
            yield f"    NDCG@10 {paired_gain(ndcg(one, liked), ndcg(base, liked))}"


def compare_forms(file: Path, recipe: Recipe, out: Path) -> int:
    """Train each form, and print the table. Raises DataError or RelayError."""
    data = read_histories(file)
    check(data, file)
    found: dict[str, Floats] = {}
    for name, config in forms(recipe, len(data.users), len(data.names)).items():
        run = DlrmRun(data, recipe, out / name.replace(" ", "-"), config)
        found[name] = chances(trained(run, name), requests := run.last_requests(0))
    print(*report(found, means(run), requests), sep="\n")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser("examples.movielens.dlrm", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="ratings.dat, u.data, or a CSV with time and rating")
    parser.add_argument("--out", type=Path, help="folder of the runs (default: out/dlrm, or out/dlrm-quick)")
    parser.add_argument("--epochs", type=int, default=RECIPE.epochs)
    parser.add_argument("--seed", type=int, default=RECIPE.seed)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1)")
    parser.add_argument("--quick", action="store_true", help="2 epochs: too few to conclude from")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    out = options.out or Path("out/dlrm-quick" if options.quick else "out/dlrm")
    recipe = replace(RECIPE, epochs=2 if options.quick else options.epochs, seed=options.seed)
    return exit_code(lambda: compare_forms(options.data, recipe, out))


if __name__ == "__main__":
    sys.exit(main())
