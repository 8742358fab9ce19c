"""Cases of checkpoints that cannot be written or loaded, run by ranks that are real processes."""

import errno
import json
import os
import random
import time
import zlib
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save
from torch.distributed.checkpoint import CheckpointException

import gradwire
from gradwire.adapters.replica import Replica
from gradwire.collectives.rank import RENDEZVOUS, run_rank
from gradwire.tree import from_bytes, to_bytes, to_tensors

from .base import main_of_cases
from .ddp import Net, compressed, loss_of, sgd, train
from .sharded import wrapped

NAMES = ("rank-00000-of-00002.safetensors", "rank-00001-of-00002.safetensors")


def made(kind, rank):
    """Something that can be saved, after three steps, and the model it trains."""
    model = Net()
    if kind == "compression":
        model, optimizer = compressed("topk:0.1", model)
        train(model, sgd(model), range(3), rank)
        return model, optimizer
    if kind == "replica":
        model, compression = compressed("powersgd:2", model)
        replica = Replica(model, sgd(model, momentum=0.9), compression)
        for step in range(3):
            replica.learn(loss_of(model, step, rank))
        return model, replica
    optimizer = wrapped(model, "adamw", ratio=0.2, stage=int(kind.removeprefix("stage ")))
    train(model, optimizer, range(3), rank)
    return model, optimizer


def failure_of(act):
    """The name of the error's class, its text, and how long it took."""
    begun = time.monotonic()
    try:
        act()
    except (Exception, CheckpointException) as error:  # torch's is no Exception
        return [type(error).__name__, str(error), time.monotonic() - begun]
    return ["", "", time.monotonic() - begun]


def files_in(folder):
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*"))


def no_space(rank, folder, where):
    """The disk is full when a file is written: ``COMPLETE``, or that of the second rank."""
    _, optimizer = made("stage 1", rank)
    gradwire.save_checkpoint(f"{folder}/before", optimizer)
    with without_space(where):
        said = failure_of(lambda: gradwire.save_checkpoint(f"{folder}/full", optimizer))
    dist.barrier()
    left = files_in(f"{folder}/full")
    dist.barrier()
    again = gradwire.save_checkpoint(f"{folder}/full", optimizer)
    return {"said": said, "left": left, "again": gradwire.load_checkpoint(again, optimizer) == {}}


@contextmanager
def without_space(where):
    """The disk is full when a file whose name contains that is written."""
    real = os.fsync

    def fsync(descriptor):
        if where in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    os.fsync = fsync
    try:
        yield
    finally:
        os.fsync = real


def saved_again(rank, folder, why, disk=None):
    """A second save of a step fails: what is said, and what can be loaded; then a third one and a fourth succeed."""
    _, optimizer = made("stage 1", rank)
    large = {"x": torch.zeros(1 << 18)}
    if disk:
        folder = disk
        if rank == 0:
            assert os.system(f"mount -t tmpfs -o size={1 << 20} tmpfs {disk}") == 0
        dist.barrier()
    try:
        path = gradwire.save_checkpoint(folder, optimizer, {"save": 1})
        before = files_in(folder)
        dist.barrier()
        with without_space(why) if why.startswith(("COMPLETE", "rank-")) else nullcontext():
            extra = {"save": object()} if why == "unsavable" and rank == 1 else large if disk else {"save": 2}
            said = failure_of(lambda: gradwire.save_checkpoint(folder, optimizer, extra))
        dist.barrier()
        told = {"said": said, "stays": files_in(folder) == before, "loaded": loaded(folder, optimizer)}
        dist.barrier()
        for save in (3, 4):
            gradwire.save_checkpoint(folder, optimizer, {"save": save})
            told[f"loaded {save}"] = loaded(folder, optimizer)
            dist.barrier()
        return {**told, "files": len(files_in(path))}
    finally:
        dist.barrier()
        if disk and rank == 0:
            os.system(f"umount {disk}")


def distributed(rank, folder, disk):
    """What is said of a full disk, of an extra that one rank cannot save, and of a file that is not whole."""
    _, optimizer = made("stage 1", rank)
    told, here = {}, Path(folder)
    told["unsavable"] = failure_of(
        lambda: gradwire.save_distributed_checkpoint(here, optimizer, {"x": object() if rank == 1 else 1})
    )
    dist.barrier()
    gradwire.save_distributed_checkpoint(here, optimizer, {"x": torch.zeros(1 << 18)})
    dist.barrier()
    if rank == 0:
        for file in sorted(here.rglob("*.safetensors"))[:1]:
            os.truncate(file, file.stat().st_size - 7)
        assert not disk or os.system(f"mount -t tmpfs -o size={1 << 16} tmpfs {disk}") == 0
    dist.barrier()
    try:
        told["damaged"] = failure_of(lambda: gradwire.load_distributed_checkpoint(here, optimizer))
        dist.barrier()
        if disk:
            told["full disk"] = failure_of(lambda: gradwire.save_distributed_checkpoint(disk, optimizer))
        return told
    finally:
        dist.barrier()
        if disk and rank == 0:
            os.system(f"umount {disk}")


