"""Train and evaluate. The only file that knows accelerate."""

import io
import math
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn

from compressnas.data import DataSet, Split, batches
from compressnas.distill import distillation
from compressnas.errors import InputError
from compressnas.files import write_whole
from compressnas.progress import Progress, Step
from compressnas.recipe import Distilled, Train

Record = dict[str, Any]  # one line of history.jsonl
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # images (B, C, H, W), logits (B, classes), labels (B,) -> scalar


@dataclass
class Work:
    """What every loop of a run shares: where it computes, what it shows, where it keeps its checkpoints.

    Attributes:
        accelerator: devices and processes.
        seed: of the run; epoch e of a stage is reproduced by (seed, stage, e) alone.
        progress: the display.
        folder: where checkpoints go; None keeps none.
        history: stage -> one record per epoch, carried by the checkpoints.
    """

    accelerator: Accelerator
    seed: int
    progress: Progress
    folder: Path | None = None
    history: dict[str, list[Record]] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        device: torch.device = self.accelerator.device
        return device

    def save(self, stage: str, state: Mapping[str, Any]) -> None:
        """Write the stage's checkpoint, whole or not at all, with the records of its epochs."""
        if self.folder is not None and self.accelerator.is_main_process:
            buffer = io.BytesIO()  # torch reports a full disk as a fault of its own; write_whole says what it is
            torch.save({**state, "history": self.history.get(stage, [])}, buffer)
            write_whole(self.folder / f"{stage}.pt", buffer.getvalue())

    def load(self, stage: str) -> dict[str, Any] | None:
        """The stage's last checkpoint, or None. Raises InputError for a damaged file."""
        path = self.folder / f"{stage}.pt" if self.folder is not None else None
        if path is None or not path.exists():
            return None
        state: dict[str, Any] = read_checkpoint(path, self.device)
        self.history[stage] = state.pop("history", [])
        return state

    def record(self, stage: str, **fields: Any) -> None:
        self.history.setdefault(stage, []).append({"stage": stage, **fields})


def make_work(device: str, seed: int, threads: int | None, progress: Progress, folder: Path | None = None) -> Work:
    """Choose the device and set the number of threads.

    Args:
        device: auto, cpu, cuda, cuda:N or mps.

    Raises:
        InputError: the device is not there.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    if device.startswith("cuda"):
        if not torch.cuda.is_available():
            raise InputError(f"device {device}: no CUDA device is available here; use auto or cpu")
        if ":" in device:
            if int(device.partition(":")[2]) >= torch.cuda.device_count():
                raise InputError(f"device {device}: only {torch.cuda.device_count()} CUDA device(s) here")
            torch.cuda.set_device(device)
    if device == "mps" and not torch.backends.mps.is_available():
        raise InputError("device mps: not available here; use auto or cpu")
    return Work(Accelerator(cpu=device == "cpu"), seed, progress, folder)


def read_checkpoint(path: Path, device: torch.device | str = "cpu") -> Any:
    """torch.load with weights only, onto `device`. Raises InputError for a missing or damaged file."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch wonders about a damaged file before it fails on it
            return torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # the unpickler meets damaged bytes with whatever it stumbles over
        line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(f"cannot read checkpoint {path}: {line}") from error


def stage_seed(seed: int, stage: str) -> int:
    """A seed for the order and augmentation of a stage, unlike that of the other stages."""
    return zlib.crc32(f"{seed} {stage}".encode())


def channels_last(model: nn.Module) -> nn.Module:
    """The same network with its 4-d weights in channels-last order: up to twice as fast on CPUs."""
    return model.to(memory_format=torch.channels_last)


# ---------------------------------------------------------------- one epoch


def cross_entropy(images: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
    """The ordinary loss of a batch; it needs no images."""
    return F.cross_entropy(logits, labels)


def task_loss(settings: Distilled, dense: nn.Module) -> Loss:
    """Cross-entropy, or with `distill` its mixture with what `dense` says, as it is now."""
    if settings.distill == 0:
        return cross_entropy
    return distillation(channels_last(dense), settings.distill, settings.temperature)


def train_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Iterable[tuple[Tensor, Tensor]],
    work: Work,
    *,
    place: str,
    step: Step,
    loss_fn: Loss = cross_entropy,
    schedule: torch.optim.lr_scheduler.LRScheduler | None = None,
    clip: float | None = None,
    precision: str = "float32",
    before_step: Callable[[], None] | None = None,
    after_step: Callable[[], bool] | None = None,
    show: Mapping[str, float | int | str] | None = None,
) -> tuple[float, float]:
    """One pass over `loader` -> (mean loss, training error).

    Args:
        place: where this is, for the message of a loss that is not finite.
        step: moves the progress bar, once for each batch.
        loss_fn: the mean loss of a batch.
        clip: largest norm of the gradient; longer ones are scaled down to it.
        precision: of the network's layers, float32 or bfloat16 (autocast); the loss is float32 all the same.
        before_step: called when the gradients are there, to change them.
        after_step: called after each optimizer step; True ends the epoch.

    Raises:
        InputError: the loss or, after the last step, a weight is NaN or infinite.
    """
    model.train()
    total = wrong = seen = 0.0
    rounded = precision == "bfloat16"
    for number, (images, labels) in enumerate(loader, start=1):
        images, labels = images.to(work.device), labels.to(work.device)
        with torch.autocast(work.device.type, torch.bfloat16, enabled=rounded):
            logits = model(images)
        logits = logits.float() if rounded else logits
        loss = loss_fn(images, logits, labels)
        value = loss.item()
        if not math.isfinite(value):
            raise InputError(f"{place}, step {number}: the loss is {value}; try a smaller learning rate")
        optimizer.zero_grad()
        work.accelerator.backward(loss)
        if clip is not None:
            work.accelerator.clip_grad_norm_(model.parameters(), clip)
        if before_step is not None:
            before_step()
        optimizer.step()
        if schedule is not None:
            schedule.step()
        total += value * len(labels)
        wrong += int((logits.detach().argmax(1) != labels).sum())
        seen += len(labels)
        step(1, loss=f"{total / seen:.4f}", **(show or {}))
        if after_step is not None and after_step():
            break
    if not all(bool(parameter.isfinite().all()) for parameter in model.parameters()):
        raise InputError(f"{place}, step {number}: weights are no longer finite; try a smaller learning rate")
    return total / seen, wrong / seen


