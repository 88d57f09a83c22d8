"""The text is real, repeatable, and there on every machine."""

from __future__ import annotations

import itertools
import string

import torch

from minicompile.lessons import data


def test_same_seed_same_batches_whatever_else_is_random():
    first = list(itertools.islice(data.batches(2, 16, seed=3), 4))
    torch.manual_seed(99)
    second = list(itertools.islice(data.batches(2, 16, seed=3), 4))
    assert all(
        torch.equal(a, b)
        for x, y in zip(first, second, strict=True)
        for a, b in zip(x, y, strict=True)
    )
    other, _ = next(data.batches(2, 16, seed=4))
    assert not torch.equal(first[0][0], other)


def test_targets_are_inputs_one_character_later():
    inputs, targets = next(data.batches(4, 16))
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert inputs.is_contiguous()
    assert targets.is_contiguous()


def test_text_is_python_source():
    text = data.decode(data.corpus())
    assert text == data.decode(data.encode(data.read_text()))
    assert "import" in text
    assert set(string.ascii_letters) <= set(text)
    assert data.corpus().max() < len(data.VOCABULARY)
