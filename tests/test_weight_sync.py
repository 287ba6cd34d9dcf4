"""The bounded sender: it ends with a cause when the receiver is dead, slow or has failed, and works otherwise."""

import asyncio
import os
import threading
import time

import pytest
import torch

zmq = pytest.importorskip("zmq")

from quads_recipe import weight_sync  # noqa: E402
from quads_recipe.run_id import ENV, new_run_id, weight_socket  # noqa: E402


@pytest.fixture
def address(monkeypatch):
    monkeypatch.setenv(ENV, new_run_id())
    return weight_socket(0, 0)


def sender(address, timeout_s=2.0, receiver=None):
    return weight_sync.BoundedWeightSender(
        zmq_handle=address, bucket_size_mb=1, use_shm=True, timeout_s=timeout_s, receiver=receiver
    )


def send(address, weights, **kwargs):
    asyncio.run(sender(address, **kwargs).async_send_weights(iter(weights)))


def receive(address, got):
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver

    receiver = BucketedWeightReceiver(zmq_handle=address, device=torch.device("cpu"), use_shm=True)
    receiver.receive_weights(lambda bucket, is_last: got.update({name: t.clone() for name, t in bucket}))


def test_weights_arrive(address):
    weights = {f"w{i}": torch.randn(100, 100 + i) for i in range(60)}  # 2.6 MiB: several buckets
    got = {}
    thread = threading.Thread(target=receive, args=(address, got), daemon=True)
    thread.start()
    send(address, weights.items())
    thread.join(10)
    assert not thread.is_alive()
    assert got.keys() == weights.keys() and all(torch.equal(got[name], weights[name]) for name in weights)


def test_no_receiver_ends_with_the_remedy(address):
    start = time.monotonic()
    with pytest.raises(weight_sync.WeightSyncError, match="within 1 s.*quads.sync_timeout_s"):
        send(address, [("w", torch.zeros(4))], timeout_s=1)
    assert time.monotonic() - start < 5
    assert not os.path.exists(address.removeprefix("ipc://"))


def test_failed_receiver_raises_its_own_error(address, monkeypatch):
    """Ray reports the receiving call as done and failed long before the timeout."""
    monkeypatch.setattr(weight_sync.ray, "wait", lambda refs, timeout: (refs, []))

    def get(ref):
        raise RuntimeError("NaN in model.layers.0.self_attn.q_proj")

    monkeypatch.setattr(weight_sync.ray, "get", get)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="q_proj"):
        send(address, [("w", torch.zeros(4))], timeout_s=30, receiver=object())
    assert time.monotonic() - start < 5


def test_receiver_that_ends_early_is_an_error(address, monkeypatch):
    monkeypatch.setattr(weight_sync.ray, "wait", lambda refs, timeout: (refs, []))
    monkeypatch.setattr(weight_sync.ray, "get", lambda ref: [{}])
    monkeypatch.setattr(weight_sync, "_LAST_ANSWER_MS", 100)
    with pytest.raises(weight_sync.WeightSyncError, match="before it had taken all weights"):
        send(address, [("w", torch.zeros(4))], timeout_s=30, receiver=object())


def test_receiver_that_answers_and_ends_between_two_looks_is_no_error(address, monkeypatch):
    """A small model is requantized faster than Ray says whether the call is over."""
    got = {}
    thread = threading.Thread(target=receive, args=(address, got), daemon=True)

    def wait(refs, timeout):
        if not thread.is_alive():
            thread.start()
        time.sleep(0.1)
        return (refs, [])

    monkeypatch.setattr(weight_sync.ray, "wait", wait)
    monkeypatch.setattr(weight_sync.ray, "get", lambda ref: [{}])
    weight = torch.arange(4.0)
    send(address, [("w", weight)], timeout_s=30, receiver=object())
    thread.join(10)
    assert torch.equal(got["w"], weight)


def test_two_runs_on_one_host_have_their_own_sockets(monkeypatch):
    monkeypatch.setenv(ENV, new_run_id())
    first = weight_socket(0, 0)
    monkeypatch.setenv(ENV, new_run_id())
    assert weight_socket(0, 0) != first
    assert len(first) < 100


def test_missing_run_id_is_an_error(monkeypatch):
    monkeypatch.delenv(ENV, raising=False)
    with pytest.raises(RuntimeError, match=ENV):
        weight_socket(0, 0)
