"""Ray's private folder of a run: gone after the run, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

DRIVER = """
    import os, sys, time
    import ray  # before the folder is made, as in verl's main_ppo
    from quads_recipe import ray_folder
    folder = ray_folder.make()
    ray.init(_temp_dir=folder, num_cpus=1, include_dashboard=False, log_to_driver=False)

    @ray.remote
    class Worker:
        def write(self):
            return os.listdir(folder)

    worker = Worker.remote()
    print("wrote", ray.get(worker.write.remote()), flush=True)
    if sys.argv[1] == "raise":
        raise ValueError("the run failed")
    if sys.argv[1] == "terminate":
        time.sleep(600)
"""


@pytest.mark.integration
@pytest.mark.parametrize("ending", ["return", "raise", "terminate"])
def test_the_folder_is_gone_after_the_run(short_dir, ending):
    driver = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(DRIVER), ending],
        env={**os.environ, "TMPDIR": str(short_dir)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert "session_latest" in driver.stdout.readline()
    assert [path.name[:6] for path in short_dir.iterdir()] == ["quads-"]
    if ending == "terminate":
        time.sleep(0.5)
        driver.send_signal(signal.SIGTERM)
    driver.communicate(timeout=120)
    assert (driver.returncode == 0) == (ending == "return")
    time.sleep(2.0)  # a worker that is late must not make it again
    assert [str(path) for path in short_dir.rglob("*")] == []
