import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from target.small_cache import ENVIRONMENT, NUM_SAMPLES, checksums

from dflash_cache.config.loading import dump_config
from dflash_cache.config.settings import Config
from dflash_cache.target.generate import generate
from dflash_cache.target.interrupts import heed_interrupts, hold_interrupts
from dflash_cache.target.observer import Observer


def children_of(process: int) -> list[int]:
    """Spawned workers of a process: not the helper that multiprocessing starts beside them."""
    found = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [int(pid) for pid in found if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_a_held_interrupt_comes_after_the_block() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    reached = False
    try:
        with pytest.raises(KeyboardInterrupt), hold_interrupts():
            signal.raise_signal(signal.SIGINT)
            reached = True
        assert reached
        heed_interrupts()
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("wait_seconds", [0.0, 1.0])
def test_ctrl_c_while_workers_start_shows_no_traceback_and_loses_nothing(
    configure: Callable[..., Config], tmp_path: Path, wait_seconds: float
) -> None:
    config = configure(devices="cpu:2")
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(config))
    # As a terminal's shell starts it, with Ctrl-C not ignored; which goes to it and to all that it started.
    code = (
        "import signal, sys; from dflash_cli.__main__ import main; "
        "signal.signal(signal.SIGINT, signal.default_int_handler); main()"
    )
    command = [sys.executable, "-c", code, "generate", str(path)]
    running = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT, start_new_session=True
    )
    while running.poll() is None and not children_of(running.pid):
        time.sleep(0.01)
    time.sleep(wait_seconds)
    os.killpg(running.pid, signal.SIGINT)
    shown, _ = running.communicate()
    assert running.returncode == 130, shown
    assert "Stopped; what was committed is kept" in shown
    assert "Traceback" not in shown
    generate(config, Observer())
    assert sorted(checksums(config.cache_dir)) == list(range(NUM_SAMPLES))
