from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_jax import console as console_module
from grpo_jax.console import Console, printable

STEP = {
    "Training/RewardMean": 0.412,
    "Performance/SuccessRate": 0.41,
    "Policy/KL": 0.0123,
    "Policy/Entropy": 0.951,
    "Performance/CompletionLength": 6.88,
    "Performance/TokensPerSecond": 12_345.0,
    "Performance/StepSeconds": 0.4199,
    "Training/Loss": 3.0,
}
WEIRD = [
    "",
    "\ud800 lone surrogate \udfff",
    "\u202eright to left\u202c שלום مرحبا",
    "[bold]markup[/bold] [/] [link=x] [red",
    "\x1b[2J\x1b[31m\r\x00\x07\x9b",
    "tab\tand\nnewline",
    "x" * 100_000,
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 e\u0301\u0301\u0301 \ufeff",
    "漢字" * 500,
]


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class _Clock:
    """A time that tests move by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(console_module.time, "monotonic", lambda: self.now)


def _on_terminal(use: Callable[[Console], None], *, columns: int = 160) -> str:
    """All that a console writes to a terminal of that width."""
    master, slave = pty.openpty()
    chunks: list[bytes] = []

    def read() -> None:
        try:
            while chunk := os.read(master, 65536):
                chunks.append(chunk)
        except OSError:
            pass  # Linux: the last writer has closed its end.

    reader = threading.Thread(target=read)
    reader.start()
    try:
        with os.fdopen(slave, "w", encoding="utf-8") as file, pytest.MonkeyPatch.context() as patch:
            patch.setenv("TERM", "xterm-256color")
            patch.setenv("COLUMNS", str(columns))
            patch.delenv("NO_COLOR", raising=False)
            with Console(file=file) as console:
                use(console)
    finally:
        reader.join(timeout=10)
        os.close(master)
    return b"".join(chunks).decode()


def test_line_of_a_step_where_piped(monkeypatch):
    clock = _Clock(monkeypatch)
    out = io.StringIO()
    console = Console(file=out)
    console.start(60, done=9)
    clock.now = 0.62
    console.advance(STEP)
    assert out.getvalue() == (
        "step 10/60 | reward 0.41 | success 41.0 % | KL 0.012 | entropy 0.95 | length 6.9 "
        "| 12.3k tok/s | 0.42 s | 0:31 left\n"
    )  # 50 steps of 0.62 s are left: 31 s


@pytest.mark.parametrize(
    ("seconds", "left"), [(0.1, "0:02"), (35.25, "11:45"), (548.25, "3:02:45"), (2.999, "1:00")]
)
def test_time_left(monkeypatch, seconds: float, left: str):
    clock = _Clock(monkeypatch)
    out = io.StringIO()
    console = Console(file=out)
    console.start(21)
    clock.now = seconds
    console.advance({})
    assert out.getvalue() == f"step 1/21 | {left} left\n"


def test_metrics_that_a_step_lacks_are_left_out_and_nan_is_shown():
    out = io.StringIO()
    console = Console(file=out)
    console.start(1)
    console.advance({"Training/RewardMean": float("nan"), "Performance/TokensPerSecond": 87.4})
    assert out.getvalue() == "step 1/1 | reward nan | 87 tok/s | 0:00 left\n"


def test_every_thins_the_lines_but_shows_first_and_last():
    out = io.StringIO()
    console = Console(file=out, every=4)
    console.start(10, done=1)
    for _ in range(9):
        console.advance({})
    assert [line.split(" |")[0] for line in out.getvalue().splitlines()] == [
        "step 2/10",
        "step 4/10",
        "step 8/10",
        "step 10/10",
    ]


def _everything(console: Console, text: str) -> None:
    """Every method, with ``text`` wherever one can be."""
    console.stage(text)
    console.message(text)
    console.warning(text)
    console.start(3, label="step")
    for step in range(3):
        console.advance(STEP)
        console.completions_table(step, [(text, [(text, 1.0, 0.5), (text, float("nan"), -0.5)]), (text, [])])
        with console.progress(text, total=2) as update:
            update(1, loss=0.5)
            update(2, loss=float("inf"))
    with console.progress(text):
        pass
    console.summary({text: 0.1}, {text: 0.2, "other": 0.5}, Path("/runs/a"), [text])


@pytest.mark.parametrize("text", WEIRD, ids=range(len(WEIRD)))
def test_any_text_is_plain_where_piped(text: str):
    out = io.StringIO()
    _everything(Console(file=out), text)
    shown = out.getvalue()
    shown.encode("utf-8")
    assert all(char.isprintable() or char == "\n" for char in shown)


@pytest.mark.parametrize("text", WEIRD, ids=range(len(WEIRD)))
def test_any_text_is_shown_on_a_terminal(text: str):
    shown = _on_terminal(lambda console: _everything(console, text))
    for forbidden in ("\x1b[2J", "\x00", "\x07", "\x9b", "\u202e"):
        assert forbidden not in shown
    # Hidden for the bar, and back at the end.
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_output_of_any_encoding(encoding: str):
    raw = io.BytesIO()
    with io.TextIOWrapper(raw, encoding=encoding) as file:
        for text in WEIRD:
            _everything(Console(file=file), text)
        file.flush()
        assert "summary" in raw.getvalue().decode(encoding)


def test_markup_in_model_output_stays_as_written():
    rows = [("[bold]p[/bold]", [("[red]c[/red] \\[x]", 1.0, 0.0)])]
    for shown in (
        _on_terminal(lambda console: console.completions_table(1, rows)),
        _plain(lambda console: console.completions_table(1, rows)),
    ):
        assert "[bold]p[/bold]" in shown and "[red]c[/red] \\[x]" in shown


def _plain(use: Callable[[Console], None]) -> str:
    out = io.StringIO()
    use(Console(file=out))
    return out.getvalue()


def test_completions_where_piped():
    rows = [("1+1=", [("2\n", 1.0, 0.7071), ("", 0.0, -0.7071)])]
    assert _plain(lambda console: console.completions_table(20, rows)) == (
        "completions of step 20\n"
        "  prompt: 1+1=\n"
        "    reward 1.00 | advantage +0.71 | 2\\n\n"
        "    reward 0.00 | advantage -0.71 | (empty)\n"
    )


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\nb\tc\r", "a\\nb\\tc\\r"),
        ("\x1b[31m\x00", "\\x1b[31m\\x00"),
        ("\u202e\ud800\u200b", "\\u202e\\ud800\\u200b"),
        ("é 漢 [x] \\", "é 漢 [x] \\"),
        ("", ""),
    ],
)
def test_printable(text: str, shown: str):
    assert printable(text) == shown


def test_long_text_is_shortened_in_the_middle():
    text = "".join(chr(ord("a") + i % 26) for i in range(1000))
    # A third of the limit is kept of the end: 9 - 3 of the beginning and 3 of the end.
    assert printable(text, limit=9) == f"{text[:6]} [... 991 characters ...] {text[-3:]}"
    assert printable(text, limit=1000) == text
    assert len(_plain(lambda console: console.completions_table(1, [(text, [(text, 0.0, 0.0)])]))) < 700


def test_progress_where_piped(monkeypatch):
    clock = _Clock(monkeypatch)

    def use(console: Console) -> None:
        with console.progress("warm start", total=100) as update:
            for done in range(1, 101):
                clock.now = done / 5
                update(done, loss=1 / done)

    # A line each 5 seconds, not one each call.
    assert _plain(use).splitlines() == [
        "warm start 25/100 | loss 0.04 | 0:15 left",
        "warm start 50/100 | loss 0.02 | 0:10 left",
        "warm start 75/100 | loss 0.0133 | 0:05 left",
        "warm start: done in 0:20 | loss 0.01",
    ]


def test_progress_that_fails_says_stopped_and_lets_the_error_through():
    out = io.StringIO()
    with pytest.raises(KeyError), Console(file=out).progress("loading"):
        raise KeyError("x")
    assert out.getvalue() == "loading: stopped in 0:00\n"


def test_bar_on_a_terminal_shows_the_fields_and_ends_with_the_last_step():
    def use(console: Console) -> None:
        console.start(2)
        console.advance(STEP)
        with console.progress("evaluation", total=4) as update:
            update(3)
        console.advance(STEP)
        console.message("after")

    shown = _on_terminal(use)
    for field in ("reward 0.41", "success 41.0 %", "KL 0.012", "entropy 0.95", "length 6.9", "12.3k tok/s"):
        assert field in shown
    assert "step 2/2" in shown and "left" in shown and "\x1b[" in shown
    assert shown.rstrip().endswith("after")


def test_bar_stops_when_the_loop_breaks_off():
    def use(console: Console) -> None:
        with pytest.raises(ZeroDivisionError), console:
            console.start(5)
            console.advance(STEP)
            raise ZeroDivisionError

    assert _on_terminal(use).rindex("\x1b[?25h") > 0


def test_no_colour_where_the_user_wants_none(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")

    monkeypatch.setenv("TERM", "xterm-256color")
    coloured = "\x1b[33m"
    out = _Terminal()
    Console(file=out).warning("w")
    assert "w" in out.getvalue() and coloured not in out.getvalue()
    monkeypatch.delenv("NO_COLOR")
    out = _Terminal()
    Console(file=out).warning("w")
    assert coloured in out.getvalue()


def test_dumb_terminal_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    out = _Terminal()
    _everything(Console(file=out), "text")
    assert "\x1b" not in out.getvalue() and "\r" not in out.getvalue()


def test_summary_where_piped():
    before, after = {"success rate": 0.125, "greedy accuracy": 0.25}, {"success rate": 0.9}
    shown = _plain(lambda c: c.summary(before, after, Path("/runs/sort"), ["grpo-jax eval /runs/sort"]))
    assert shown == (
        "== summary\n"
        "success rate: 12.5 % before, 90.0 % after\n"
        "greedy accuracy: 25.0 % before, - after\n"
        "run: /runs/sort\n"
        "  grpo-jax eval /runs/sort\n"
    )


def test_long_command_stays_on_one_line_of_a_terminal():
    command = "grpo-jax eval " + "/a/long/folder" * 20
    shown = _on_terminal(lambda console: console.summary({}, {}, Path("/r"), [command]), columns=60)
    assert command in shown


def test_disabled_console_is_silent():
    out = io.StringIO()
    _everything(Console(file=out, enabled=False), "text")
    assert out.getvalue() == ""


def test_output_that_is_closed_does_not_stop_the_run():
    read, write = os.pipe()
    file = os.fdopen(write, "w")
    console = Console(file=file)
    os.close(read)
    _everything(console, "text")
    with pytest.raises(BrokenPipeError):
        file.close()  # What was buffered has nowhere to go.
    _everything(console, "text")


@pytest.mark.parametrize("terminal", [False, True])
def test_full_disk_or_lost_terminal_does_not_stop_the_run(monkeypatch, terminal: bool):
    class Full(_Terminal if terminal else io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    monkeypatch.setenv("TERM", "xterm")
    _everything(Console(file=Full()), "text")


@pytest.mark.parametrize("terminal", [False, True])
def test_closed_file_does_not_stop_the_run(monkeypatch, terminal: bool):
    monkeypatch.setenv("TERM", "xterm")
    out = _Terminal() if terminal else io.StringIO()
    console = Console(file=out)
    out.close()
    _everything(console, "text")
    _everything(Console(file=out), "text")


def test_advance_before_start_is_an_error():
    with pytest.raises(RuntimeError, match="start"):
        Console(file=io.StringIO()).advance({})


@pytest.mark.parametrize("terminal", [False, True])
def test_program_outlives_the_reader_of_its_output(tmp_path, terminal: bool):
    """As under ``| head -1``: no traceback, exit status 0, and the work goes on to its end."""
    done = tmp_path / "done"
    script = (
        "import sys, time; from pathlib import Path; from grpo_jax.console import Console\n"
        f"if {terminal}: sys.__stdout__.isatty = lambda: True\n"
        "console = Console()\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "console.start(50)\n"
        "for _ in range(50):\n"
        "    console.advance({'Policy/KL': 0.1}); console.message('m'); console.completions_table(1, [])\n"
        "console.stop(); print('of others')\n"
        f"Path({str(done)!r}).write_text('end')\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "TERM": "xterm"},
    )
    assert child.stdin is not None and child.stdout is not None and child.stderr is not None
    with child:
        assert child.stdout.readline() == b"ready\n"
        child.stdout.close()
        child.stdin.write(b"\n")
        child.stdin.close()
        errors = child.stderr.read()
        assert child.wait(timeout=20) == 0, errors
    assert errors == b""
    assert done.read_text() == "end"
