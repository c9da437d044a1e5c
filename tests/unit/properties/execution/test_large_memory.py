"""Processes that share a GPU take much of its memory in turn."""

from __future__ import annotations

import threading

import pytest
import torch

from fa_verify.properties.execution import large_memory as module
from fa_verify.properties.execution.large_memory import large_memory

FREE = 2**30


@pytest.fixture(autouse=True)
def memory(monkeypatch):
    """The free bytes of a GPU's memory, one for each question; the last one stays."""
    answers = [FREE]
    monkeypatch.setattr(
        torch.cuda, "mem_get_info", lambda: (answers.pop(0) if answers[1:] else answers[0], FREE)
    )
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return answers


def test_a_second_block_for_the_same_gpu_waits_for_the_first(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "test-of-large-memory")
    entered = threading.Event()

    def second():
        with large_memory("cuda", 0):
            entered.set()

    thread = threading.Thread(target=second)
    with large_memory("cuda", 0):
        thread.start()
        assert not entered.wait(0.2)
    thread.join(10)
    assert entered.is_set()


def test_blocks_for_other_gpus_do_not_wait(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "test-of-one-gpu")
    with large_memory("cuda", 0):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "test-of-another-gpu")
        with large_memory("cuda", 0), large_memory("cpu", 0), large_memory("cpu", 0):
            pass


def test_a_block_waits_until_enough_memory_is_free(monkeypatch, memory):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "test-of-free-memory")
    memory[:0] = [0, FREE // 2]
    with large_memory("cuda", FREE):
        assert memory == [FREE]


def test_a_block_does_not_wait_for_memory_for_ever(monkeypatch, memory):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "test-of-missing-memory")
    monkeypatch.setattr(module, "_PATIENCE", 0.3)
    with large_memory("cuda", 2 * FREE):
        assert memory == [FREE]
