"""Trains the built-in HSTU as it ranks: a candidate is a token behind a history, and the head scores it.

    python -m examples.movielens.train --data FILE --out FOLDER [--epochs N] [--seed N] [--resume]

All candidates share what they ask of the history, so every position is trained on the whole catalogue (catalogue.py).
In the last `--ranking-epochs`, none by default, they ask for themselves, too (the ranking loss of losses.py). The
served model has the same weights and makes the same scores at every step of both.

Writes a checkpoint for `model.checkpoint`, items.json (the file's own item ids), a model card, and what resumes a run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from examples.movielens import catalogue, forward
from examples.movielens.card import write_card
from examples.movielens.data import DataError, Histories, History, read_histories
from examples.movielens.evaluate import VALIDATION, Quality, evaluate, quality
from examples.movielens.losses import losses
from relaygr_stream.models.embeddings import gap_buckets
from relaygr_stream.models.hstu_model import HSTUConfig, HSTUModel
from relaygr_stream.models.loading import save_checkpoint

PROGRESS_FILE: Final = "progress.pt"
ITEMS_FILE: Final = "items.json"
#: Last behaviours that training never sees: validation's item and the test's.
HELD_OUT: Final = 2
#: Standard deviation of the initial item and position rows. Layer norm makes the scale matter only beside the step
#: size: Adam's first steps move a row by about 2 % of it.
TABLE_STD: Final = 0.05
#: Initial bias of attention at a distance d: RECENT · exp(-d / RECENT_SPAN).
RECENT: Final = 3.0
RECENT_SPAN: Final = 8.0


@dataclass(frozen=True)
class Recipe:
    """All that decides a run beside the data. Lengths and windows in behaviours."""

    layers: int = 3
    dim: int = 64
    heads: int = 1
    scale_tokens: int = 32  # N of the attention: near the number of behaviours that matter, so that sums stay near 1
    longest: int = 1000  # longest window; positions behind it share a row
    window: int = 200  # most windows are at most so long
    long_share: float = 0.1  # share of windows that may be `longest` in the first epochs
    long_epochs: int = 8  # the last epochs, all of whose windows may be `longest`
    relative_positions: int = 1000  # distances with a bias of their own
    relative_times: int = 128  # buckets of times with a bias of their own, if the data has times
    catalogue: int = 1000  # items of the catalogue that a batch's softmax draws; all, if there are fewer
    ranking_epochs: int = 0  # the last epochs, with the ranking loss
    positions: int = 4  # positions per window with candidates
    negatives: int = 48  # sampled candidates per position
    batch_tokens: int = 4096  # behaviours in a batch
    epochs: int = 80
    learning_rate: float = 3e-3
    averaging: float = 0.01  # step of the moving average of the weights, which is the model that is kept
    weight_decay: float = 0.0
    dropout: float = 0.2
    validation_users: int = 400
    validate_every: int = 4  # epochs
    seed: int = 1

    def config(self, items: int, has_times: bool) -> HSTUConfig:
        """The served model's shape."""
        width = self.dim // self.heads
        return HSTUConfig(
            layers=self.layers, dim=self.dim, heads=self.heads, dqk=width, dv=width, scale_tokens=self.scale_tokens,
            vocab=items, max_positions=self.longest + 1, tasks=("next",), relative_positions=self.relative_positions,
            relative_times=self.relative_times if has_times else 0,
        )  # fmt: skip


#: What --quick changes: training takes a minute of two cores on 100,000 ratings.
QUICK: Final[dict[str, Any]] = {
    "epochs": 15, "long_epochs": 5, "longest": 500, "batch_tokens": 2048, "validation_users": 300,
}  # fmt: skip


