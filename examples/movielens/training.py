"""The loop of a training run: steps, the average that is kept, the best epoch's checkpoint, resuming.

It knows no model, no loss and no batch: a task is a subclass (train.py, dlrm_task.py, examples/demo).
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from examples.movielens.data import DataError, Histories
from examples.movielens.recipe import Recipe
from relaygr_stream.models.dlrm.model import DlrmHSTU
from relaygr_stream.models.hstu_model import HSTUModel
from relaygr_stream.models.item_ids import ITEMS_FILE
from relaygr_stream.models.loading import save_checkpoint

PROGRESS_FILE: Final = "progress.pt"

M = TypeVar("M", HSTUModel, DlrmHSTU)
B = TypeVar("B")


class Figures(Protocol):
    """A named tuple of what validation found. The last one is larger for a better model."""

    def _asdict(self) -> dict[str, float]: ...


@dataclass
class Progress:
    """How far a run is: what `PROGRESS_FILE` keeps beside the recipe, the weights and the optimiser's state."""

    epoch: int = 0
    best: float = -1.0
    best_epoch: int = 0
    seconds: float = 0.0
    processor_seconds: float = 0.0
    curve: tuple[dict[str, float], ...] = ()


class Training(ABC, Generic[M, B]):
    """One training run in `folder`. Its epochs depend on the recipe and the data only, resumed or not."""

    def __init__(self, data: Histories, recipe: Recipe, folder: Path) -> None:
        self.data = data
        self.recipe = recipe
        self.folder = folder
        self.progress = Progress()
        self.model: M = self.untrained()
        self.average = {name: value.detach().clone() for name, value in self.model.named_parameters()}
        trained = [value for value in self.model.parameters() if value.requires_grad]
        decayed = [value for value in trained if value.dim() > 1]
        others = [value for value in trained if value.dim() == 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=recipe.learning_rate, betas=(0.9, 0.98),
        )  # fmt: skip

    @abstractmethod
    def untrained(self) -> M:
        """The model before its first step. What does not require a gradient stays as it is."""

    @abstractmethod
    def batches(self, draw: np.random.Generator) -> Iterable[B]:
        """The batches of the present epoch, in random order."""

    @abstractmethod
    def losses(self, batch: B) -> dict[str, Tensor]:
        """The losses that are minimised together, by name; in nats."""

    @abstractmethod
    def quality(self, model: M) -> Figures:
        """Validation: the quality by which the best epoch is chosen."""

    def hold(self, model: M) -> None:
        """Set the weights again that a step, or an average, must not change."""

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
        sums: Counter[str] = Counter()
        made = list(self.batches(np.random.default_rng([self.recipe.seed, epoch])))
        for index, batch in enumerate(made):
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
        self.progress.epoch = epoch = epoch + 1
        figures = {"epoch": float(epoch)} | {name: total / len(made) for name, total in sums.items()}
        if epoch % self.recipe.validate_every == 0 or epoch == self.recipe.epochs:
            figures |= self._validate()
        return figures

    @torch.no_grad()
    def _average(self) -> None:
        """Move the average. It smooths the last steps' noise, as lower learning rates do."""
        for name, value in self.model.named_parameters():
            self.average[name].lerp_(value, self.recipe.averaging)

    def served(self) -> M:
        """The averaged model as the package serves it: float32 on the CPU."""
        averaged = type(self.model)(self.model.config)
        averaged.load_state_dict(self.average)
        self.hold(averaged)
        return type(self.model)(self.model.config).load_weights(dict(averaged.state_dict()), note="")

    def _validate(self) -> dict[str, float]:
        """The present quality; the best epoch's model becomes the checkpoint."""
        model = self.served()
        figures: dict[str, float] = self.quality(model)._asdict()
        found = [*figures.values()][-1]
        if found > self.progress.best:
            self.progress.best, self.progress.best_epoch = found, self.progress.epoch
            save_checkpoint(model, self.folder)
            (self.folder / ITEMS_FILE).write_text(json.dumps(self.data.names), encoding="utf-8")
        return figures

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


def grouped(lengths: Sequence[int], tokens: int, draw: np.random.Generator) -> Iterator[list[int]]:
    """Indices of sequences of about the same length, in random order: padded, a group has about `tokens` at most.

    Lengths are blurred before sorting, so that the same sequences do not always meet.
    """
    groups: list[list[int]] = [[]]
    for index in np.argsort([length * draw.uniform(0.9, 1.1) for length in lengths]).tolist():
        last = groups[-1]
        if last and (len(last) + 1) * max(lengths[index], lengths[last[-1]]) > tokens:
            groups.append([])
        groups[-1].append(index)
    for place in draw.permutation(len(groups)):
        yield groups[place]


def schedule(done: float) -> float:
    """The factor of the learning rate at a share `done` of the run: up for 1 %, level, down over the last 40 %."""
    return min(done / 0.01 + 0.05, 1.0, max((1 - done) / 0.4, 0.01))


def epoch_line(epoch: dict[str, float], last: int) -> str:
    """One epoch's figures."""
    losses = [f"{name} {epoch[name]:.3f}" for name in ("catalogue", "ranking", "rating") if name in epoch]
    names = {"hr": "HR@10", "ndcg": "NDCG@10", "ne": "NE", "auc": "AUC"}
    found = [f"{title} {epoch[name]:.4f}" for name, title in names.items() if name in epoch]
    line = "  ".join([f"epoch {epoch['epoch']:3.0f}/{last}", *losses])
    if found:
        line += f"  validation {' '.join(found)}"
    return f"{line}  {epoch['minutes']:.1f} min, {epoch['processor_minutes']:.1f} of a processor"
