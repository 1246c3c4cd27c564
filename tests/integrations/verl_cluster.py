"""Two Ray nodes on this machine, each with one logical GPU, until standard input closes. Prints their address."""

import sys

from ray.cluster_utils import Cluster

if __name__ == "__main__":
    node = {"num_cpus": 16, "num_gpus": 1, "object_store_memory": 128 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    cluster.add_node(num_cpus=16, num_gpus=1, object_store_memory=128 << 20)
    cluster.wait_for_nodes()
    print(f"ADDRESS {cluster.address}", flush=True)
    sys.stdin.read()
    cluster.shutdown()