@torch.no_grad()
def evaluate(
    model: nn.Module, split: Split, device: torch.device | str, batch_size: int = 500, *, place: str = "evaluation"
) -> float:
    """Error, a fraction of the split, in eval mode; the network's training flag comes back as it was.

    Raises:
        InputError: an output is NaN or infinite, which `place` is named for.
    """
    training = model.training
    model.eval()
    wrong = 0
    for images, labels in batches(split, batch_size):
        logits = model(images.to(device))
        if not bool(logits.isfinite().all()):
            raise InputError(f"{place}: the network's outputs are not finite; try a smaller learning rate")
        wrong += int((logits.argmax(1).cpu() != labels).sum())
    model.train(training)
    return wrong / len(split)


# ---------------------------------------------------------------- a stage


def warmup_cosine(step: int, warmup: int, total: int) -> float:
    """Factor on the learning rate: linear from 1/warmup to 1, then half a cosine to 0."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


def sgd(model: nn.Module, settings: Train, lr: float | None = None) -> torch.optim.SGD:
    """SGD with Nesterov momentum over the parameters of `model` as they are now."""
    momentum = settings.momentum
    return torch.optim.SGD(
        model.parameters(), lr or settings.lr, momentum, weight_decay=settings.weight_decay, nesterov=momentum > 0
    )


def training_batches(
    data: DataSet, batch_size: int, work: Work, stage: str, epoch: int
) -> torch.utils.data.DataLoader[tuple[Tensor, Tensor]]:
    """Augmented training batches; the first iteration is epoch `epoch` of the stage, each further one the next."""
    seed = stage_seed(work.seed, stage)
    return batches(data.train, batch_size, shuffle=True, seed=seed, augment=data.augment, epoch=epoch)


def fit(
    model: nn.Module,
    data: DataSet,
    settings: Train,
    work: Work,
    *,
    stage: str,
    loss_fn: Loss = cross_entropy,
    before_step: Callable[[], None] | None = None,
    after_step: Callable[[], bool] | None = None,
) -> nn.Module:
    """Train `model` in place for `settings.epochs` epochs, and return it.

    Continues from the stage's checkpoint where there is one, and writes one after every epoch.

    Args:
        stage: names the checkpoint, the records and the bar: train, finetune.
        loss_fn: the mean loss of a batch.
        before_step: called before each optimizer step, when the gradients are there.
        after_step: called after each optimizer step, to keep zeros zero.
    """
    if settings.augment is not None:
        data = replace(data, augment=settings.augment)
    model = channels_last(model.to(work.device))
    per_epoch = math.ceil(len(data.train) / settings.batch_size)
    steps = max(1, settings.epochs * per_epoch)
    warmup = round(min(settings.warmup * per_epoch, steps // 2))
    optimizer = sgd(model, settings)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmup_cosine(step, warmup, steps))
    done = _restored(model, optimizer, schedule, work, stage)
    loader = training_batches(data, settings.batch_size, work, stage, done)
    wrapped, prepared, ready = work.accelerator.prepare(model, optimizer, loader)
    with work.progress.stage(stage, settings.epochs * per_epoch) as step:
        step(done * per_epoch)
        for epoch in range(done, settings.epochs):
            started = time.perf_counter()
            place = f"{stage}, epoch {epoch + 1}"
            loss, train_error = train_epoch(
                wrapped,
                prepared,
                ready,
                work,
                place=place,
                step=step,
                loss_fn=loss_fn,
                schedule=schedule,
                clip=settings.clip,
                precision=settings.precision,
                before_step=before_step,
                after_step=after_step,
            )
            error = evaluate(model, data.validation, work.device, place=place)
            step(0, error=f"{error:.2%}")
            work.record(
                stage,
                epoch=epoch + 1,
                loss=loss,
                train_error=train_error,
                error=error,
                groups_alive=None,
                flops=None,
                seconds=time.perf_counter() - started,
            )
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "schedule": schedule.state_dict(),
            }
            work.save(stage, {"epoch": epoch + 1, **state})
    return model


def _restored(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    work: Work,
    stage: str,
) -> int:
    """Load the stage's checkpoint, if any -> number of epochs that are done."""
    state = work.load(stage)
    if state is None:
        return 0
    try:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        return int(state["epoch"])
    except (KeyError, ValueError, RuntimeError) as error:
        raise InputError(f"the checkpoint of stage {stage} does not fit this recipe; use --overwrite") from error
