"""The hydra callback of every quads config: checks the whole configuration before Ray starts, then completes it.

Hydra turns exceptions of a callback into warnings, so a wrong setting ends the process here.
"""

from __future__ import annotations

import sys
import traceback
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig


class QuadsCallback(Callback):
    """`hydra.callbacks.quads._target_` of configs/quads_base.yaml."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Validate the `quads:` block and everything it touches, write the derived settings into `config`, print them.

        Exits with status 2 and one line that names the field, the value and the remedy if something is wrong.
        """
        try:
            self._prepare(config)
        except Exception as error:  # hydra would go on, and the run would start without QUADS
            traceback.print_exc()
            text = " ".join(str(error).split())
            print(f"quads: error: the configuration can't be read: {type(error).__name__}: {text}", file=sys.stderr)
            raise SystemExit(2) from None

    def _prepare(self, config: DictConfig) -> None:
        # Imported here, inside the guard: a package that can't be imported must end the run too.
        from quads_ops.compat import UnsupportedVersion
        from quads_ops.settings import SettingsError
        from quads_recipe.derive import prepare

        try:
            for line in prepare(config):
                print(f"quads: {line}", flush=True)
        except (SettingsError, UnsupportedVersion) as error:
            print(f"quads: error: {error}", file=sys.stderr, flush=True)
            raise SystemExit(2) from None

    on_multirun_start = on_run_start
