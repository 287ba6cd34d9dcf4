"""The trainer `quads_sync`: verl's synchronous PPO trainer with QUADS' worker, rollout server and metrics."""

from __future__ import annotations

from pathlib import Path

import ray
import transfer_queue as tq
from omegaconf import OmegaConf, open_dict
from transfer_queue import KVBatchMeta
from transformers import AutoConfig
from verl.protocol import DataProto
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.debug import marked_timer
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout.replica import RolloutReplicaRegistry

from quads_ops.settings import QuadsSettings
from quads_recipe import mask_warmup, probe, sensitivity, tensorboard_layout, training_prompts
from quads_recipe import metrics as quads_metrics
from quads_recipe.alarms import Alarms
from quads_recipe.rollout_health import RolloutDeadError, require_alive

NAME = "quads_sync"


# Both need vLLM, and this module is imported wherever verl's trainers are, with or without a use for QUADS.
def _load_worker():
    from quads_recipe.worker import QuadsWorker

    return QuadsWorker


def _load_replica():
    from quads_recipe.server import QuadsReplica

    return QuadsReplica


def _sync_line(step: int, metrics: dict[str, float]) -> str:
    matrices = int(metrics["quads/receipts_matrices_min"])
    seconds = f"in {metrics['quads/sync_seconds_max']:.2f} s"
    if not matrices:
        return f"weights of step {step} synced {seconds}, no NVFP4 matrices"
    checksum = int(metrics["quads/receipt_checksum_max"])
    return f"weights of step {step} synced {seconds}, {matrices} NVFP4 matrices equal, checksum {checksum:06x}"


