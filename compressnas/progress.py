"""What a run shows while it works: a bar on a terminal, plain lines elsewhere, and every line in the log file."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

Value = str | float | int

_LINE_EVERY = 5.0  # seconds between two plain lines of a stage
_FEW_STEPS = 20  # a stage this short also has a line for its first step, when that took
_FIRST_LINE_AFTER = 1.0  # seconds or more


class Step(Protocol):
    """Called as the stage moves on; `fields` are shown beside it (`loss=0.1, groups_alive=512`)."""

    def __call__(self, advance: int = 1, **fields: Value) -> None: ...


class Progress:
    """The display of one command.

    Args:
        quiet: write nothing to stdout; the log is still written.
        log: a file to which every line is appended, with a time stamp.
    """

    def __init__(self, quiet: bool = False, log: Path | None = None) -> None:
        self._quiet = quiet
        self._log = log
        self._console = Console(highlight=False, soft_wrap=True)
        self._bars: Bars | None = None
        self._open_stages = 0

    def log_to(self, path: Path | None) -> None:
        """From now on append every line to `path`, which is opened and closed for each line."""
        self._log = path

    def say(self, text: str) -> None:
        """Show `text` on lines of its own, above any bar, and log it. Raises OSError when it cannot be written."""
        if self._quiet:
            pass
        elif self._bars is not None:
            self._bars.console.print(text, markup=False, soft_wrap=True)
        else:
            print(text, flush=True)
        self._write_log(text)

    @contextmanager
    def stage(self, title: str, total: int) -> Iterator[Step]:
        """Show a stage of `total` steps, which may lie within another one. Its last line says how it ended."""
        stage = _Stage(title, total)
        task = self._open_bar(title, total)
        ended = False

        def step(advance: int = 1, **fields: Value) -> None:
            stage.move(advance, fields)
            if self._bars is not None and task is not None:
                self._bars.update(task, advance=advance, fields=_joined(stage.fields))
            if stage.line_is_due():
                self._say_unless_bar(stage.line())

        try:
            yield step
            ended = True
        finally:
            self._close_bar(task)
            self.say(stage.line("done" if ended else "stopped"))

    def _say_unless_bar(self, text: str) -> None:
        if self._bars is None:
            self.say(text)
        else:
            self._write_log(text)

    def _open_bar(self, title: str, total: int) -> TaskID | None:
        if self._quiet or not sys.stdout.isatty() or self._console.is_dumb_terminal:
            return None
        if self._bars is None:
            title_column, fields_column = (
                TextColumn(text, markup=False) for text in ("{task.description}", "{task.fields[fields]}")
            )
            columns = (
                title_column,
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                fields_column,
                TimeRemainingColumn(),
            )
            self._bars = Bars(*columns, console=self._console)
            self._bars.start()
        self._open_stages += 1
        return self._bars.add_task(title, total=total, fields="")

    def _close_bar(self, task: TaskID | None) -> None:
        if task is None or self._bars is None:
            return
        self._bars.remove_task(task)
        self._open_stages -= 1
        if not self._open_stages:
            self._bars.stop()
            self._bars = None

    def _write_log(self, text: str) -> None:
        if self._log is None:
            return
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        with open(self._log, "a", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(f"{now} {line}\n" for line in text.splitlines() or [""])


class _Stage:
    """How far a stage is, and its plain lines."""

    def __init__(self, title: str, total: int) -> None:
        self.title, self.total, self.done = title, total, 0
        self.fields: dict[str, Value] = {}
        self.began = self.last_line = time.monotonic()

    def move(self, advance: int, fields: dict[str, Value]) -> None:
        self.done += advance
        self.fields.update(fields)

    def line_is_due(self) -> bool:
        """At most every few seconds; the last step has none, since the stage ends with one."""
        if self.done >= self.total:
            return False
        first_of_few = self.done == 1 and self.total <= _FEW_STEPS
        if time.monotonic() - self.last_line < (_FIRST_LINE_AFTER if first_of_few else _LINE_EVERY):
            return False
        self.last_line = time.monotonic()
        return True

    def line(self, end: str = "") -> str:
        """`fine-tune 3/8, loss 0.12, groups alive 96, 20 s left`."""
        spent = time.monotonic() - self.began
        if end:
            when = f"{end} in {_duration(spent)}" if end == "done" else f"{end} after {_duration(spent)}"
        else:
            when = f"{_duration(spent / max(self.done, 1) * (self.total - self.done))} left"
        return ", ".join(filter(None, [f"{self.title} {self.done}/{self.total}", _joined(self.fields), when]))


def _joined(fields: dict[str, Value]) -> str:
    return ", ".join(
        f"{name.replace('_', ' ')} {f'{value:.4g}' if isinstance(value, float) else value}"
        for name, value in fields.items()
    )


def _duration(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
