"""verl imports this module in every process that imports verl (entry point `verl.plugins`).

It stays light, and a run that does not ask for QUADS is not changed by it:
- with VERL_PLATFORM=cpu it makes verl run on a machine without accelerators (`quads_recipe.cpu`);
- once verl's trainers are imported, it registers the trainer `quads_sync` beside them.
"""

import os
import traceback

import wrapt

try:
    if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
        from quads_recipe import cpu

        cpu.activate()
except Exception:
    traceback.print_exc()  # verl reports a failing plugin at DEBUG level only
    raise


@wrapt.when_imported("verl.trainer.ppo.v1.trainer_sync")
def _register_trainer(_module):
    import quads_recipe.trainer  # noqa: F401  (its decorator registers the trainer)
