"""The layout of tensorboard's custom scalars, read by tensorboard itself."""

from __future__ import annotations

import json
import re

import pytest

from quads_recipe import tensorboard_layout
from quads_recipe.paths import configs_dir

METRICS = (configs_dir().parent / "docs" / "metrics.md").read_text()


class Reader:
    """What tensorboard's backend makes of a folder: its event multiplexer and the custom scalars plugin."""

    def __init__(self, folder):
        from tensorboard.backend.event_processing import data_provider, plugin_event_multiplexer
        from tensorboard.context import RequestContext
        from tensorboard.plugins import base_plugin
        from tensorboard.plugins.custom_scalar import custom_scalars_plugin
        from tensorboard.plugins.scalar import scalars_plugin

        multiplexer = plugin_event_multiplexer.EventMultiplexer()
        multiplexer.AddRunsFromDirectory(str(folder))
        multiplexer.Reload()
        self.runs, self._context = multiplexer.Runs(), RequestContext()
        plugins = {}
        provider = data_provider.MultiplexerDataProvider(multiplexer, str(folder))
        context = base_plugin.TBContext(
            logdir=str(folder), multiplexer=multiplexer, data_provider=provider, plugin_name_to_instance=plugins
        )
        plugins["scalars"] = scalars_plugin.ScalarsPlugin(context)
        self._plugin = custom_scalars_plugin.CustomScalarsPlugin(context)

    def charts(self) -> dict[str, dict[str, list[str]]]:
        """Category -> chart -> patterns, as the page gets them."""
        found = self._plugin.layout_impl(self._context, "")
        found = json.loads(found) if isinstance(found, str) else found  # {} where there is none
        return {
            category["title"]: {chart["title"]: chart["multiline"]["tag"] for chart in category["chart"]}
            for category in found.get("category", [])
        }

    def lines(self, run: str, pattern: str) -> dict[str, list[float]]:
        """Tag -> values: what a pattern draws of a run."""
        answer = self._plugin.scalars_impl(self._context, run, pattern, "")
        assert answer["regex_valid"]
        return {tag: [value for _, _, value in events] for tag, events in answer["tag_to_events"].items()}


@pytest.fixture
def log(monkeypatch):
    """Writes a run as verl's tensorboard logger and the trainer's hook do."""

    def write(folder, values: dict[str, list[float]], *, layout: bool = True):
        from verl.utils.tracking import Tracking

        from quads_ops.settings import QuadsSettings
        from quads_recipe.trainer import QuadsTrainer

        monkeypatch.setenv("TENSORBOARD_DIR", str(folder))
        trainer = QuadsTrainer.__new__(QuadsTrainer)
        trainer.logger, trainer.settings = Tracking("p", "e", ["tensorboard"]), QuadsSettings()
        if layout:
            trainer.on_train_begin()
        for step in range(len(next(iter(values.values())))):
            trainer.logger.log({name: of[step] for name, of in values.items()}, step + 1)
        trainer.logger.finish()

    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    return write


RUN = {
    "critic/score/mean": [0.5, 0.6],
    "critic/score/mean_of_something_else": [9.0, 9.0],
    "quads/logprob_abs_diff_mean": [0.01, 0.02],
    "quads/logprob_abs_diff_p99": [0.2, 0.3],
    "quads/logprob_abs_diff_max": [1.0, 2.0],
    "quads/alarms_sum": [0.0, 1.0],
    "quads/layers_experts_down_act_error_mean": [0.02, 0.02],
    "quads/layers_attention_qkv_act_error_mean": [0.01, 0.01],
    "quads/layers_attention_qkv_weight_error_mean": [0.08, 0.08],
}


def test_tensorboard_draws_what_belongs_together_in_one_chart(tmp_path, log):
    log(tmp_path / "run", RUN)
    reader = Reader(tmp_path)
    charts = reader.charts()
    assert list(charts) == [tensorboard_layout.ARMS, tensorboard_layout.RUN]
    chart = charts[tensorboard_layout.RUN]
    drawn = {title: {} for title in chart}
    for title, patterns in chart.items():
        for pattern in patterns:
            drawn[title] |= reader.lines("run", pattern)
    assert set(drawn["|d|, nats"]) == {f"quads/logprob_abs_diff_{name}" for name in ("mean", "p99", "max")}
    assert drawn["|d|, nats"]["quads/logprob_abs_diff_p99"] == pytest.approx([0.2, 0.3])
    assert drawn["alarms"] == {"quads/alarms_sum": [0.0, 1.0]}
    assert drawn["reward"] == {"critic/score/mean": pytest.approx([0.5, 0.6])}
    kinds = {f"quads/layers_{kind}_act_error_mean" for kind in ("experts_down", "attention_qkv")}
    assert set(drawn["layers: error of activations, by kind"]) == kinds


def test_arms_appear_side_by_side_once_however_many_runs_there_are(tmp_path, log):
    for arm, reward in (("bf16", 0.6), ("naive", 0.4), ("quads", 0.59)):
        log(tmp_path / f"{arm}-seed0" / "tensorboard", RUN | {"critic/score/mean": [0.5, reward]})
    reader = Reader(tmp_path)
    charts = reader.charts()
    assert {title: list(of) for title, of in charts.items()} == {
        title: list(of) for title, of in tensorboard_layout.layout().items()
    }
    [pattern] = charts[tensorboard_layout.ARMS]["reward"]
    runs = {run: reader.lines(run, pattern)["critic/score/mean"][-1] for run in reader.runs}
    assert runs == pytest.approx(
        {f"{a}-seed0/tensorboard": r for a, r in (("bf16", 0.6), ("naive", 0.4), ("quads", 0.59))}
    )
    assert all(len(patterns) == 1 for patterns in charts[tensorboard_layout.ARMS].values())


def test_a_folder_of_runs_without_a_layout_gets_one(tmp_path, log):
    log(tmp_path / "old" / "tensorboard", RUN, layout=False)
    assert Reader(tmp_path).charts() == {}
    file = tensorboard_layout.write_folder(tmp_path)
    assert file.parent == tmp_path and tensorboard_layout.write_folder(tmp_path) == file
    reader = Reader(tmp_path)
    [pattern] = reader.charts()[tensorboard_layout.ARMS]["mean |d|, nats"]
    assert reader.lines("old/tensorboard", pattern) == {"quads/logprob_abs_diff_mean": pytest.approx([0.01, 0.02])}
    assert len(list(tmp_path.glob("events*"))) == 1


def test_without_the_tensorboard_logger_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    monkeypatch.chdir(tmp_path)
    from verl.utils.tracking import Tracking

    from quads_ops.settings import QuadsSettings
    from quads_recipe.trainer import QuadsTrainer

    trainer = QuadsTrainer.__new__(QuadsTrainer)
    trainer.logger, trainer.settings = Tracking("p", "e", ["console"]), QuadsSettings()
    trainer.on_train_begin()
    assert not list(tmp_path.iterdir())


def test_every_tag_of_quads_is_documented():
    """docs/metrics.md writes families as `quads/probe_weight_*` and `quads/layers_KIND_act_error_mean`."""
    documented = [re.escape(name) for name in re.findall(r"`(quads/\w+\*?)`", METRICS)]
    documented = [name.replace(r"\*", r"\w+").replace("KIND", r"\w+") for name in documented]
    for category in tensorboard_layout.layout().values():
        for _, patterns in category.values():
            for tag in patterns:
                tag = tag.removesuffix("$").replace(r"\w+", "kind")
                if tag.startswith("quads/"):
                    assert any(re.fullmatch(name, tag) for name in documented), f"{tag} is not in docs/metrics.md"
