import io
import json
import math
import threading

import pytest
from rich.console import Console

from train.config.installation import python_command
from train.run import display

ESCAPE = "\x1b"


def piped():
    return Console(**display.PLAIN, file=io.StringIO(), force_terminal=False, width=80)


def terminal():
    return Console(
        **display.PLAIN,
        file=io.StringIO(),
        force_terminal=True,
        width=80,
        legacy_windows=False,
        _environ={"TERM": "xterm"},
    )


def output(console):
    return console.file.getvalue()


def test_piped_progress_prints_a_line_periodically():
    console = piped()
    with display.progress(console, every=3) as start:
        advance = start("train", 7, 0)
        for step in range(1, 8):
            advance(f"reward [{step}]")
    assert output(console) == "train 3/7  reward [3]\ntrain 6/7  reward [6]\ntrain 7/7  reward [7]\n"


def test_piped_progress_of_a_resumed_run_counts_on():
    console = piped()
    with display.progress(console, every=10) as start:
        advance = start("train", 20, 18)
        advance("")
        advance("")
    assert output(console) == "train 20/20\n"


def test_piped_lines_are_not_wrapped():
    console = piped()
    with display.progress(console, every=1) as start:
        start("train", 1, 0)("x" * 200)
    assert output(console).count("\n") == 1


def test_terminal_progress_draws_bars_with_the_note():
    console = terminal()
    with display.progress(console) as start:
        advance = start("warm start", 2, 0)
        advance("loss [red]")
        advance("loss 0.5")
    text = output(console)
    assert ESCAPE in text
    assert "warm start" in text
    assert "2/2" in text
    assert "loss 0.5" in text


def test_an_error_inside_progress_is_not_swallowed():
    def interrupted(console):
        with display.progress(console) as start:
            start("train", 2, 0)
            raise KeyboardInterrupt

    for console in (piped(), terminal()):
        with pytest.raises(KeyboardInterrupt):
            interrupted(console)


def test_default_console_writes_no_control_codes_into_pipes(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    console = display.default_console()
    console.print("done")
    with display.progress(console, every=1) as start:
        start("train", 1, 0)("")
    assert capsys.readouterr().out == "done\ntrain 1/1\n"


def test_table_shows_accuracy_and_kl_twice():
    console = piped()
    after = {"accuracy": 87.5, "kl_reference": 0.0123456, "kl_reference_exact": 0.0123}
    display.print_comparison(console, {"accuracy": 31.25, "rollout_kl": 1e-9}, after)
    rows = [line.replace("│", " ").split("  ") for line in output(console).splitlines()]
    cells = {row[0].strip(): row[1:] for row in ([cell for cell in row if cell.strip()] for row in rows) if row}
    assert [cell.strip() for cell in cells["held-out accuracy, sampled (%)"]] == ["31.2", "87.5"]
    assert [cell.strip() for cell in cells["KL(policy || reference) (nats/token)"]] == ["-", "0.01235"]
    assert [cell.strip() for cell in cells["exact KL(policy || reference) (nats/token)"]] == ["-", "0.0123"]
    assert [cell.strip() for cell in cells["rollout KL (nats/token)"]] == ["1.00e-09", "-"]
    assert ESCAPE not in output(console)


def test_table_leaves_out_unmeasured_values():
    console = piped()
    display.print_comparison(console, {"accuracy": 1.0}, {"accuracy": 2.0})
    assert "KL" not in output(console)


def test_summary_is_sorted_json_without_nan():
    text = display.summary_text(
        {"steps": 3, "accuracy_after": 0.1 + 0.2, "kl": math.nan, "nested": {"x": [math.inf, 1]}}
    )
    assert json.loads(text) == {"accuracy_after": 0.1 + 0.2, "kl": None, "nested": {"x": [None, 1]}, "steps": 3}
    assert text.index("accuracy_after") < text.index("kl") < text.index("steps")
    assert text.endswith("}\n")


def test_piped_progress_prints_slow_steps_and_phases(monkeypatch):
    monkeypatch.setattr(display, "LINE_SECONDS", -1.0)
    monkeypatch.setattr(display, "PHASE_SECONDS", 0.0)
    console, printed = piped(), threading.Event()
    monkeypatch.setattr(console.file, "flush", printed.set)
    with display.progress(console, every=10) as start:
        start("train", 20, 0)("slow")
        printed.clear()
        with start.phase("evaluation"):
            assert printed.wait(10)
    assert output(console) == "train 1/20  slow\nevaluation ...\n"


def test_piped_progress_leaves_quick_phases_out():
    console = piped()
    with display.progress(console) as start, start.phase("evaluation"):
        pass
    assert output(console) == ""


def test_terminal_progress_shows_a_phase_while_it_runs():
    console = terminal()
    with display.progress(console) as start, start.phase("evaluation of step 3"):
        pass
    assert "evaluation of step 3" in output(console)


def test_finished_run_names_directory_and_three_commands(tmp_path):
    stream = io.StringIO()
    display.print_next_commands(Console(**display.PLAIN, file=stream, width=40), tmp_path / "first")
    lines = stream.getvalue().splitlines()
    assert lines[0] == f"done: {tmp_path / 'first'}, with curves.png"
    assert [line.split()[:4] for line in lines[2:]] == [
        [python_command(), "-m", f"train.{name}", str(tmp_path / "first")] for name in ("report", "eval", "export")
    ]
    assert len({line.index("  # ") for line in lines[2:]}) == 1


def test_table_of_an_evaluation_shows_names_with_brackets(capsys):
    display.print_evaluation(display.default_console(), "run [a]", {"sampled": {"judge[v2] :x:": 1.0}, "greedy": {}}, 1)
    text = capsys.readouterr().out
    assert "run [a]" in text
    assert "judge[v2] :x:" in text
