"""Data sets from files and from the hub: every malformed row names its file and line."""

import json

import pyarrow as pa
import pyarrow.parquet
import pytest

from jaxpg.tasks import dataset, draws

GOOD = {"prompt": "2+3=", "answer": "5", "more": [1]}


def write(path, *lines):
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines))
    return path


def test_json_lines_keep_all_columns_and_skip_blank_lines(tmp_path):
    path = write(
        tmp_path / "a.jsonl", b"\xef\xbb\xbf" + json.dumps(GOOD).encode(), b"  ", {**GOOD, "prompt": "a\u2028b"}, b""
    )
    rows = dataset.load(path)
    assert [row.where for row in rows] == [f"{path}:1", f"{path}:3"]
    assert rows[0] == dataset.Row("2+3=", "5", GOOD, f"{path}:1")
    assert rows[1].prompt == "a\u2028b"
    assert dataset.load(path, answer=None)[0].answer is None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "Expecting property name"),
        (b'{"prompt": "caf\xe9", "answer": "5"}', "utf-8"),
        (b"[" * 100_000, "the line is"),
        (b'["prompt"]', "is no object"),
        (b"3", "is no object"),
        ({"answer": "5"}, "column 'prompt' is missing; the row has 'answer'"),
        ({"prompt": "a"}, "column 'answer' is missing"),
        ({"prompt": "a", "answer": None}, "column 'answer' is null"),
        ({"prompt": "", "answer": "5"}, "must be a text that is not empty"),
        ({"prompt": 3, "answer": "5"}, "must be a text"),
        ({"prompt": [], "answer": "5"}, "must be a text"),
        ({"prompt": [{"role": "user"}], "answer": "5"}, "must be a text"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, line, message):
    path = write(tmp_path / "a.jsonl", GOOD, b"", line, GOOD)
    with pytest.raises(ValueError, match=message) as error:
        dataset.load(path)
    assert str(error.value).startswith(f"{path}:3: ") and len(str(error.value)) < 400


def test_conversations_are_prompts(tmp_path):
    messages = [{"role": "user", "content": "hi"}]
    path = write(tmp_path / "a.jsonl", {"messages": messages, "answer": 0})
    row = dataset.load(path, prompt="messages")[0]
    assert row.prompt == messages and row.answer == 0


def test_parquet_rows_are_read_and_named(tmp_path):
    path = tmp_path / "a.parquet"
    pa.parquet.write_table(pa.table({"question": ["a", "b", None], "answer": [1, 2, 3]}), path)
    with pytest.raises(ValueError, match=r"a\.parquet: row 2: column 'question' is null"):
        dataset.load(path, prompt="question")
    pa.parquet.write_table(pa.table({"question": ["a", "b"], "answer": [1, 2]}), path)
    assert [(row.prompt, row.answer) for row in dataset.load(path, prompt="question")] == [("a", 1), ("b", 2)]
    path.write_bytes(b"PAR1 or not")
    with pytest.raises(ValueError, match=r"a\.parquet: row 0"):
        dataset.load(path)


def test_other_names_go_to_datasets(monkeypatch):
    import datasets

    def load_dataset(name, config, *, split):
        assert (name, config, split) == ("someone/sums", "main", "test")
        return datasets.Dataset.from_list([GOOD, {**GOOD, "prompt": ""}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ValueError, match=r"someone/sums\[test\]: row 1: column 'prompt' holds ''"):
        dataset.load("someone/sums", config="main", split="test")


def test_absent_and_empty_files_are_told(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.jsonl"):
        dataset.load(tmp_path / "none.jsonl")
    with pytest.raises(FileNotFoundError, match=r"none\.parquet"):
        dataset.load(tmp_path / "none.parquet")
    with pytest.raises(ValueError, match="has no rows"):
        dataset.load(write(tmp_path / "a.jsonl", b"", b" "))


def test_each_pass_over_the_rows_has_each_once_in_another_order():
    stream = draws.rows(10, 3, 0, 30)
    passes = [stream[:10], stream[10:20], stream[20:]]
    assert all(sorted(p) == list(range(10)) for p in passes) and passes[0] != passes[1] != passes[2]
    assert draws.rows(10, 3, 7, 16) == stream[7:23]
    assert draws.rows(10, 4, 0, 10) != passes[0]
    assert draws.rows(10, 3, 5, 0) == []
    assert draws.pick("abcdefghij", 3, 8, 4) == ["abcdefghij"[i] for i in stream[8:12]]
    with pytest.raises(ValueError, match="size=0"):
        draws.rows(0, 0, 0, 1)
