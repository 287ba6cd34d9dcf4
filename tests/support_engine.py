"""The QUADS engine in spawned processes, for tests: process group, engine, batches, a loss.

Needs VERL_PLATFORM=cpu in the environment of the process that imports verl; `run_ranks` sees to it.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path

import torch


def run_ranks(job: str, ranks: int, folder: Path, *, timeout_s: float = 240, **env: str) -> list[dict]:
    """Run `job` ("module:function", found on tests/) in `ranks` gloo processes; returns what each rank returned.

    The function gets `folder` (a Path, shared by the ranks). Its result is anything torch.save takes.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    common = {
        **os.environ,
        "VERL_PLATFORM": "cpu",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **env,
    }
    folder.mkdir(parents=True, exist_ok=True)
    logs = [folder / f"rank{rank}.log" for rank in range(ranks)]
    processes = []
    for rank in range(ranks):
        with open(logs[rank], "w") as log:
            command = [sys.executable, __file__, job, str(folder)]
            env_rank = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(subprocess.Popen(command, env=env_rank, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = _wait(processes, timeout_s)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if codes != [0] * ranks:
        tails = [f"--- rank {rank}, exit {codes[rank]} ---\n{logs[rank].read_text()[-4000:]}" for rank in range(ranks)]
        raise AssertionError("\n".join(tails))
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(ranks)]


def _wait(processes: list[subprocess.Popen], timeout_s: float) -> list[int | None]:
    """Exit codes once all are done, one has failed (the others would wait for it), or time is up (None)."""
    deadline = time.monotonic() + timeout_s
    while True:
        codes = [process.poll() for process in processes]
        if None not in codes or any(codes) or time.monotonic() > deadline:
            return codes
        time.sleep(0.1)


def build_engine(
    model_path: Path | str,
    *,
    strategy: str = "fsdp2",
    quads: dict | None = None,
    param_dtype: str = "fp32",
    gradient_checkpointing: bool = False,
    lr: float = 1e-3,
    model: dict | None = None,
    save: tuple[str, ...] = ("model", "optimizer", "extra"),
    **engine,
):
    """An initialized QuadsFSDPEngine; `quads` None gives it verl's stock engine config."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.base import EngineRegistry

    import quads_recipe.engine  # noqa: F401  (registers)
    from quads_recipe.engine_config import QuadsFSDPEngineConfig

    settings = dict(
        strategy=strategy,
        mixed_precision={"param_dtype": param_dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        use_torch_compile=False,
        **engine,
    )
    config = FSDPEngineConfig(**settings) if quads is None else QuadsFSDPEngineConfig(**settings, quads=quads)
    built = EngineRegistry.new(
        model_type="language_model",
        backend=strategy,
        model_config=HFModelConfig(
            path=str(model_path),
            override_config={"attn_implementation": "sdpa"},
            use_remove_padding=False,
            enable_gradient_checkpointing=gradient_checkpointing,
            **(model or {}),
        ),
        engine_config=config,
        optimizer_config=FSDPOptimizerConfig(lr=lr, total_training_steps=10, lr_warmup_steps=0),
        checkpoint_config=CheckpointConfig(save_contents=list(save)),
    )
    built.initialize()
    return built


def batch(*, rows: int = 4, length: int = 10, seed: int = 0, micro: int = 2):
    """A batch as verl hands it to an engine: nested token ids, of this rank alone."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    generator = torch.Generator().manual_seed(seed)
    lengths = [length - i % 3 for i in range(rows)]
    ids = [torch.randint(6, 128, (n,), generator=generator) for n in lengths]
    data = TensorDict(
        {
            "input_ids": torch.nested.as_nested_tensor(ids, layout=torch.jagged),
            "position_ids": torch.nested.as_nested_tensor([torch.arange(n) for n in lengths], layout=torch.jagged),
            "loss_mask": torch.ones(rows, 1),
        },
        batch_size=[rows],
    )
    tu.assign_non_tensor(
        data,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=micro,
        use_remove_padding=False,
        temperature=1.0,
        calculate_entropy=False,
        use_fused_kernels=False,
    )
    return data


def nll_loss(model_output, data, dp_group=None):
    """Mean negative logprob; a stand-in for verl's policy loss."""
    return -model_output["log_probs"].values().mean(), {}


def logprobs(engine, data) -> torch.Tensor:
    """Logprobs of the batch's tokens, all rows concatenated, FP32."""
    with engine.eval_mode():
        output = engine.infer_batch(data, loss_function=None)
    return torch.cat([row.float() for row in output["model_output"]["log_probs"].unbind()])


def train_step(engine, data) -> float:
    """One optimizer step; returns the gradient norm."""
    with engine.train_mode():
        return engine.train_batch(data, loss_function=nll_loss)["metrics"]["grad_norm"]


def _main(job: str, folder: str) -> None:
    import importlib

    import torch.distributed as dist

    torch.set_num_threads(1)
    module, function = job.split(":")
    dist.init_process_group("cpu:gloo")
    result = getattr(importlib.import_module(module), function)(Path(folder))
    torch.save(result, Path(folder) / f"rank{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    try:
        _main(*sys.argv[1:])
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)  # without waiting for the other ranks
    os._exit(0)