def new_model(recipe: Recipe, items: int, has_times: bool = False) -> HSTUModel:
    """A model to train, its weights drawn from the seed.

    With a bias on distances, position rows stay 0: where a behaviour stands matters by distance alone. Without, they
    start as sinusoids: "the behaviour before" is then one direction for every position, where independent rows would
    each have to learn it.
    """
    torch.manual_seed(recipe.seed)
    model = HSTUModel(recipe.config(items, has_times))
    for name, value in model.named_parameters():
        if name.endswith("norm_weight"):
            value.fill_(1)
        elif name in ("embedding.item", "embedding.candidate"):
            value.normal_(0, TABLE_STD)
        elif name.endswith("relative_position"):
            value.copy_(RECENT * torch.exp(-torch.arange(len(value)) / RECENT_SPAN))
        elif name == "embedding.position" and recipe.relative_positions:
            value.zero_()
            continue
        elif name == "embedding.position":
            value.copy_(sinusoids(*value.shape) * (TABLE_STD * math.sqrt(2)))
        elif name.startswith("embedding.") or value.dim() == 1:
            value.zero_()  # actions, gaps and biases: rows that the data never names stay 0
        else:
            value.normal_(0, 1 / math.sqrt(value.shape[0]))
        value.requires_grad_(True)
    return model


def sinusoids(count: int, dim: int) -> Tensor:
    """Sines and cosines (count, dim) with wavelengths from 2π to 2π·10,000 positions (Vaswani et al. 2017)."""
    angles = torch.arange(count)[:, None] / 10_000 ** (torch.arange(0, dim, 2) / dim)
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)[:, :dim]


# Batches: one window per user and epoch, windows of about the same length together.


def batches(
    users: list[History], recipe: Recipe, draw: np.random.Generator, *, long: bool = False
) -> Iterator[forward.Batch]:
    """One epoch's windows in random order, padded at their end. long: whether it is one of the `long_epochs`."""
    share = 1.0 if long else recipe.long_share
    windows = [_window(user, recipe, share, draw) for user in users]
    # Lengths are blurred before sorting, so that the same users do not always meet.
    order = np.argsort([len(window) * draw.uniform(0.9, 1.1) for window in windows])
    groups: list[list[History]] = [[]]
    for index in order:
        window = windows[index]
        if groups[-1] and (len(groups[-1]) + 1) * max(len(window), len(groups[-1][-1])) > recipe.batch_tokens:
            groups.append([])
        groups[-1].append(window)
    for index in draw.permutation(len(groups)):
        yield padded(groups[index])


def _window(user: History, recipe: Recipe, long_share: float, draw: np.random.Generator) -> History:
    """Half of the windows end at the newest behaviour that training may see, the others anywhere."""
    count = len(user) - HELD_OUT
    length = min(count, recipe.longest if draw.random() < long_share else recipe.window)
    stop = count if draw.random() < 0.5 else int(draw.integers(length, count + 1))
    return user.slice(stop - length, stop)


def padded(windows: list[History]) -> forward.Batch:
    """The windows as one batch; padding is item 0, which no row sees."""
    rows = np.zeros((4, len(windows), max(map(len, windows))), np.int64)
    for index, window in enumerate(windows):
        rows[:, index, : len(window)] = window.items, window.actions, gap_buckets(window.gaps()), window.times
    items, actions, gaps, times = torch.from_numpy(rows)
    return forward.Batch(items, actions, gaps, times, torch.tensor([len(window) for window in windows]))


# The run.


@dataclass
class Progress:
    """How far a run is: what `PROGRESS_FILE` keeps beside the recipe, the weights and the optimiser's state."""

    epoch: int = 0
    best: float = -1.0
    best_epoch: int = 0
    seconds: float = 0.0
    processor_seconds: float = 0.0
    curve: tuple[dict[str, float], ...] = ()


