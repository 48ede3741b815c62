import json

from asyncrl.runtime.tail import JsonLines, last_lines
from asyncrl.telemetry.metrics import MetricsWriter


def test_lines_come_once_and_a_half_written_one_comes_when_it_is_whole(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path)
    assert lines.read() == []
    path.write_text('{"step": 1}\n{"st')
    assert lines.read() == [{"step": 1}]
    assert lines.read() == []
    with path.open("a") as file:
        file.write('ep": 2}\n')
    assert lines.read() == [{"step": 2}]


def test_from_the_end_only_new_lines_come(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    lines = JsonLines(path, from_end=True)
    with path.open("a") as file:
        file.write(json.dumps({"step": 2}) + "\n")
    assert lines.read() == [{"step": 2}]


def test_from_the_end_a_line_that_a_killed_writer_left_half_is_passed_over(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    lines = JsonLines(path, from_end=True)
    writer = MetricsWriter(path)
    writer.write({"step": 2, "loss": 0.25})
    writer.close()
    assert lines.read() == [{"step": 2, "loss": 0.25}]


def test_the_last_lines_of_a_log_skip_empty_ones_and_survive_bad_bytes(tmp_path):
    path = tmp_path / "a.log"
    assert last_lines(path, 2) == []
    path.write_bytes(b"one\n\ntwo\n\xff three\n")
    assert last_lines(path, 2) == ["two", "\ufffd three"]
