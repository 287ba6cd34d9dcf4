"""Runs the trainer as a subprocess, and ends everything that it started."""

import os
import re
import signal
import subprocess
from pathlib import Path

import psutil

# Ray prefixes the lines of its workers with "(Name pid=123)" in colour, or "(Name pid=123, ip=...)".
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_RAY_PREFIX = re.compile(r"^\([^()]*\bpid=\d+[^()]*\)\s?")
_ERROR = re.compile(r"^(\w+\.)*\w*(Error|Exception|Mismatch|Timeout|Unsupported\w*)\b.*:|^quads: error: |\berror: ")

# Hydra repeats all overrides before the traceback.
_HYDRA = "Error executing job with overrides"


class TrainerProcess:
    """A command in its own session, its output in a log file. Use as a context manager: leaving it ends the session."""

    def __init__(self, command: list[str], environment: dict[str, str], log: Path):
        self.command, self.log = command, log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> "TrainerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def poll(self) -> int | None:
        """Exit status, or None while it runs."""
        return self.process.poll()

    def members(self) -> list[psutil.Process]:
        """The processes of the session, and their descendants that opened a session of their own."""
        found: dict[int, psutil.Process] = {}
        for process in psutil.process_iter():
            try:
                if os.getsid(process.pid) == self.process.pid:
                    found[process.pid] = process
                    found |= {child.pid: child for child in process.children(recursive=True)}
            except (psutil.Error, ProcessLookupError, PermissionError):
                continue
        return [process for process in found.values() if process.is_running()]

    def end(self, patience: float = 15.0) -> None:
        """Asks the command to end, then its whole session, then kills what is left. Returns when nothing is left."""
        members = self.members()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)  # the driver then shuts Ray down itself
            try:
                self.process.wait(patience)
            except subprocess.TimeoutExpired:
                pass
        members = {p.pid: p for p in members + self.members()}.values()
        for stop, seconds in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
            members = [p for p in members if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
            _signal_all(members, stop)
            _, members = psutil.wait_procs(members, timeout=seconds)
        self.process.wait()


def _signal_all(processes: list[psutil.Process], stop: signal.Signals) -> None:
    for process in processes:
        try:
            process.send_signal(stop)
        except psutil.Error:
            continue


class LogTail:
    """Reads what was added to a text file since the last call, in whole lines without colours and Ray's prefixes."""

    def __init__(self, path: Path):
        self._path, self._offset, self._rest = path, 0, b""

    def lines(self) -> list[str]:
        """New complete lines; none while the file does not exist."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        self._offset += len(data)
        *complete, self._rest = (self._rest + data).split(b"\n")
        return [clean(line.decode(errors="replace")) for line in complete]


def clean(line: str) -> str:
    """A line of the log without colours, carriage returns and Ray's "(Name pid=123)"."""
    return _RAY_PREFIX.sub("", _ANSI.sub("", line.rstrip("\r\n").rpartition("\r")[2]))


def error_lines(log: Path, limit: int = 6) -> list[str]:
    """The last lines of the log that state an error, cut to 400 characters; where none does, simply the last lines."""
    lines = [clean(line).strip() for line in log.read_text(errors="replace").split("\n")]
    lines = [line[:400] for line in lines if line and not line.startswith(_HYDRA)]
    errors = list(dict.fromkeys(line for line in lines if _ERROR.search(line)))
    return errors[-limit:] or lines[-limit:]