@register_trainer(NAME)
class QuadsTrainer(PPOTrainerSync):
    """PPOTrainerSync (verl/trainer/ppo/v1/trainer_sync.py) plus receipts and log-space mismatch metrics."""

    def __init__(self, config):
        with open_dict(config):
            config.trainer.v1.trainer_mode = "sync"  # what the base class and its replay buffer know this mode as
        self.settings = QuadsSettings.from_dict(OmegaConf.to_container(config.quads, resolve=True))
        self.alarms = Alarms(self.settings)
        self._measured_gradients = False
        RolloutReplicaRegistry.register("vllm", _load_replica)
        super().__init__(config)

    def _init_dataloader(self):
        super()._init_dataloader()  # before any worker starts, so this is the time to look at the prompts
        data, model = self.config.data, self.config.actor_rollout_ref.model
        training_prompts.check_count(len(self.train_dataset), data.train_batch_size, not data.filter_overlong_prompts)
        hf_config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
        vocabulary = hf_config.get_text_config().vocab_size
        count = max(training_prompts.LOOKED_AT, self.settings.rollout.warmup)
        options = OmegaConf.to_container(OmegaConf.create(data.get("apply_chat_template_kwargs") or {}), resolve=True)
        prompts = training_prompts.tokenized(self.train_dataset, count, self.tokenizer, options)
        training_prompts.check(prompts, data.max_prompt_length, data.truncation, vocabulary)
        self._prompts = [prompt for prompt in prompts if len(prompt) <= data.max_prompt_length]

    def _init_resource_pool_mgr(self):
        super()._init_resource_pool_mgr()
        stock = ray.remote(ActorRolloutRefWorker).__ray_metadata__.class_name
        for role, worker in self.role_worker_mapping.items():
            if worker.__ray_metadata__.class_name == stock:
                self.role_worker_mapping[role] = ray.remote(_load_worker())

    def _load_checkpoint(self):
        super()._load_checkpoint()
        if self.global_steps and self.settings.alarms.enabled:
            trainer = self.config.trainer
            folder = Path(trainer.default_local_dir, f"global_step_{self.global_steps}")
            if trainer.resume_mode == "resume_path":
                folder = Path(trainer.resume_from_path)
            if not self.alarms.load(folder):
                print(f"quads: {folder} has no state of the alarms; the baseline of |d| starts anew", flush=True)

    def _save_checkpoint(self):
        # Before verl's own, which ends by naming the checkpoint the latest.
        self.alarms.save(Path(self.config.trainer.default_local_dir, f"global_step_{self.global_steps}"))
        super()._save_checkpoint()

    def on_init_end(self):
        self._sync_weights()
        if mask_warmup.wanted(self.settings):
            self._choose_first_masks()

    def _choose_first_masks(self) -> None:
        prompts = training_prompts.spread(self._prompts, self.settings.rollout.warmup)
        try:
            mask_warmup.warm_up(self._servers(), prompts, self.config.data.max_response_length)
        except Exception:
            self._require_rollout()
            raise
        print(f"quads: residual masks chosen from {len(prompts)} training prompts before the first step", flush=True)

    def on_train_begin(self):
        super().on_train_begin()
        if writer := self._tensorboard():
            writer.add_custom_scalars(tensorboard_layout.layout())
        if self.settings.probe.layers and not probe.measures_layers(self.settings):
            print("quads: probe.layers: the rollout quantizes nothing, so no layer is measured", flush=True)

    def fit(self, agent_loop_manager):
        try:
            super().fit(agent_loop_manager)
        except RolloutDeadError:
            raise
        except Exception:
            self._require_rollout()  # a rollout that died fails in many places; then its death is the cause
            raise

    def on_sample_end(self):
        self._require_rollout()  # verl goes on with the responses that were finished before an engine died
        super().on_sample_end()

    def on_validate_end(self):
        self._require_rollout()
        super().on_validate_end()

    def _require_rollout(self) -> None:
        require_alive(self._servers())

    def _servers(self) -> list:
        return [replica.server_handle for replica in self.llm_server_manager.get_replicas()]

    def on_step_end(self):
        with marked_timer("update_weights", self.timing_raw, color="red"):
            self._pending_sync_metrics = self._sync_weights()

    def _sync_weights(self) -> dict[str, float]:
        """verl's CheckpointEngineManager.update_weights for colocated replicas, with the workers' results kept."""
        pending = list(self.actor_rollout_wg.update_weights(global_steps=self.global_steps, mode="naive"))
        results = []
        while pending:  # the first failure ends the run; ranks that wait for it in a collective never return
            done, pending = ray.wait(pending)
            results += ray.get(done)
        metrics = quads_metrics.merge_ranks(results)
        print(f"quads: {_sync_line(self.global_steps, metrics)}", flush=True)
        return metrics

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        batch = super()._compute_old_log_prob(batch, metrics)
        fields = ["rollout_log_probs", "old_log_probs", "response_mask"]
        rows = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding", False)]
        data = tq.kv_batch_get(keys=rows, partition_id=batch.partition_id, select_fields=fields)
        data = DataProto(batch=data.to_padded_tensor()).batch
        metrics.update(
            quads_metrics.logprob_difference(
                rollout=data["rollout_log_probs"], actor=data["old_log_probs"], mask=data["response_mask"]
            )
        )
        metrics["quads/sequences_lost_sum"] = float(self._lost(len(rows)))
        every = self.settings.probe.every
        if every and self.global_steps % every == 0:
            with marked_timer("probe", self.timing_raw, color="olive"):
                metrics.update(self._probe(batch))
        if sensitivity.due(self.settings, self.global_steps, first=not self._measured_gradients):
            with marked_timer("sensitivity", self.timing_raw, color="olive"):
                metrics.update(self._measure_gradients(batch))
        return batch

    def _measure_gradients(self, batch: KVBatchMeta) -> dict[str, float]:
        part = self._part_of(batch, self.settings.sensitivity.sequences)
        if part is None:
            return {}
        self._measured_gradients = True
        return quads_metrics.merge_ranks(sensitivity.run(self.actor_rollout_wg, part))

    def _part_of(self, batch: KVBatchMeta, sequences: int) -> KVBatchMeta | None:
        dp_size = max(self.actor_rollout_wg._query_dispatch_info("actor")) + 1
        return probe.part_of(batch, sequences, dp_size, self.config.actor_rollout_ref.rollout)

    def _lost(self, rows: int) -> int:
        """Responses that were asked for and are not among the `rows` that came. verl drops groups that failed."""
        if self.config.algorithm.get("filter_groups", {}).get("enable"):
            return 0  # dropping groups is asked for
        return max(0, self.config.data.train_batch_size * self.config.actor_rollout_ref.rollout.n - rows)

    def _probe(self, batch: KVBatchMeta) -> dict[str, float]:
        part = self._part_of(batch, self.settings.probe.sequences)
        if part is None:
            return {}
        metrics = probe.run(self.actor_rollout_wg, part, self.settings)
        if probe.measures_layers(self.settings):
            writer = self._tensorboard()
            folder = Path(writer.log_dir if writer else self.config.trainer.default_local_dir)
            metrics |= probe.run_layers(self.actor_rollout_wg, part, self.settings, self.global_steps, folder)
        return metrics

    def _tensorboard(self):
        """The SummaryWriter of verl's tensorboard logger, None without that logger."""
        adapter = self.logger.logger.get("tensorboard")
        return adapter.writer if adapter else None

    def _compute_metrics(self, batch: KVBatchMeta, metrics, timing_raw, global_steps, epoch):
        super()._compute_metrics(batch, metrics, timing_raw, global_steps, epoch)
        if not self.settings.alarms.enabled:
            return
        for line in self.alarms.step(global_steps, metrics):
            print(f"quads: {line}", flush=True)
        metrics["quads/alarms_sum"] = float(self.alarms.active)
