"""What a run shows: a live bar and tables on a terminal, plain lines where the output is piped.

Nothing that is shown can stop a run: whatever a model has written is made printable, and a reader that has
gone away (``| head``) only ends the output.
"""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Protocol, cast

from rich.console import Console as RichConsole
from rich.console import RenderableType
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Column, Table
from rich.text import Text

_MAX_TEXT = 240
_SECONDS_BETWEEN_LINES = 5.0

CompletionRow = tuple[str, Sequence[tuple[str, float, float]]]
"""A prompt, and (completion, reward, advantage) of some of its completions."""


class ProgressCallback(Protocol):
    """Says how far some work is."""

    def __call__(self, done: int, **values: float) -> None:
        """``done`` units in all so far; ``values`` are numbers worth seeing beside them (loss=0.4)."""
        ...


class _Output(io.TextIOBase):
    """A text file that takes no more once a write has failed, and never raises."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._dead = False

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self._file, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        try:
            return self._file.isatty()
        except ValueError:  # a closed file
            return False

    def fileno(self) -> int:
        return self._file.fileno()

    def write(self, text: str) -> int:
        if not self._dead:
            self._try(lambda: self._file.write(text))
        return len(text)

    def flush(self) -> None:
        if not self._dead:
            self._try(self._file.flush)

    def _try(self, operation: Callable[[], object]) -> None:
        try:
            operation()
        except (OSError, ValueError) as error:
            self._dead = True
            if isinstance(error, BrokenPipeError) and self._file is sys.__stdout__:
                # What is buffered still would fail in the interpreter's last flush.
                devnull = os.open(os.devnull, os.O_WRONLY)
                os.dup2(devnull, self._file.fileno())
                os.close(devnull)


def printable(text: str, *, limit: int | None = None) -> str:
    r"""``text`` on one line, with control and invisible characters as escapes: ``\n``, ``\x1b``, ``\u202e``.

    With ``limit``, the middle of a text longer than that is replaced by the number of characters left out.
    """
    if limit is not None and len(text) > limit:
        tail = limit // 3
        head = limit - tail
        return f"{printable(text[:head])} [... {len(text) - limit} characters ...] {printable(text[-tail:])}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def _clock(seconds: float) -> str:
    """Seconds as 0:31, 12:05 or 3:04:05."""
    minutes, seconds = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _tokens_per_second(value: float) -> str:
    return f"{value / 1000:.1f}k tok/s" if value >= 1000 else f"{value:.0f} tok/s"


# What the line of a step shows of its metrics, in this order; a metric that the step lacks is left out.
_STEP_FIELDS: tuple[tuple[str, Callable[[float], str]], ...] = (
    ("Training/RewardMean", "reward {:.2f}".format),
    ("Performance/SuccessRate", lambda share: f"success {_percent(share)}"),
    ("Policy/KL", "KL {:.3f}".format),
    ("Policy/Entropy", "entropy {:.2f}".format),
    ("Performance/CompletionLength", "length {:.1f}".format),
    ("Performance/TokensPerSecond", _tokens_per_second),
    ("Performance/StepSeconds", "{:.2f} s".format),
)


class _Work:
    """One piece of work under way: how far it is, and how long it will take at its pace so far."""

    def __init__(self, label: str, total: int | None, done: int) -> None:
        self.label = label
        self.total = total
        self.done = self.first = done
        self.began = self.shown = time.monotonic()
        self.task: TaskID | None = None

    def left(self) -> list[str]:
        """The time left, as a field; nothing while it is unknown."""
        if self.total is None or self.done <= self.first:
            return []
        pace = (time.monotonic() - self.began) / (self.done - self.first)
        return [f"{_clock(pace * max(0, self.total - self.done))} left"]

    def count(self) -> str:
        """How much is done, as a field."""
        return f"{self.label} {self.done}" + ("" if self.total is None else f"/{self.total}")


class Console:
    """Everything that a run prints.

    Args:
        file: where to; None: standard output.
        every: steps of the loop between two lines where the output is not a terminal.
        enabled: False prints nothing, for all processes but the first.
    """

    def __init__(self, *, file: IO[str] | None = None, every: int = 1, enabled: bool = True) -> None:
        self._file = _Output(sys.stdout if file is None else file)
        terminal = self._file.isatty()
        self._rich = RichConsole(
            file=cast(IO[str], self._file), force_terminal=terminal, highlight=False, emoji=False
        )
        self._live = terminal and not self._rich.is_dumb_terminal
        self._every = every
        self._enabled = enabled
        self._bars: Progress | None = None
        self._loop: _Work | None = None

    def stage(self, title: str) -> None:
        """A header in front of a stage of the run."""
        self._show(Text(self._clean(title), style="bold"), plain=f"== {self._clean(title)}")

    def message(self, text: str) -> None:
        """Text as it is, line by line."""
        for line in text.split("\n"):
            self._show(Text(self._clean(line)), plain=self._clean(line))

    def warning(self, text: str) -> None:
        """One line that stands out."""
        line = f"warning: {self._clean(text)}"
        self._show(Text(line, style="yellow"), plain=line)

    def start(self, total: int, done: int = 0, label: str = "step") -> None:
        """The loop begins: ``done`` of ``total`` steps lie behind it (after a resume)."""
        self.stop()
        self._loop = _Work(label, total, done)
        self._add_bar(self._loop)

    def advance(self, values: Mapping[str, float]) -> None:
        """The loop has done one more step, with these metrics (names as in ``grpo_jax.metrics.METRICS``)."""
        loop = self._loop
        if loop is None:
            raise RuntimeError("Console.advance called before Console.start")
        loop.done += 1
        fields = [show(values[name]) for name, show in _STEP_FIELDS if values.get(name) is not None]
        if self._bars is not None:
            self._update_bar(loop, fields)
        elif loop.done % self._every == 0 or loop.done in (loop.first + 1, loop.total):
            self._print_plain(" | ".join([loop.count(), *fields, *loop.left()]))
        if loop.done == loop.total:
            self.stop()

    def stop(self) -> None:
        """The loop ends, also before its last step: the bar stays as it is and the cursor comes back."""
        loop, self._loop = self._loop, None
        if loop is not None and self._bars is not None:
            self._stop_bars()

    @contextmanager
    def progress(self, label: str, total: int | None = None) -> Iterator[ProgressCallback]:
        """Other work that takes a while: yields a callback ``update(done, loss=0.4)``; says when it is over.

        Args:
            label: what is being done.
            total: units of work; None where nobody knows.
        """
        work = _Work(self._clean(label), total, 0)
        inside = self._bars is not None
        self._add_bar(work)

        def update(done: int, **values: float) -> None:
            work.done = done
            fields = [f"{name} {value:.3g}" for name, value in values.items()]
            now = time.monotonic()
            if self._bars is not None:
                self._update_bar(work, fields)
            elif now - work.shown >= _SECONDS_BETWEEN_LINES and done != total:
                work.shown = now
                self._print_plain(" | ".join([work.count(), *fields, *work.left()]))
            finished[:] = fields

        finished: list[str] = []
        over = "stopped"
        try:
            yield update
            over = "done"
        finally:
            if self._bars is not None and work.task is not None:
                self._bars.remove_task(work.task)
                if not inside:
                    self._stop_bars()
            took = f"{work.label}: {over} in {_clock(time.monotonic() - work.began)}"
            line = " | ".join([took, *finished])
            self._show(Text(line, style="dim"), plain=line)

    def completions_table(self, step: int, rows: Sequence[CompletionRow]) -> None:
        """Some completions with their rewards and advantages, prompt by prompt; long texts are shortened."""
        title = f"completions of step {step}"
        table = Table(title=title, title_justify="left", title_style="bold", show_lines=False)
        table.add_column("prompt / completion", ratio=1, overflow="fold")
        table.add_column("reward", justify="right")
        table.add_column("advantage", justify="right")
        lines = [title]
        for prompt, completions in rows:
            shown = self._clean(prompt, limit=_MAX_TEXT)
            table.add_section()
            table.add_row(Text(shown, style="bold"), "", "")
            lines.append(f"  prompt: {shown}")
            for completion, reward, advantage in completions:
                shown = self._clean(completion, limit=_MAX_TEXT) or "(empty)"
                numbers = (f"{reward:.2f}", f"{advantage:+.2f}")
                style = "green" if advantage > 0 else "red" if advantage < 0 else ""
                table.add_row(Text(shown), numbers[0], Text(numbers[1], style=style))
                lines.append(f"    reward {numbers[0]} | advantage {numbers[1]} | {shown}")
        self._show(table, plain="\n".join(lines))

    def summary(
        self, before: Mapping[str, float], after: Mapping[str, float], run: Path, commands: Sequence[str]
    ) -> None:
        """The end of a run: shares (0 to 1) before and after it, where it lies, and what to do next."""
        table = Table(title="summary", title_justify="left", title_style="bold")
        lines = ["== summary"]
        for heading in ("", "before", "after"):
            table.add_column(heading, justify="right" if heading else "left")
        for name in dict.fromkeys([*before, *after]):
            old, new = (_percent(shares[name]) if name in shares else "-" for shares in (before, after))
            table.add_row(Text(self._clean(name)), old, Text(new, style="bold"))
            lines.append(f"{self._clean(name)}: {old} before, {new} after")
        self._show(table, plain="\n".join(lines))
        self.message(f"run: {run}")
        for command in commands:
            self._show(Text(f"  {self._clean(command)}", style="cyan"), plain=f"  {self._clean(command)}")

    def _clean(self, text: str, *, limit: int | None = None) -> str:
        """Printable, and within the encoding of the output."""
        encoding = self._file.encoding
        return printable(text, limit=limit).encode(encoding, "backslashreplace").decode(encoding)

    def _show(self, renderable: RenderableType, *, plain: str) -> None:
        if not self._live:
            self._print_plain(plain)
        elif self._enabled:
            # Lines are left to the terminal to wrap, so that a path or command can be copied whole.
            self._rich.print(renderable, soft_wrap=isinstance(renderable, Text))

    def _print_plain(self, line: str) -> None:
        if self._enabled:
            self._file.write(line + "\n")
            self._file.flush()

    def _add_bar(self, work: _Work) -> None:
        if not (self._live and self._enabled):
            return
        if self._bars is None:
            text = Column(ratio=1, no_wrap=True, overflow="ellipsis")
            self._bars = Progress(
                BarColumn(bar_width=16),
                TextColumn("{task.description}", markup=False, table_column=text),
                console=self._rich,
                expand=True,
                refresh_per_second=4,
            )
            self._bars.start()
        work.task = self._bars.add_task(work.count(), total=work.total, completed=work.done)

    def _update_bar(self, work: _Work, fields: Sequence[str]) -> None:
        if self._bars is not None and work.task is not None:
            # The time left comes early: a narrow terminal cuts the end.
            text = " | ".join([work.count(), *work.left(), *fields])
            self._bars.update(work.task, completed=work.done, description=text)

    def _stop_bars(self) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def __enter__(self) -> Console:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()
        self._stop_bars()
