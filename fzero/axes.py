"""Names of mesh axes, outermost first.

Stages of a pipeline and replicas of a sharding group may sit on different hosts; the devices of one
group (`data`) are neighbours.
"""

PIPE, REPLICA, DATA = "pipe", "replica", "data"
# Over which a batch's rows are spread, and gradients summed.
AXES = (REPLICA, DATA)
