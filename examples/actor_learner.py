"""Four actors learn to balance a pole, asynchronously: reinforcement learning through a coordinator, in ascent mode.

A server process holds the policy. Every actor, a process of its own, reads it, plays a few episodes of cart-pole with
it, and pushes the gradient of the expected return (REINFORCE, with a baseline); the server moves the parameters by
W + learning_rate * G. Nobody waits for anybody. An episode ends when the pole has fallen, or after 200 steps, and its
return is the number of steps: about 20 in the beginning, 200 is the best.

    python examples/actor_learner.py
    python examples/actor_learner.py --plot returns.png

Needs: pip install 'gradwire[serve]', and matplotlib for the picture
"""

import argparse
import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import gradwire

ACTORS = 4
EPISODES = 16  # of a push, played side by side
MOST_STEPS = 200
DISCOUNT = 0.99

SETTINGS = """
address = "127.0.0.1:0"

[model]
mode = "ascent"
learning_rate = 0.5

[staleness]
bound = 16
"""


# The game: a pole on a cart, which is pushed to the left or to the right 50 times a second.


def move(states, actions):
    """The states after a step: position and speed of the cart, angle and angular speed of the pole."""
    x, speed, angle, turn = states.unbind(1)
    gravity, pole_mass, mass, length, seconds = 9.8, 0.1, 1.1, 0.5, 0.02
    force = 20.0 * actions - 10.0
    pull = (force + pole_mass * length * turn.square() * angle.sin()) / mass
    bend = gravity * angle.sin() - angle.cos() * pull
    bend = bend / (length * (4 / 3 - pole_mass * angle.cos().square() / mass))
    push = pull - pole_mass * length * bend * angle.cos() / mass
    return torch.stack([x + seconds * speed, speed + seconds * push, angle + seconds * turn, turn + seconds * bend], 1)


@torch.no_grad()
def play(policy, episodes):
    """Episodes side by side: states, actions, and which of them went on, each with the steps first."""
    states = torch.rand(episodes, 4) * 0.1 - 0.05
    alive = torch.ones(episodes, dtype=torch.bool)
    seen, done, going = [], [], []
    while alive.any() and len(seen) < MOST_STEPS:
        actions = torch.bernoulli(policy(states)[:, 0].sigmoid())
        seen.append(states)
        done.append(actions)
        going.append(alive)
        states = move(states, actions)
        alive = alive & (states[:, 0].abs() < 2.4) & (states[:, 2].abs() < 0.2095)
    return torch.stack(seen), torch.stack(done), torch.stack(going).float()


def new_policy():
    """A network from a state to the log-odds of a push to the right."""
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))


# An actor: a process of its own, which could as well run on another machine.


def act(number, address, pipe):
    """Play and push until the pipe says that it is enough; say what every batch of episodes has returned."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the main process, which ends us
    torch.set_num_threads(1)
    torch.manual_seed(number)
    policy = new_policy()

    def objective():
        states, actions, alive = play(policy, EPISODES)
        pipe.send(float(alive.sum(0).mean()))
        to_go = alive.clone()  # what an episode returns from a step on
        for step in reversed(range(len(to_go) - 1)):
            to_go[step] += DISCOUNT * to_go[step + 1]
        baseline = (to_go * alive).sum(1, keepdim=True) / alive.sum(1, keepdim=True)  # of a step: the others' mean
        advantage = (to_go - baseline) * alive
        advantage = advantage / (advantage.square().sum() / alive.sum()).sqrt().clamp(min=1e-6)
        likelihood = -nn.functional.binary_cross_entropy_with_logits(policy(states)[..., 0], actions, reduction="none")
        return (likelihood * advantage).sum() / alive.sum()

    with contextlib.suppress(EOFError, OSError):  # the main process has ended: so do we
        pipe.send("ready")
        if pipe.recv() == "stop":
            return
        with gradwire.CoordinatorClient(address, codec="int8", worker=f"actor-{number}") as client:
            while not pipe.poll():
                client.compute_and_push(policy, objective)  # the server goes up its gradient


# The server: `gradwire serve` with a file of settings.


@contextlib.contextmanager
def serving():
    """A server in a process of its own, and its address; it is ended by SIGTERM, whatever happens."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "serve.toml"
        file.write_text(SETTINGS)
        server = subprocess.Popen(
            [sys.executable, "-m", "gradwire", "serve", "--config", str(file)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for us alone
        )
        try:
            first = server.stdout.readline()  # serving at 127.0.0.1:12345, ...
            if not first.startswith("serving at "):
                raise RuntimeError(f"the server did not start: {first}")
            yield first.split()[2].rstrip(",")
        finally:
            server.terminate()
            server.communicate()


# The main process: starts everything, and looks once a second at what the actors have earned.


@contextlib.contextmanager
def acting(address):
    """Actors in processes of their own, and the pipes to them; they are ended, whatever happens."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    try:
        for number in range(ACTORS):
            ours, theirs = context.Pipe()
            process = context.Process(target=act, args=(number, address, theirs), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        for pipe in pipes:
            pipe.recv()  # it is ready
        for pipe in pipes:
            pipe.send("go")
        yield pipes
    finally:
        for pipe in pipes:
            with contextlib.suppress(OSError):
                pipe.send("stop")
        late = time.monotonic() + 10
        for process in processes:
            process.join(max(0.0, late - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()


def mean_return(policy, episodes=200):
    """What a policy earns."""
    return float(play(policy, episodes)[2].sum(0).mean())


def learn(target, limit):
    """One training; the points of its curve: seconds, mean return of the actors' episodes since the point before."""
    torch.manual_seed(0)
    policy, curve = new_policy(), []
    with serving() as address, gradwire.CoordinatorClient(address) as client:
        print(f"server at {address}, mean return at the start {mean_return(policy):.1f}", flush=True)
        client.set_model_parameters(dict(policy.named_parameters()))
        with acting(address) as pipes:
            began = time.monotonic()
            while not curve or (curve[-1][1] < target and curve[-1][0] < limit):
                time.sleep(1.0)
                returns = []
                for pipe in pipes:
                    while pipe.poll():
                        returns.append(pipe.recv())
                if returns:
                    curve.append((time.monotonic() - began, sum(returns) / len(returns)))
                    told = f"version {client.version:5}   mean return of {EPISODES * len(returns):4} episodes"
                    print(f"{curve[-1][0]:6.1f} s   {told} {curve[-1][1]:6.1f}", flush=True)
        status = client.status()[0]
        client.load_into(policy)
    print(f"applied {status.applied} pushes, refused {status.refused['STALE']} as stale")
    print(f"received {status.bytes_received / 1e6:.1f} MB, sent {status.bytes_sent / 1e6:.1f} MB")
    print(f"mean return at the end {mean_return(policy):.1f}", flush=True)
    return curve


def plot(file, curve):
    """Mean return, against time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    panel = figure.subplots()
    panel.plot([seconds for seconds, _ in curve], [earned for _, earned in curve], marker="o", markersize=3)
    panel.axhline(MOST_STEPS, color="gray", linestyle=":")
    panel.set(xlabel="seconds", ylabel="mean return", title=f"Cart-pole, {ACTORS} asynchronous actors, int8")
    panel.grid(alpha=0.3)
    figure.savefig(file, dpi=150)
    print(f"drawn: {file}")


def main():
    """Read the options, learn, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=float, default=195.0, help="mean return at which it ends")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds after which it ends anyway")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the mean return")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything is ended on the way out
    torch.set_num_threads(1)
    curve = learn(given.target, given.limit)
    if given.plot is not None:
        plot(given.plot, curve)


if __name__ == "__main__":
    main()
