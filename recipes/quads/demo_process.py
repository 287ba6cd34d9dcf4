"""Runs the trainer as a subprocess, and ends everything that it started."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from quads_recipe.ending_signals import undisturbed

# Ray prefixes the lines of its workers with "(Name pid=123)" in colour, or "(Name pid=123, ip=...)".
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_RAY_PREFIX = re.compile(r"^\([^()]*\bpid=\d+[^()]*\)\s?")
_ERROR = re.compile(
    r"^(\w+\.)*\w*(Error|Exception|Mismatch|Timeout|Unsupported\w*)\b(.*:|\()|^quads: error: |\berror: "
)
# Where in the configuration; below an error of hydra or OmegaConf.
_PLACE = re.compile(r"^full_key: \S")

# Ray's errors of a process that is gone say in the lines after them which one, and what may have ended it.
_DEATH = re.compile(r"^(ray\.)?(exceptions\.)?(ActorDied|WorkerCrashed|NodeDied)Error\b.*:")
_DEATH_MORE = re.compile(r"^(class_name|pid|name): |^The actor (is dead|died|never ran)\b|Worker exit (type|detail): ")
_DEATH_REACH = 20  # lines; those of other processes may be in between

# Hydra repeats all overrides before the traceback.
_HYDRA = "Error executing job with overrides"


class TrainerProcess:
    """A command in its own session, its output in a log file. Use as a context manager: leaving it ends the session.

    If this process dies without leaving it, as after `kill -9`, a guard (quads_recipe.demo_guard) ends the session.

    scratch: a folder of temporary files that the guard removes then.
    """

    def __init__(self, command: list[str], environment: dict[str, str], log: Path, scratch: Path | None = None):
        self.command, self.log = command, log
        guard = [sys.executable, "-m", "quads_recipe.demo_guard", *([str(scratch)] if scratch else [])]
        with log.open("wb") as output:
            shared = {"stdout": output, "stderr": subprocess.STDOUT, "start_new_session": True}
            # First, so that it is there for the whole life of the trainer. It waits at the end of a pipe.
            self._guard = subprocess.Popen(guard, stdin=subprocess.PIPE, **shared)
            try:
                self.process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, **shared)
            except BaseException:
                self._dismiss_guard()
                raise
        try:
            self._guard.stdin.write(f"{self.process.pid}\n".encode())
            self._guard.stdin.flush()
        except BrokenPipeError:  # it was ended; the trainer is no worse off
            pass

    def __enter__(self) -> "TrainerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def poll(self) -> int | None:
        """Exit status, or None while it runs."""
        return self.process.poll()

    def members(self) -> list[psutil.Process]:
        """The processes of the session, and their descendants that opened a session of their own."""
        return session(self.process.pid)

    def end(self, patience: float = 15.0) -> None:
        """Asks the command to end, then its whole session, then kills what is left. Returns when nothing is left.

        Takes `patience` + 10 seconds at most. SIGINT, SIGTERM and SIGHUP are ignored meanwhile: a second Ctrl-C would
        leave the trainer running.
        """
        with undisturbed():
            members = self.members()
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGINT)  # the driver then shuts Ray down itself
                try:
                    self.process.wait(patience)
                except subprocess.TimeoutExpired:
                    pass
            stop(members + self.members())
            self.process.wait()
            self._dismiss_guard()

    def _dismiss_guard(self) -> None:
        self._guard.kill()  # before its pipe closes, which would make it act
        self._guard.wait()
        try:
            self._guard.stdin.close()
        except BrokenPipeError:
            pass


def session(leader: int) -> list[psutil.Process]:
    """The processes of the session that `leader` opened, and their descendants that opened a session of their own."""
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == leader:
                found[process.pid] = process
                found |= {child.pid: child for child in process.children(recursive=True)}
        except (psutil.Error, ProcessLookupError, PermissionError):
            continue
    return [process for process in found.values() if process.is_running()]


def stop(processes: list[psutil.Process], patience: float = 5.0) -> None:
    """Asks them to end, and kills what is left after `patience` seconds; for that they have 5 seconds."""
    left = list({process.pid: process for process in processes}.values())
    for asked, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, 5.0)):
        left = [p for p in left if alive(p)]
        _signal_all(left, asked)
        _, left = psutil.wait_procs(left, timeout=seconds)


def alive(process: psutil.Process) -> bool:
    """False for one that has ended, though its parent may not have noticed yet."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _signal_all(processes: list[psutil.Process], asked: signal.Signals) -> None:
    for process in processes:
        try:
            process.send_signal(asked)
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
    """The last lines of the log that state an error, cut to 600 characters; where none does, simply the last lines.

    Where a process of Ray died, the last such error is among them, with what Ray says about that process.
    """
    lines = [clean(line).strip() for line in log.read_text(errors="replace").split("\n")]
    lines = [line[:600] for line in lines if line and not line.startswith(_HYDRA)]
    # A line that occurs again counts where it occurs last: earlier ones were often handled.
    where = {line: i for i, line in enumerate(lines) if _ERROR.search(line) or _PLACE.search(line)}
    errors = sorted({i for at in where.values() for i in _with_rest(lines, at)})
    death = _death(lines)
    others = [i for i in errors if i not in death]
    room = max(0, limit - len(death))
    kept = sorted(death + others[len(others) - room :] if room < len(others) else death + others)
    return [lines[i] for i in kept[-limit:]] or lines[-limit:]


def _with_rest(lines: list[str], start: int) -> list[int]:
    """Indices of an error's line and of those that finish it: one that ends with a colon says the cause in the next."""
    end = start
    while lines[end].endswith(":") and end + 1 < len(lines):
        end += 1
    return list(range(start, end + 1))


def _death(lines: list[str]) -> list[int]:
    """Indices of the last error about a process that is gone and of its further lines; empty if there is none."""
    start = max((i for i, line in enumerate(lines) if _DEATH.search(line)), default=None)
    if start is None:
        return []
    end = min(len(lines), start + _DEATH_REACH)
    found, seen = [start], set()
    for i in range(start + 1, end):
        if _DEATH_MORE.search(lines[i]) and (kind := lines[i].split(" ")[0]) not in seen:
            seen.add(kind)
            found.append(i)
    return found
