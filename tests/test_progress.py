"""What is shown when stdout is no terminal, and what is logged."""

import re
import sys
import time
from pathlib import Path

import pytest

from compressnas.progress import Progress


def test_plain_lines_are_few_and_the_last_one_says_how_it_ended(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with Progress().stage("train", 100) as step:
        for index in range(100):
            now += 1.0
            step(loss=1 / (index + 1), groups_alive=12)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "train 5/100, loss 0.2, groups alive 12, 1 min 35 s left"
    assert len(lines) == 20  # 5, 10, ..., 95, and the end
    assert lines[-1] == "train 100/100, loss 0.01, groups alive 12, done in 1 min 40 s"


def test_the_first_of_a_few_slow_steps_is_shown_at_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with Progress().stage("train", 3) as step:
        for _ in range(3):
            now += 2.0
            step(error=0.5)
    assert capsys.readouterr().out.splitlines() == [
        "train 1/3, error 0.5, 4.0 s left",
        "train 3/3, error 0.5, done in 6.0 s",
    ]


def test_a_stage_that_fails_says_where_it_stopped(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt), Progress().stage("train", 10) as step:
        step(advance=4)
        raise KeyboardInterrupt
    assert re.fullmatch(r"train 4/10, stopped after \d\.\d s\n", capsys.readouterr().out)


def test_everything_said_is_logged_with_a_time_and_quiet_hides_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.txt"
    progress = Progress(quiet=True)
    progress.say("before there is a log")
    progress.log_to(log)
    with progress.stage("outer [1]", 1) as outer, progress.stage("inner", 1) as inner:
        progress.say("two\nlines")
        inner()
        outer()
    assert capsys.readouterr() == ("", "")
    lines = log.read_text().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d ", line) for line in lines)
    told = [line.partition(" ")[2].partition(",")[0] for line in lines]
    assert told == ["two", "lines", "inner 1/1", "outer [1] 1/1"]
    Progress(quiet=True, log=log).say("appended")
    assert len(log.read_text().splitlines()) == 5


def test_lines_said_while_bars_are_drawn_come_out_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    progress = Progress(log=tmp_path / "log.txt")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with progress.stage("outer [1]", 2) as outer:
        for _ in range(2):
            with progress.stage("inner", 1) as inner:
                progress.say("said [bold]in between[/bold]")
                inner(loss=0.25)
            outer()
    shown = [line.rstrip() for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().out).splitlines()]
    assert [line for line in shown if line.endswith("said [bold]in between[/bold]")]
    assert [line for line in shown if re.search(r"outer \[1\] 2/2, done in \d\.\d s$", line)]
    assert any("0/2" in line and "outer [1]" in line for line in shown)  # a bar
    assert "said [bold]in between[/bold]" in (tmp_path / "log.txt").read_text()
