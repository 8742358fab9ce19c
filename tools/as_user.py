"""Run README's two commands as an ordinary user of a fresh machine: ``python3 tools/as_user.py [pytest's options]``.

The user has no rights, an empty home without a cache of pip, the system's Python, a clean environment and a path with a
space. Of the environment only what leads to a package index is kept: pip's variables and those of proxies. As root the
commands run as ``nobody``; any other user runs them without a change of user. What is tried is the last commit.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KEPT = re.compile(r"PIP_(?!CACHE_DIR)\w+|(https?|no|all)_proxy", re.IGNORECASE)
PATH = "/usr/local/bin:/usr/bin:/bin"


def main(options: list[str]) -> None:
    """Clone, train, test, and remove all of it."""
    as_root = os.geteuid() == 0
    user = pwd.getpwnam("nobody") if as_root else pwd.getpwuid(os.geteuid())
    folder = Path(tempfile.mkdtemp(prefix="gradwire-user-"))
    try:
        clone, home, temporary = folder / "a folder" / "gradwire", folder / "home", folder / "tmp"
        home.mkdir()
        temporary.mkdir()
        subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", ROOT, clone], check=True)
        if as_root:
            subprocess.run(["chown", "-R", f"{user.pw_uid}:{user.pw_gid}", folder], check=True)
        environment = {name: value for name, value in os.environ.items() if KEPT.fullmatch(name)}
        environment |= {"PATH": PATH, "HOME": str(home), "TMPDIR": str(temporary), "LANG": "C"}
        environment |= {"USER": user.pw_name, "LOGNAME": user.pw_name}
        rights = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []} if as_root else {}
        print(f"as {user.pw_name}, in {clone}", flush=True)
        for target, *more in (["train"], ["test", f"ARGS={shlex.join(options)}"]):
            start = time.monotonic()
            # A group of its own, so that nothing it started is left.
            process = subprocess.Popen(
                ["make", target, *more], cwd=clone, env=environment, start_new_session=True, **rights
            )
            try:
                status = process.wait()
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            took = time.monotonic() - start
            print(f"make {target} as {user.pw_name}: {took:.0f} s, exit status {status}", flush=True)
            if status:
                raise SystemExit(1)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1:])