class Run:
    """One training run in `folder`. Its epochs depend on the recipe and the data only, resumed or not.

    Another task overrides `untrained`, `losses`, `hold`, `quality` and `write_card`.
    """

    def __init__(self, data: Histories, recipe: Recipe, folder: Path) -> None:
        self.data = data
        self.recipe = recipe
        self.folder = folder
        self.progress = Progress()
        self.model = self.untrained()
        self.average = {name: value.detach().clone() for name, value in self.model.named_parameters()}
        trained = [value for value in self.model.parameters() if value.requires_grad]
        decayed = [value for value in trained if value.dim() > 1]
        others = [value for value in trained if value.dim() == 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=recipe.learning_rate, betas=(0.9, 0.98),
        )  # fmt: skip

    def untrained(self) -> HSTUModel:
        """The model before its first step. What does not require a gradient stays as it is."""
        model = new_model(self.recipe, len(self.data.names), self.data.has_times)
        catalogue.restrict(model)
        return model

    def losses(self, batch: forward.Batch) -> dict[str, Tensor]:
        """The losses that are minimised together, by name; in nats."""
        ranking = self.progress.epoch >= self.recipe.epochs - self.recipe.ranking_epochs
        return losses(self.model, batch, self.recipe, ranking=ranking)

    def hold(self, model: HSTUModel) -> None:
        """Set the weights again that a step, or an average, must not change."""
        catalogue.hold(model)

    def quality(self, model: HSTUModel) -> Quality:
        """Validation: the quality by which the best epoch is chosen."""
        order = np.random.default_rng(self.recipe.seed).permutation(len(self.data.users))
        users = [self.data.users[index] for index in order[: self.recipe.validation_users]]
        return quality(evaluate(model, users, len(self.data.names), self.recipe.longest, VALIDATION))

    def write_card(self) -> None:
        """Write the model card of the best epoch's checkpoint."""
        at = self.progress
        write_card(self.folder, self.data, self.recipe, at.best_epoch, at.best, at.seconds)

    def epochs(self, until: int | None = None) -> Iterator[dict[str, float]]:
        """Train to the recipe's last epoch, or to `until`; yields each epoch's figures when they are saved."""
        stop = self.recipe.epochs if until is None else until
        while self.progress.epoch < stop:
            started, used = time.monotonic(), time.process_time()
            figures = self._epoch()
            self.progress.seconds += time.monotonic() - started
            self.progress.processor_seconds += time.process_time() - used
            figures["minutes"] = self.progress.seconds / 60
            figures["processor_minutes"] = self.progress.processor_seconds / 60
            self.progress.curve += (figures,)
            self._save()
            yield figures

    def _epoch(self) -> dict[str, float]:
        epoch = self.progress.epoch
        torch.manual_seed(self.recipe.seed * 100_003 + epoch)
        draw = np.random.default_rng([self.recipe.seed, epoch])
        sums: Counter[str] = Counter()
        count = 0
        long = epoch >= self.recipe.epochs - self.recipe.long_epochs
        made = list(batches(self.data.users, self.recipe, draw, long=long))
        for index, batch in enumerate(made):
            if batch.items.shape[1] < 2:
                continue
            for group in self.optimizer.param_groups:
                group["lr"] = self.recipe.learning_rate * schedule((epoch + index / len(made)) / self.recipe.epochs)
            found = self.losses(batch)
            self.optimizer.zero_grad()
            torch.stack(list(found.values())).sum().backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.hold(self.model)
            self._average()
            sums.update({name: loss.item() for name, loss in found.items()})
            count += 1
        self.progress.epoch = epoch = epoch + 1
        figures = {"epoch": float(epoch)} | {name: total / count for name, total in sums.items()}
        if epoch % self.recipe.validate_every == 0 or epoch == self.recipe.epochs:
            figures |= self._validate()._asdict()
        return figures

    @torch.no_grad()
    def _average(self) -> None:
        """Move the average. It smooths the last steps' noise, as lower learning rates do."""
        for name, value in self.model.named_parameters():
            self.average[name].lerp_(value, self.recipe.averaging)

    def served(self) -> HSTUModel:
        """The averaged model as the package serves it: float32 on the CPU."""
        averaged = HSTUModel(self.model.config)
        averaged.load_state_dict(self.average)
        self.hold(averaged)
        return HSTUModel(self.model.config).load_weights(dict(averaged.state_dict()), note="")

    def _validate(self) -> Quality:
        """The present quality; the best epoch's model becomes the checkpoint."""
        model = self.served()
        found = self.quality(model)
        if found.ndcg > self.progress.best:
            self.progress.best, self.progress.best_epoch = found.ndcg, self.progress.epoch
            save_checkpoint(model, self.folder)
            (self.folder / ITEMS_FILE).write_text(json.dumps(self.data.names), encoding="utf-8")
        return found

    def _save(self) -> None:
        """Replace PROGRESS_FILE. An interrupted run loses at most its last epoch."""
        state = {
            "recipe": asdict(self.recipe), "progress": asdict(self.progress), "items": len(self.data.names),
            "interactions": self.data.interactions, "model": self.model.state_dict(),
            "average": self.average, "optimizer": self.optimizer.state_dict(),
        }  # fmt: skip
        torch.save(state, self.folder / (PROGRESS_FILE + ".tmp"))
        (self.folder / (PROGRESS_FILE + ".tmp")).replace(self.folder / PROGRESS_FILE)

    def resume(self) -> None:
        """Go on where PROGRESS_FILE stopped. Raises DataError if it is of another recipe or other data."""
        file = self.folder / PROGRESS_FILE
        if not file.is_file():
            raise DataError(f"{file}: no such file: there is no run to resume")
        state: dict[str, Any] = torch.load(file, weights_only=True)
        found = state["recipe"] | {"items": state["items"], "interactions": state["interactions"]}
        ours = asdict(self.recipe) | {"items": len(self.data.names), "interactions": self.data.interactions}
        different = [
            f"{name} = {found.get(name)!r}, now {value!r}" for name, value in ours.items() if found.get(name) != value
        ]
        if different:
            raise DataError(f"{file} is of another run: {'; '.join(different)}")
        self.progress = Progress(**state["progress"])
        self.model.load_state_dict(state["model"])
        self.average = state["average"]
        self.optimizer.load_state_dict(state["optimizer"])


