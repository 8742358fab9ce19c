import itertools
import os

import pytest

from gradwire.lab import Lab
from tests import needs

_COUNT = itertools.count()


@pytest.fixture
def name():
    """A lab's name that no other test has, here or in another process; what is left under it is removed."""
    needs.lab()
    mine = f"test-{os.getpid()}-{next(_COUNT)}"
    yield mine
    for lab in Lab.find_all():
        if lab.name == mine:
            lab.down()


@pytest.fixture
def lab(name):
    """Two hosts at 100 megabit."""
    with Lab.up(2, "100mbit", name=name) as made:
        yield made