def loaded(folder, optimizer):
    path = gradwire.latest_checkpoint(folder)
    return None if path is None else gradwire.load_checkpoint(path, optimizer)["save"]


def saving(folder, rank, ranks, settings):
    """A rank that saves the same step until it is killed; its file ``count`` has the last save that succeeded."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "GLOO_SOCKET_IFNAME": "lo"}
    os.environ[RENDEZVOUS] = f"{folder}/rendezvous"

    def save_for_ever(rank, ranks):
        optimizer, folder_ = wrapped(Net(), "adamw", ratio=0.2, stage=1), Path(folder)
        for number in range(1_000_000):
            gradwire.save_checkpoint(folder_ / "saved", optimizer, {"save": number})
            if rank == 0:
                (folder_ / "writing").write_text(str(number))
                (folder_ / "writing").rename(folder_ / "count")
            if number == 1:
                (folder_ / f"training-{rank}").touch()

    run_rank(save_for_ever, timeout_s=settings["timeout_s"])


def load_saved(rank, folders):
    """What a group of other processes loads from folders of :func:`saving`."""
    _, optimizer = made("stage 1", rank)
    return [loaded(folder, optimizer) for folder in folders]


def full_disk(rank, folder, disk):
    """A disk with room for the files of the ranks, and not for one byte more."""
    _, optimizer = made("stage 1", rank)
    path = gradwire.save_checkpoint(f"{folder}/elsewhere", optimizer)
    pages = sum(-(-(path / name).stat().st_size // 4096) for name in NAMES)
    dist.barrier()
    if rank == 0:
        assert os.system(f"mount -t tmpfs -o size={4096 * pages} tmpfs {disk}") == 0
    dist.barrier()
    try:
        said = failure_of(lambda: gradwire.save_checkpoint(disk, optimizer))
        dist.barrier()
        return {"said": said, "left": files_in(disk)}
    finally:
        dist.barrier()
        if rank == 0:
            os.system(f"umount {disk}")


MARKERS = {
    "not JSON": b"{",
    "not UTF-8": b"\xff\xfe\xff",
    "deep": b"[" * 200_000,
    "a huge number": b'{"format": 1, "ranks": ' + b"9" * 100_000 + b', "files": []}',
    "no ranks": b'{"format": 1, "files": [[1, 2], [3, 4]]}',
    "no files": b'{"format": 1, "ranks": 2}',
    "files that are a number": b'{"format": 1, "ranks": 2, "files": 2}',
    "files that are text": b'{"format": 1, "ranks": 2, "files": "ab"}',
    "files that are numbers": b'{"format": 1, "ranks": 2, "files": [1, 2]}',
    "sizes that are text": b'{"format": 1, "ranks": 2, "files": [["a", "b"], ["c", "d"]]}',
    "no ranks at all": b'{"format": 1, "ranks": 0, "files": []}',
    "ranks that are text": b'{"format": 1, "ranks": "2", "files": [[1, 2], [3, 4]]}',
    "negative sizes": b'{"format": 1, "ranks": 2, "files": [[1, -1], [1, -1]]}',
    "a number": b"7",
    "a huge size": b'{"format": 1, "ranks": 2, "files": [[1, 1152921504606846976], [3, 1099511627776]]}',
}


def markers(rank, folder):
    """What is said of each malformed ``COMPLETE``, of one that is a pipe, and of one that is 100 MB."""
    _, optimizer = made("stage 1", rank)
    path = gradwire.save_checkpoint(folder, optimizer)
    marker, found = path / "COMPLETE", {}
    for name in [*MARKERS, "a pipe", "a folder", "a loop", "100 MB"]:
        dist.barrier()
        if rank == 0:
            with suppress(OSError):
                marker.unlink() if not marker.is_dir() else marker.rmdir()
            if name == "a pipe":
                os.mkfifo(marker)
            elif name == "a folder":
                marker.mkdir()
            elif name == "a loop":
                marker.symlink_to(marker)
            elif name == "100 MB":
                with marker.open("wb") as file:
                    file.truncate(100 << 20)
            else:
                marker.write_bytes(MARKERS[name])
        dist.barrier()
        found[name] = failure_of(lambda: gradwire.load_checkpoint(path, optimizer))
    return found


WRONG = (None, True, -1, 0, 3, 10**30, 1e308, float("nan"), "", "x", "tensor", [], [1], [[]], {}, {"x": 1})


def places(node, path=()):
    """Every place in a tree, deepest last."""
    found = [path]
    if isinstance(node, dict | list):
        for key, each in node.items() if isinstance(node, dict) else enumerate(node):
            found += places(each, (*path, key))
    return found


def mutated(tree, chance):
    """The bytes of a state in which something is wrong, and what."""
    path = chance.choice(places(tree)[1:])
    parent = tree
    for key in path[:-1]:
        parent = parent[key]
    old = parent[path[-1]]
    how = chance.choice(("removed", "another", "another", "tensor", "deep", "digits", "key", "shape"))
    if how == "removed":
        del parent[path[-1]]
    elif how == "another":
        parent[path[-1]] = chance.choice(WRONG)
    elif how == "tensor":
        dtype = chance.choice((torch.float32, torch.int64, torch.bool, torch.float16))
        parent[path[-1]] = torch.zeros(chance.choice(((), (0,), (1,), (7, 3))), dtype=dtype)
    elif how == "shape" and isinstance(old, torch.Tensor):
        parent[path[-1]] = chance.choice((old.reshape(1, -1), torch.cat([old.reshape(-1)] * 2), old.reshape(-1)[1:]))
    elif how == "key" and isinstance(parent, dict):
        parent["\ud800unknown"] = parent.pop(path[-1])
    else:
        parent[path[-1]] = "HERE"
        tensors, text = to_tensors(tree)
        wrong = {"deep": "[" * 5000 + "]" * 5000, "digits": "9" * 10_000}.get(how, '"tensor:nowhere"')
        return save(tensors, metadata={"gradwire": text.replace('"HERE"', wrong)}), f"{how} at {path}"
    return to_bytes(tree), f"{how} at {path}: {parent.get(path[-1]) if isinstance(parent, dict) else parent!s:.40}"


def foreign(rank, folder, kind, seed, times):
    """States with something wrong in them: which were refused, and whether what they were loaded into stayed."""
    model, optimizer = made(kind, rank)
    path = gradwire.save_checkpoint(folder, optimizer, {"epoch": 1})
    good = [(path / name).read_bytes() for name in NAMES]
    marker = json.loads((path / "COMPLETE").read_text())
    chance, found = random.Random(seed), []
    for number in range(times):
        which = chance.randrange(3)  # the file of one rank, or both
        files, what = list(good), ""
        try:
            for each in (0, 1) if which == 2 else (which,):
                files[each], what = mutated(from_bytes(good[each]), chance)
        except ValueError:  # no state can be written so
            continue
        if number == 0 and kind.startswith("stage"):  # what only one rank has, and cannot take
            which, files, what = 1, list(good), "betas that are a number"
            tree = from_bytes(good[1])
            tree["optimizer"]["param_groups"][0]["betas"] = 0.5
            files[1] = to_bytes(tree)
        dist.barrier()
        if rank == 0:
            write(path, files, marker)
        dist.barrier()
        before = checksums(model, optimizer)
        said = failure_of(lambda: gradwire.load_checkpoint(path, optimizer))
        stayed = checksums(model, optimizer) == before if said[0] else None
        found.append([which, what, *said, stayed])
        dist.barrier()
        if rank == 0:
            write(path, good, marker)
        dist.barrier()
        assert gradwire.load_checkpoint(path, optimizer) == {"epoch": 1}, what
    train_again(kind, model, optimizer, rank)
    return found


def write(path, files, marker):
    for name, data in zip(NAMES, files, strict=True):
        (path / name).write_bytes(data)
    told = [[zlib.crc32(data), len(data)] for data in files]
    (path / "COMPLETE").write_text(json.dumps({**marker, "files": told}))


def checksums(model, optimizer):
    return zlib.crc32(to_bytes({"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}))


def train_again(kind, model, optimizer, rank):
    if kind == "replica":
        optimizer.learn(loss_of(model, 3, rank))
    elif kind == "compression":
        train(model, sgd(model), [3], rank)
    else:
        train(model, optimizer, [3], rank)


if __name__ == "__main__":
    main_of_cases(
        {each.__name__: each for each in (no_space, full_disk, saved_again, distributed, load_saved, markers, foreign)}
    )