def schedule(done: float) -> float:
    """The factor of the learning rate at a share `done` of the run: up for 1 %, level, down over the last 40 %."""
    return min(done / 0.01 + 0.05, 1.0, max((1 - done) / 0.4, 0.01))


def parse(parser: argparse.ArgumentParser, arguments: list[str] | None) -> tuple[argparse.Namespace, Recipe]:
    """The parser's own options, --data, --out, --threads and --quick; and the recipe, each field an option."""
    parser.add_argument("--data", type=Path, required=True, help="ratings.dat, u.data, `user item` lines, or a CSV")
    parser.add_argument("--out", type=Path, help="folder of the run (default: out/movielens, or out/movielens-quick)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="CPU threads (default: all)")
    parser.add_argument("--quick", action="store_true", help="a run of minutes on 100,000 ratings: fewer epochs")
    for name, value in asdict(Recipe()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), help=f"(default: {value})")
    options = parser.parse_args(arguments)
    options.out = options.out or Path("out/movielens-quick" if options.quick else "out/movielens")
    named = {name: getattr(options, name) for name in asdict(Recipe()) if getattr(options, name) is not None}
    return options, Recipe(**((QUICK if options.quick else {}) | named))


def train(data: Histories, recipe: Recipe, folder: Path, *, resume: bool, task: type[Run] = Run) -> Run:
    """Train or resume, printing a line per epoch; writes the model card at the end. Raises DataError."""
    run = task(data, recipe, folder)
    if resume:
        run.resume()
    elif (folder / PROGRESS_FILE).exists():
        raise DataError(f"{folder} has a run already: go on with --resume, or name another --out")
    folder.mkdir(parents=True, exist_ok=True)
    weights = sum(value.numel() for value in run.model.parameters())
    times = "with" if data.has_times else "without"
    print(
        f"{len(data.users)} users, {len(data.names)} items, {data.interactions} behaviours {times} times; "
        f"{weights:,} weights"
    )
    for epoch in run.epochs():
        print(epoch_line(epoch, recipe.epochs), flush=True)
    run.write_card()
    return run


def epoch_line(epoch: dict[str, float], last: int) -> str:
    """One epoch's figures."""
    losses = [f"{name.replace('_', ' ')} {epoch[name]:.3f}" for name in ("catalogue", "ranking") if name in epoch]
    line = "  ".join([f"epoch {epoch['epoch']:3.0f}/{last}", *losses])
    if "ndcg" in epoch:
        line += f"  validation HR@10 {epoch['hr']:.4f} NDCG@10 {epoch['ndcg']:.4f}"
    return f"{line}  {epoch['minutes']:.1f} min, {epoch['processor_minutes']:.1f} of a processor"


def main(arguments: list[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser("train", description="Train the built-in HSTU as it ranks.")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out")
    options, recipe = parse(parser, arguments)
    torch.set_num_threads(options.threads)
    try:
        run = train(read_histories(options.data), recipe, options.out, resume=options.resume)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"checkpoint: {options.out}, epoch {run.progress.best_epoch} (validation NDCG@10 {run.progress.best:.4f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
