"""A real Slurm of two nodes on one Debian machine, for as long as a program needs it.

    python tests/slurm/slurm_lab.py        # brings it up, waits for Ctrl-C, takes it down

It needs root: Slurm's daemons are installed by apt where they are missing, and `/etc/slurm/slurm.conf` is linked to the
configuration (Snakemake clears ``SLURM_CONF`` on the way to a job's inner step). A machine that has a configuration of
its own there is refused. There is no accounting database: `squeue` is all that the workflow's profile asks for.
Each node pretends to have 8 CPUs and 2 GPUs, whatever the machine has.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

NODES = ("lab-a", "lab-b")
SYSTEM_CONF = Path("/etc/slurm/slurm.conf")
PACKAGES = {"munged": "munge", "slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client"}
PLUGINS = "slurm-wlm-basic-plugins"
SETTINGS = """\
ClusterName=hvpflow
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={socket}
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
SlurmdParameters=config_overrides
GresTypes=gpu
ReturnToService=2
MailProg=/bin/true
MinJobAge=300
KillWait=10
{nodes}
PartitionName=gpu Nodes=ALL Default=YES MaxTime=12:00:00 DefaultTime=00:10:00 DefMemPerCPU=100 State=UP
"""
NODE = (
    "NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs=8 Boards=1 SocketsPerBoard=1 "
    "CoresPerSocket=8 ThreadsPerCore=1 RealMemory=16000 Gres=gpu:2 State=UNKNOWN"
)


class LabError(Exception):
    """The lab cannot be brought up here; the text says why."""


class Lab:
    """The daemons, as children of this process: they end with it. Use it as a context manager."""

    def __init__(self) -> None:
        # munged and slurmd refuse a place that others cannot reach or can write to.
        self.directory = Path(tempfile.mkdtemp(prefix="hvpflow-slurm-"))
        self.directory.chmod(0o755)
        self.config = self.directory / "slurm.conf"
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._linked = False

    def __enter__(self) -> Lab:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if "slurmctld" in self._daemons:
            with suppress(OSError, subprocess.SubprocessError, LabError):
                self.slurm("scancel", "--user", pwd.getpwuid(os.getuid()).pw_name)
                self.wait_until_idle()
        for name, daemon in reversed(self._daemons.items()):
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                print(f"{name} had to be killed", file=sys.stderr)
                daemon.kill()
                daemon.wait()
        if self._linked:
            SYSTEM_CONF.unlink(missing_ok=True)
        shutil.rmtree(self.directory, ignore_errors=True)

    def slurm(self, *command: str) -> str:
        """Output of one of Slurm's commands."""
        environment = os.environ | {"SLURM_CONF": str(self.config)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=True)
        return done.stdout

    def jobs(self) -> dict[str, str]:
        """State of every job that is not over, by its number."""
        lines = self.slurm("squeue", "--noheader", "--format=%i %T").splitlines()
        return dict(line.split() for line in lines)

    def details(self, job: str) -> dict[str, str]:
        """What Slurm knows of a job, also for some minutes after its end."""
        return _fields(self.slurm("scontrol", "--oneliner", "show", "job", job))

    def finished(self) -> list[dict[str, str]]:
        """Details of the jobs that ended within the last minutes."""
        lines = self.slurm("scontrol", "--oneliner", "show", "jobs").splitlines()
        return [job for job in map(_fields, lines) if job.get("JobState") not in (None, "PENDING", "RUNNING")]

    def wait_until_idle(self) -> None:
        """Wait until no job is left: cancelled ones take some seconds."""
        _wait(lambda: not self.jobs(), "the last jobs to end", seconds=60)

    def _start(self) -> None:
        if os.getuid() != 0:
            raise LabError("the Slurm lab needs root")
        if SYSTEM_CONF.exists() or SYSTEM_CONF.is_symlink():
            raise LabError(f"{SYSTEM_CONF} exists: this machine has a Slurm of its own, or another lab is up")
        os.environ["PATH"] += os.pathsep + "/usr/sbin"
        _install()
        key = self.directory / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(512))
        munge_socket = self.directory / "munge.socket"
        self._run(
            *("munged", "--foreground", f"--key-file={key}", f"--socket={munge_socket}"),
            *(f"--pid-file={self.directory}/munged.pid", f"--log-file={self.directory}/munged.log"),
            f"--seed-file={self.directory}/munged.seed",
        )
        self._await("munged", munge_socket.exists)
        self._write_settings(munge_socket)
        SYSTEM_CONF.parent.mkdir(parents=True, exist_ok=True)
        SYSTEM_CONF.symlink_to(self.config)
        self._linked = True
        self._run("slurmctld", "-D", "-i", "-f", str(self.config))
        self._await("slurmctld", lambda: "UP" in self.slurm("scontrol", "ping"))
        for name in NODES:
            self._run("slurmd", "-D", "-N", name, "-f", str(self.config), name=f"slurmd-{name}")
        self._await("slurmctld", lambda: self.slurm("sinfo", "-h", "-N", "-o", "%t").split() == ["idle"] * len(NODES))

    def _write_settings(self, munge_socket: Path) -> None:
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (self.directory / name).mkdir(mode=0o755)
        # A GPU must have a device file. These are second doors to the null device.
        devices = [self.directory / f"gpu{number}" for number in range(2)]
        for device in devices:
            os.mknod(device, 0o020666, os.makedev(1, 3))
        nodes = "\n".join(NODE.format(name=name, port=_free_port()) for name in NODES)
        settings = SETTINGS.format(
            controller_port=_free_port(), socket=munge_socket, directory=self.directory, nodes=nodes
        )
        self.config.write_text(settings, encoding="utf-8")
        gpus = f"AutoDetect=off Name=gpu File={devices[0].parent}/gpu[0-1]"
        (self.directory / "gres.conf").write_text(
            "".join(f"NodeName={name} {gpus}\n" for name in NODES), encoding="utf-8"
        )
        (self.directory / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n", encoding="utf-8")

    def _run(self, *command: str, name: str | None = None) -> None:
        name = name or command[0]
        environment = os.environ | {"SLURM_CONF": str(self.config), "LC_ALL": "C"}
        with (self.directory / f"{name}.out").open("wb") as output:
            self._daemons[name] = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=_end_with_parent,
                start_new_session=True,
            )

    def _await(self, name: str, ready: Callable[[], bool]) -> None:
        def check() -> bool:
            if self._daemons[name].poll() is not None:
                said = (self.directory / f"{name}.out").read_text(encoding="utf-8", errors="replace")
                raise LabError(f"{name} ended with status {self._daemons[name].returncode}:\n{said[-2000:]}")
            try:
                return ready()
            except subprocess.SubprocessError:
                return False

        _wait(check, name, seconds=60)


