"""Processes that share a GPU take much of its memory in turn."""

from __future__ import annotations

import threading

from fa_verify.properties.execution.large_memory import large_memory


def test_a_second_block_for_the_same_gpu_waits_for_the_first(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "test-of-large-memory")
    entered = threading.Event()

    def second():
        with large_memory("cuda"):
            entered.set()

    thread = threading.Thread(target=second)
    with large_memory("cuda"):
        thread.start()
        assert not entered.wait(0.2)
    thread.join(10)
    assert entered.is_set()


def test_blocks_for_other_gpus_do_not_wait(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "test-of-one-gpu")
    with large_memory("cuda"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "test-of-another-gpu")
        with large_memory("cuda"), large_memory("cpu"), large_memory("cpu"):
            pass
