"""sshd on the lab's hosts, and an ssh that reaches them without prompts: keys of the lab's own, ~/.ssh is untouched."""

from __future__ import annotations

import os
import subprocess

from tests.lab.hosts import LOGIN, USER, USER_ID, Lab

_SERVER = """
HostKey {folder}/host
AuthorizedKeysFile {folder}/authorized
PermitRootLogin prohibit-password
PasswordAuthentication no
StrictModes no
UsePAM no
UseDNS no
PidFile none
"""
_CLIENT = """
Host *
    IdentityFile {folder}/%u
    BatchMode yes
    StrictHostKeyChecking no
    UserKnownHostsFile /dev/null
    LogLevel ERROR
"""
# /run is this machine's: sshd's folder is mounted on one of the host's own.
_START = """
set -eu
mount -t tmpfs -o mode=755 tmpfs /run
mkdir /run/sshd
mount --bind {folder}/ssh_config /etc/ssh/ssh_config
/usr/sbin/sshd -f {folder}/sshd_config
"""


def start(lab: Lab) -> None:
    """Start sshd on every host of `lab`, for root and for the lab's user."""
    folder = lab.shared / "ssh"
    folder.mkdir()
    folder.chmod(0o755)
    for name in ("host", "root", USER):
        line = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(line, check=True, timeout=300)
    os.chown(folder / USER, USER_ID, USER_ID)
    (folder / "authorized").write_text("".join((folder / f"{name}.pub").read_text() for name in ("root", USER)))
    (folder / "sshd_config").write_text(_SERVER.format(folder=folder))
    (folder / "ssh_config").write_text(_CLIENT.format(folder=folder))
    for host in (LOGIN, *lab.nodes):
        start_on(lab, host)


def start_on(lab: Lab, host: str) -> None:
    """Start sshd on one host of a lab whose other hosts run it already."""
    finished = lab.run(["bash", "-c", _START.format(folder=lab.shared / "ssh")], host=host)
    if finished.code:
        raise RuntimeError(f"sshd on {host}: {finished.err}")
