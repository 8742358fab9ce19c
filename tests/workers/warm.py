"""Programs in processes that have imported torch and gradwire already.

A new interpreter takes two seconds of a core to import torch. These processes are forked from one that did nothing
else, and begin in a hundredth of that. They are real processes in every other way.
"""

import contextlib
import multiprocessing
import os
import runpy
import sys
import tempfile
from pathlib import Path
from subprocess import CompletedProcess

from gradwire.cli import main

COMMAND = "gradwire"  # not `python -m gradwire`: completion asks for the program's own name
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.workers.imported"])


def start(module, *arguments, stdin=os.devnull, stdout=os.devnull, stderr=os.devnull, environment=None, cwd=None):
    """Start ``python -m module arguments`` with these files as its streams. Returns the process."""
    environment = dict(os.environ) | (environment or {})
    streams = str(stdin), str(stdout), str(stderr)
    process = CONTEXT.Process(target=_live, args=(module, arguments, streams, environment, str(cwd or Path.cwd())))
    process.start()
    return process


def run(module, *arguments, timeout_s, **given):
    """Run ``python -m module arguments`` to its end, and return what ``subprocess.run`` would."""
    with tempfile.TemporaryDirectory() as folder:
        stdout, stderr = Path(folder, "stdout"), Path(folder, "stderr")
        process = start(module, *arguments, stdout=stdout, stderr=stderr, **given)
        process.join(timeout_s)
        alive = process.is_alive()
        process.kill()
        process.join()
        said = [file.read_text() if file.exists() else "" for file in (stdout, stderr)]
        assert not alive, f"{module} {arguments} did not end in {timeout_s} s: {said}"
    return CompletedProcess([module, *arguments], process.exitcode, *said)


def gradwire(*arguments, status=0, timeout_s=240, **given):
    """Run the command ``gradwire`` as its script does; it must end with that status."""
    result = run(COMMAND, *arguments, timeout_s=timeout_s, **given)
    assert result.returncode == status, result.stderr
    return result


def _live(module, arguments, streams, environment, cwd):
    for number, (file, mode) in enumerate(zip(streams, ("rb", "wb", "wb"), strict=True)):
        with open(file, mode) as stream:
            os.dup2(stream.fileno(), number)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - multiprocessing has closed the one it was forked with
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    with contextlib.suppress(ValueError):
        sys.path.remove("")
    sys.path.insert(0, cwd)
    sys.argv = [module, *arguments]
    if module == COMMAND:
        main()
    else:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
