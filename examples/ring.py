"""One sequence over several processes: one plan of the whole, and only kept blocks travel.

python examples/ring.py [tokens] [processes]
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import sparge
from sparge.parallel import ring_attention, shard, unshard
from sparge.synthetic import structured_qkv


def run(rank, world, folder, tokens):
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    whole = structured_qkv(Hq=4, Hk=2, L=tokens, dtype=torch.bfloat16)
    # A model would hold only its own part. Dealt there and back, causal ranks have as much to do.
    parts = [shard(x, layout="zigzag") for x in whole]
    options = {"is_causal": True, "enable_gqa": True, "backend": "cpu"}
    with sparge.record() as runs:
        out = ring_attention(*parts, layout="zigzag", **options)
    out = unshard(out, layout="zigzag")
    if rank == 0:
        print(runs[0].ring)
        alone = sparge.attention(*whole, **options)
        distance = (out - alone).float().abs().sum() / alone.float().abs().sum()
        print(f"relative L1 distance from one process {distance:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    tokens = int(sys.argv[1]) if len(sys.argv) > 1 else 4096
    processes = int(sys.argv[2]) if len(sys.argv) > 2 else 2
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (processes, folder, tokens), nprocs=processes)
