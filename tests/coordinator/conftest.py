"""A disk that can be full."""

import subprocess
from contextlib import suppress

import pytest

from tests import needs


class SmallDisk:
    """A file system of a few MB."""

    def __init__(self, folder):
        self.folder = folder

    def fill(self):
        """Take all the room there is."""
        with (self.folder / "ballast").open("ab", buffering=0) as file:
            for size in (1 << 16, 1 << 12, 1):
                with suppress(OSError):
                    while True:
                        file.write(bytes(size))

    def empty(self):
        """Give it back."""
        (self.folder / "ballast").unlink()


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 4 MB: root may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "gradwire", folder], capture_output=True, text=True)
    if made.returncode:
        needs.skip(f"the right to mount ({made.stderr.strip()})", needs.ROOT)
    yield SmallDisk(folder)
    subprocess.run(["umount", "--lazy", folder], check=True)  # also if a test that failed has left files open
