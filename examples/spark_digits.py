"""The digits CNN on Spark: every barrier task trains on the rows of its partition, and Spark restarts lost ones.

    python examples/spark_digits.py                                  # local[2]
    python examples/spark_digits.py --master spark://HOST:7077       # a standalone master; spark-submit works as well

Needs: pip install 'gradwire[spark,bench]' and Java 17
"""

import argparse

import torch
from pyspark.sql import SparkSession

from gradwire.clusters import spark
from gradwire.tasks import Digits

BATCH = 32


def training(steps, save_every):
    """The function that every task calls, with what it must know."""

    def train(worker):
        torch.set_num_threads(1)
        rows = list(worker.rows)
        images = torch.tensor([row.image for row in rows]).view(-1, 1, 32, 32)
        labels = torch.tensor([row.label for row in rows])
        task = Digits()
        model = task.model()
        replica = worker.prepare(model, task.optimizer(model))
        worker.report(began=replica.steps)
        while replica.steps < steps:
            pick = torch.arange(BATCH * replica.steps, BATCH * (replica.steps + 1)) % len(labels)
            loss = replica.learn(task.loss(replica.model, images[pick], labels[pick]))
            worker.report(step=replica.steps, loss=round(loss, 6), ranks=worker.size)
            if replica.steps % save_every == 0:
                worker.save(replica)
        return task.validate(model).accuracy

    return train


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--master", default="local[2]")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--codec", default="int8")
parser.add_argument("--save-every", type=int, default=10, metavar="STEPS")
given = parser.parse_args()

session = SparkSession.builder.master(given.master).appName("gradwire digits").getOrCreate()
images, labels = Digits(batch_size=Digits.train_examples // given.workers * given.workers).batch(0, 0, 1)
rows = [(image.flatten().tolist(), int(label)) for image, label in zip(images, labels, strict=True)]
data = session.sparkContext.parallelize(rows, given.workers).toDF(["image", "label"])
work = training(given.steps, given.save_every)
accuracy = spark.run(work, data, workers=given.workers, codec=given.codec, notify=print)
print({"accuracy": round(accuracy, 4)})
session.stop()
