"""Lines of a command as JSON objects."""

import io
import json
import threading
from datetime import UTC, datetime, timedelta

from tests.integration.command import run_here
from train.process.json_lines import JsonLines


def test_each_line_is_an_object():
    stream = io.StringIO()
    lines = JsonLines(stream, "error")
    print("warning: a \N{GREEK SMALL LETTER BETA}", file=lines)
    print("no", end=" ", file=lines)
    print("level\n\nnote: seen", file=lines)
    records = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [(record["level"], record["text"]) for record in records] == [
        ("warning", "a \N{GREEK SMALL LETTER BETA}"),
        ("error", "no level"),
        ("info", "seen"),
    ]
    assert {record["process"] for record in records} == {0}
    age = datetime.now(UTC) - datetime.fromisoformat(records[0]["time"])
    assert timedelta(0) <= age + timedelta(seconds=1) < timedelta(seconds=60)
    assert not lines.isatty()


def test_lines_of_threads_stay_apart():
    stream = io.StringIO()
    lines = JsonLines(stream, "info")
    print("one", end=" ", file=lines)
    thread = threading.Thread(target=lambda: print("warning: two", file=lines))
    thread.start()
    thread.join()
    print("line", file=lines)
    assert [json.loads(line)["text"] for line in stream.getvalue().splitlines()] == ["two", "one line"]


def test_command_writes_json_from_its_config_on(tmp_path):
    (tmp_path / "file").write_text("")
    done = run_here("configs/smoke.yaml", "log.format=json", "reference.monitor=true", f"output={tmp_path}/file")
    assert done.returncode == 2
    first = json.loads(done.stdout.splitlines()[0])
    assert first["text"].startswith("devices: ")
    last = json.loads(done.stderr.splitlines()[-1])
    assert (last["level"], last["text"].partition(":")[0]) == ("error", "output")
