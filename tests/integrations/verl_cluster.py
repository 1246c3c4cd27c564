"""Two Ray nodes on this machine, until standard input closes. Prints their address.

`verl_cluster.py HEAD_GPUS [HEAD_FOLDER OTHER_FOLDER]`: the head has so many logical GPUs, the other
node one; each runs in its own folder, as two machines would.
"""

import os
import sys

from ray.cluster_utils import Cluster

if __name__ == "__main__":
    head_gpus, *folders = sys.argv[1:]
    node = {"num_cpus": 16, "object_store_memory": 128 << 20}
    if folders:
        os.chdir(folders[0])
    cluster = Cluster(
        initialize_head=True,
        head_node_args={**node, "num_gpus": int(head_gpus), "include_dashboard": False},
    )
    if folders:
        os.chdir(folders[1])
    cluster.add_node(**node, num_gpus=1)
    cluster.wait_for_nodes()
    print(f"ADDRESS {cluster.address}", flush=True)
    sys.stdin.read()
    cluster.shutdown()
