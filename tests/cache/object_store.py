"""An S3 server on loopback that tests kill and start again."""

import socket
import subprocess
import sys
import time
from pathlib import Path


class S3Server:
    """Serves a folder as bucket `caches`; what is written to the folder is seen after a restart."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self.folder = folder
        self._log = folder.with_name(f"{folder.name}-server.log")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        script = Path(__file__).with_name("s3_server.py")
        command = [sys.executable, script, str(self._port), self.folder]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self._port)) == 0:
                    return
            assert self._process.poll() is None
            time.sleep(0.1)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def requests(self) -> list[str]:
        """The lines of the running or last process's log."""
        return self._log.read_text().splitlines()

    def uri(self, cache: str) -> str:
        return f"s3://key:secret@caches/{cache}?endpoint_override=127.0.0.1:{self._port}&scheme=http"