def unavailable() -> str | None:
    """Why no lab can be brought up on this machine; None where it can."""
    if os.getuid() != 0:
        return "needs root"
    if not Path("/etc/debian_version").is_file():
        return "needs Debian"
    if SYSTEM_CONF.exists() or SYSTEM_CONF.is_symlink():
        return f"{SYSTEM_CONF} exists: this machine has a Slurm of its own, or another lab is up"
    return None


def _fields(line: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in line.split() if "=" in word)


def _install() -> None:
    missing = [package for command, package in PACKAGES.items() if shutil.which(command) is None]
    if not list(Path("/usr/lib").glob("*/slurm-wlm/select_cons_tres.so")):
        missing.append(PLUGINS)
    if not missing:
        return
    # Debian starts a package's services at once, unless this file forbids it.
    policy = Path("/usr/sbin/policy-rc.d")
    ours = not policy.exists()
    if ours:
        policy.write_text("#!/bin/sh\nexit 101\n", encoding="utf-8")
        policy.chmod(0o755)
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    try:
        for command in (["update"], ["install", "--yes", "--no-install-recommends", *missing]):
            done = subprocess.run(["apt-get", "-q", *command], env=environment, capture_output=True, text=True)
            if done.returncode:
                raise LabError(f"apt-get {' '.join(command)} failed:\n{done.stderr[-2000:]}")
    finally:
        if ours:
            policy.unlink()


def _end_with_parent() -> None:
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait(ready: Callable[[], bool], what: str, *, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            raise LabError(f"waited {seconds:.0f} s in vain for {what}")
        time.sleep(0.2)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt), Lab() as lab:
        print(f"Slurm is up; use it with SLURM_CONF={lab.config}", flush=True)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        signal.pause()
