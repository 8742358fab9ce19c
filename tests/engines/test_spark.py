"""Spark: a standalone master and two workers, real processes on loopback."""

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

pyspark = pytest.importorskip("pyspark")

from gradwire import ConfigError  # noqa: E402
from gradwire.clusters import spark  # noqa: E402
from tests.engines.program import LOOPBACK, assert_went_on, example, processes  # noqa: E402

STEPS = 60


@dataclass
class Cluster:
    url: str
    env: dict
    processes: list = field(default_factory=list)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    home = Path(pyspark.__file__).parent
    folder = tmp_path_factory.mktemp("spark")
    env = {
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_WORKER_DIR": str(folder),
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
    }
    made = Cluster(f"spark://127.0.0.1:{port}", env)

    def start(what, *options):
        log = (folder / f"{what}-{len(made.processes)}.log").open("w")
        command = [
            str(home / "bin" / "spark-class"),
            f"org.apache.spark.deploy.{what}",
            "--host",
            "127.0.0.1",
            *options,
        ]
        with log:
            made.processes.append(
                subprocess.Popen(
                    command, env={**os.environ, **LOOPBACK, **env}, stdout=log, stderr=log, start_new_session=True
                )
            )

    try:
        start("master.Master", "--port", str(port), "--webui-port", "0")
        end = time.monotonic() + 60
        while time.monotonic() < end:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        for _ in range(2):
            start("worker.Worker", "-c", "1", "-m", "1g", "--webui-port", "0", made.url)
        yield made
    finally:
        for each in made.processes:
            os.killpg(each.pid, signal.SIGKILL)
            each.wait()


def test_an_executor_that_is_killed_is_replaced(cluster):
    options = ("--steps", STEPS, "--master", cluster.url)
    with example("spark_digits.py", *options, env=cluster.env) as undisturbed:
        undisturbed.finish()
    with example("spark_digits.py", *options, env=cluster.env) as program:
        program.wait_for_step(25)
        os.kill(processes("CoarseGrainedExecutorBackend")[-1], signal.SIGKILL)
        program.finish()
    assert_went_on(program, undisturbed, STEPS, least=20)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 0}, r"`workers` must be a whole number of at least 1; got 0"),
        ({"workers": 2}, r"`data` must be a DataFrame or an RDD; got list"),
    ],
)
def test_bad_arguments_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        spark.run(print, [1, 2], **options)


def test_an_error_of_the_training_is_raised_in_the_driver():
    """After Spark has tried it again as often as it does."""
    program = (
        "import pyspark\n"
        "from gradwire.clusters import spark\n"
        "context = pyspark.SparkContext('local[2]')\n"
        "def work(worker):\n"
        "    raise ValueError('on purpose')\n"
        "try:\n"
        "    spark.run(work, context.parallelize(range(4), 2), workers=2)\n"
        "except Exception as error:\n"
        "    print('raised', 'on purpose' in str(error))\n"
    )
    env = {**os.environ, **LOOPBACK, "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=180)
    assert "raised True" in done.stdout, done.stdout + done.stderr[-3000:]
