"""A SLURM of this machine alone, of Debian's packages: munged, slurmctld and slurmd with files of their own."""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.peers import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={daemon}
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket
CredType=cred/munge
SlurmUser=root
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerType=sched/builtin
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
KillWait=30
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Says why there can be no SLURM here; None if there can."""
    absent = [program for program in PROGRAMS if shutil.which(program, path=_path()) is None]
    if absent:
        return f"there is no {', '.join(absent)}: apt-get install slurmctld slurmd slurm-client munge"
    return None if os.geteuid() == 0 else "SLURM starts as root alone"


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin"


@contextlib.contextmanager
def running(root: Path) -> Iterator[Mapping[str, str]]:
    """Runs SLURM inside the block; yields the environment of its commands."""
    host = socket.gethostname()
    for name in ("state", "spool"):
        (root / name).mkdir()
    (root / "munge.key").write_bytes(os.urandom(1024))
    (root / "munge.key").chmod(0o400)
    cpus = max(2, os.cpu_count() or 1)
    ports = {"controller": free_port(), "daemon": free_port()}
    (root / "slurm.conf").write_text(CONFIG.format(host=host, root=root, cpus=os.cpu_count() or cpus, **ports))
    env = {**os.environ, "PATH": _path(), "SLURM_CONF": str(root / "slurm.conf")}
    munge = ["--foreground", "--force", "--num-threads=2", f"--socket={root}/munge.socket"]
    munge += [f"--key-file={root}/munge.key", f"--pid-file={root}/munge.pid", f"--log-file={root}/munge.log"]
    munge += [f"--seed-file={root}/munge.seed"]
    commands = (["munged", *munge], ["slurmctld", "-D", "-c"], ["slurmd", "-D", "-N", host])
    with contextlib.ExitStack() as stack:
        for command in commands:
            with (root / f"{command[0]}.out").open("wb") as out:
                process = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT)
            stack.callback(process.wait)
            stack.callback(process.terminate)
            time.sleep(1)
        deadline = time.monotonic() + 60
        while "idle" not in call(env, "sinfo", "--noheader", "--format=%T"):
            if time.monotonic() > deadline:
                raise TimeoutError("\n".join(path.read_text(errors="replace") for path in root.glob("*.[lo][ou][gt]")))
            time.sleep(0.5)
        yield env


def call(env: Mapping[str, str], *command: str, check: bool = False) -> str:
    """Returns the output of a command of SLURM."""
    done = subprocess.run(command, env=dict(env), capture_output=True, text=True, check=False)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done.stdout
