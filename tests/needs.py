"""What a machine may lack: a test that needs it is skipped, with the command that provides it.

Every skip of this project is made here, so that their number says how much of the suite did not run.
"""

import importlib
import os
import shutil

import pytest

from gradwire import lab as labs

ROOT = "sudo make test-all"


def skip(what, command):
    """Leave a test or a module out: it needs something that is not there."""
    pytest.skip(f"needs {what}: {command}", allow_module_level=True)


def module(name, command):
    """Import a module, or leave out what needs it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        skip(name, command)


def lab():
    """Leave a test out where no lab can be made."""
    if reason := labs.unavailable():
        skip(f"a lab ({reason.rstrip('.')})", ROOT)


def root(what):
    """Leave a test out where who runs it is not root."""
    if os.geteuid() != 0:
        skip(f"root, {what}", ROOT)


def program(name, command):
    """Leave a test out where a program is not installed."""
    if shutil.which(name) is None:
        skip(name, command)
