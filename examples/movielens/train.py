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
from examples.movielens.data import DataError, Histories, History, Ints, read_histories
from examples.movielens.evaluate import VALIDATION, Quality, evaluate, ndcg, paired_gain, popularity_ranks, quality
from examples.movielens.losses import losses
from examples.movielens.recipe import QUICK, Recipe, new_model
from relaygr_stream.models.embeddings import gap_buckets
from relaygr_stream.models.hstu_model import HSTUModel
from relaygr_stream.models.item_ids import ITEMS_FILE
from relaygr_stream.models.loading import load_checkpoint, save_checkpoint

PROGRESS_FILE: Final = "progress.pt"
#: Last behaviours that training never sees: validation's item and the test's.
HELD_OUT: Final = 2


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

    Another task overrides `untrained`, `losses`, `hold`, `quality`, `against_popularity` and `write_card`.
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
        model = new_model(self.recipe, len(self.data.names), self.data.has_times, self.data.actions)
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
        return quality(self._ranks(model))

    def _users(self) -> list[History]:
        """The users of validation."""
        order = np.random.default_rng(self.recipe.seed).permutation(len(self.data.users))
        return [self.data.users[index] for index in order[: self.recipe.validation_users]]

    def _ranks(self, model: HSTUModel) -> Ints:
        return evaluate(model, self._users(), len(self.data.names), self.recipe.longest, VALIDATION)

    def against_popularity(self) -> str:
        """The best epoch beside ranking by popularity, same users; and what to do where it is not clearly better."""
        if not self.progress.best_epoch:
            return ""
        ours = self._ranks(load_checkpoint(self.folder))
        theirs = popularity_ranks(self.data, self._users(), VALIDATION)
        gain = paired_gain(ndcg(ours), ndcg(theirs))
        text = (
            f"validation, {len(ours):,} users: epoch {self.progress.best_epoch} {quality(ours)}; "
            f"popularity {quality(theirs)}; difference in NDCG@10 {gain}"
        )
        if gain.low > 0:
            return text
        return (
            f"{text}\n--epochs {self.recipe.epochs} was too short for {len(self.data.names):,} items and "
            f"{self.data.interactions:,} behaviours: the model is not clearly better than popularity, so its rankings "
            f"show nothing; train for more epochs, into another --out"
        )

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
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a run of minutes on 100,000 ratings: fewer epochs, too few for large catalogues",
    )
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
    if told := run.against_popularity():
        print(told)
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
