"""verl with its stock config is the same with this package's plugin loaded as without it.

A step of the stock config can't be compared on a CPU: verl has no CPU platform without the plugin.
"""

import json
import os
import subprocess
import sys

LOOK = """
import importlib.metadata, json, re, sys
import verl
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

import verl.trainer.main_ppo as main_ppo
import verl.utils.distributed as distributed
import verl.workers.engine_workers as engine_workers
from verl.plugin.platform import PlatformRegistry, get_platform
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY
from verl.workers.engine.base import EngineRegistry
from verl.workers.rollout.base import _ROLLOUT_REGISTRY
from verl.workers.rollout.replica import RolloutReplicaRegistry


def plain(value):
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in sorted(value.items(), key=lambda item: str(item[0]))}
    module, name = getattr(value, "__module__", ""), getattr(value, "__qualname__", None)
    return f"{module}.{name}" if name else re.sub(r" at 0x\\w+", "", str(value))


with initialize_config_module("verl.trainer.config", version_base=None):
    config = compose("ppo_trainer", ["actor_rollout_ref.rollout.name=vllm"], return_hydra_config=True)
print(json.dumps({
    "trainers": plain(TRAINER_REGISTRY),
    "look": {
        "config": OmegaConf.to_yaml({key: value for key, value in config.items() if key != "hydra"}, resolve=True),
        "callbacks": plain(dict(config.hydra.callbacks)),
        "trainer": plain(get_trainer_cls(config.trainer.v1.trainer_mode)),
        "task runner": plain(main_ppo.TaskRunnerV1.__ray_metadata__.modified_class),
        "worker": plain(engine_workers.ActorRolloutRefWorker),
        "engines": plain(EngineRegistry._engines),
        "rollouts": plain(_ROLLOUT_REGISTRY),
        "replicas": plain(RolloutReplicaRegistry._registry),
        "platforms": plain(PlatformRegistry.registered_names()),
        "platform": type(get_platform()).__name__,
        "process group": plain(distributed.initialize_global_process_group_ray),
        "version": plain(importlib.metadata.version),
    },
    "ours": sorted(name for name in sys.modules if name.split(".")[0].startswith("quads")),
}))
"""


def test_stock_config_and_registries_do_not_change():
    """Configuration as main_ppo resolves it, trainer, workers, engines, rollouts, platform; nothing is patched."""
    environment = {key: value for key, value in os.environ.items() if key != "VERL_PLATFORM"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", LOOK],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**environment, "VERL_USE_EXTERNAL_PLUGINS": policy},
        )
        for policy in ("auto", "none")
    ]
    outputs = [process.communicate(timeout=200) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    loaded, stock = (json.loads(output.splitlines()[-1]) for output, _ in outputs)
    assert "quads_recipe.verl_plugin" in loaded["ours"] and stock["ours"] == []
    for name, found in stock["look"].items():
        assert loaded["look"][name] == found, name
    assert loaded["trainers"].pop("quads_sync") == "quads_recipe.trainer.QuadsTrainer"
    assert loaded["trainers"] == stock["trainers"]
