"""Text files become blocks of token ids: every token once, in order."""

from __future__ import annotations

import json

import pytest
import torch
from cli_models import TEXT, save_tokenizer
from transformers import AutoTokenizer

from expert_parallel.cli.data import Blocks, load_ids, save_ids, text_files, token_ids


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


def test_all_text_of_all_files_in_order(tmp_path, tokenizer):
    (tmp_path / "b.txt").write_text("the experts answer")
    rows = [{"text": "first", "other": 1}, {"text": "second"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    (tmp_path / "ignored.csv").write_text("1,2")
    files = text_files([str(tmp_path)])
    assert [file.name for file in files] == ["a.jsonl", "b.txt"]
    ids = token_ids(files, tokenizer)
    assert ids.dtype is torch.int32
    assert tokenizer.decode(ids) == "first<end>second<end>the experts answer<end>"


def test_ids_survive_the_way_through_a_file(tmp_path):
    ids = torch.randint(0, 2**31 - 1, (1001,), dtype=torch.int32)
    save_ids(ids, tmp_path / "ids")
    assert torch.equal(load_ids(tmp_path / "ids"), ids)
    save_ids(ids[7:], tmp_path / "ids")
    assert torch.equal(load_ids(tmp_path / "ids"), ids[7:])


def test_blocks_hold_each_token_once_but_for_the_rest():
    ids = torch.arange(103, dtype=torch.int32)
    blocks = Blocks(ids, 10)
    samples = [blocks[i] for i in range(len(blocks))]
    assert torch.cat([sample["input_ids"] for sample in samples]).tolist() == list(range(100))
    assert all(torch.equal(sample["input_ids"], sample["labels"]) for sample in samples)
    assert samples[0]["input_ids"].dtype is torch.int64


def test_too_little_data():
    with pytest.raises(ValueError, match="9 tokens, less than one sequence of 10"):
        Blocks(torch.arange(9, dtype=torch.int32), 10)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("no.txt", None, "no file or folder"),
        ("data.csv", "a,b", r"must be a \.txt, \.md, \.jsonl file"),
        (
            "data.jsonl",
            '{"text": "a"}\n{"words": "b"}',
            "line 2: expected a JSON object with 'text'",
        ),
        ("data.jsonl", "{", "line 1: expected a JSON object"),
        ("data.jsonl", "[1]", "line 1: expected a JSON object"),
        ("data.jsonl", '{"text": null}', "line 1: expected a text as 'text', got None"),
        ("data.txt", "\ud8ff", r"data\.txt is no UTF-8 text"),
    ],
)
def test_what_cannot_be_read(tmp_path, tokenizer, name, content, expected):
    if content is not None:
        (tmp_path / name).write_text(content, errors="surrogatepass")
    with pytest.raises(ValueError, match=expected):
        token_ids(text_files([str(tmp_path / name)]), tokenizer)


def test_a_folder_without_text(tmp_path):
    with pytest.raises(ValueError, match="holds no"):
        text_files([str(tmp_path)])


def test_the_sample_text_is_long_enough_for_the_other_tests(tokenizer):
    assert len(tokenizer(TEXT)["input_ids"]) > 600
