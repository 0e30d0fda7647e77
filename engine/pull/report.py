"""What a pull tells its user, on stderr: lines and progress bars."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn


class Report:
    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self._console = Console(stderr=True, quiet=quiet, highlight=False)

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    @contextmanager
    def bar(self, title: str, total: int) -> Iterator[Callable[[int], None]]:
        """A bar of `total` units; the value is called with the units done since its last call."""
        columns = (
            TextColumn("{task.description:<12}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(elapsed_when_finished=True),
        )
        with Progress(*columns, console=self._console, disable=self.quiet) as progress:
            task = progress.add_task(title, total=total)
            yield lambda units: progress.advance(task, units)
