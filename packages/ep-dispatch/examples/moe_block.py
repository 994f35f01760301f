"""A mixture of experts in plain PyTorch that gains expert parallelism in ten lines.

    torchrun --nproc-per-node 4 moe_block.py

`MoE` is an ordinary module, on one process. `ParallelMoE` adds the lines marked EP: each rank keeps its
part of the experts, and tokens travel. Every rank has a batch of its own. The program trains both for a
few steps, `MoE` on all batches and `ParallelMoE` on its own, and shows that the losses are equal.

T = tokens, H = hidden size, I = intermediate size, E = experts, K = experts per token, R = rows.
"""

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import linear, silu

from ep_dispatch import AllToAll


class MoE(nn.Module):
    """Top-k routing over SwiGLU experts whose weights are stacked: [E, 2I, H] and [E, H, I]."""

    def __init__(self, hidden=32, intermediate=64, num_experts=8, top_k=2):
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(hidden, num_experts, bias=False)
        self.gate_up = nn.Parameter(
            torch.randn(num_experts, 2 * intermediate, hidden) / hidden**0.5
        )
        self.down = nn.Parameter(torch.randn(num_experts, hidden, intermediate) / intermediate**0.5)

    def route(self, x):
        """Expert ids and weights, [T, K] each."""
        weights, ids = self.router(x).softmax(dim=-1).topk(self.top_k, dim=-1)
        return ids, weights / weights.sum(dim=-1, keepdim=True)

    def experts(self, rows, offsets):
        """The experts on rows [R, H] grouped by expert; expert e's rows end at `offsets[e]`."""
        parts, start = [], 0
        for gate_up, down, end in zip(self.gate_up, self.down, offsets.tolist(), strict=True):
            gate, up = linear(rows[start:end], gate_up).chunk(2, dim=-1)
            parts.append(linear(silu(gate) * up, down))
            start = end
        return torch.cat(parts)

    def forward(self, x):
        """[T, H] to [T, H]."""
        ids, weights = self.route(x)
        order = ids.flatten().argsort(stable=True)
        offsets = ids.flatten().bincount(minlength=len(self.down)).cumsum(0)
        rows = self.experts(x[order // self.top_k], offsets) * weights.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, order // self.top_k, rows)


class ParallelMoE(MoE):
    """The same with the experts spread over the ranks of `group`."""

    def __init__(self, *args, group, **kwargs):
        super().__init__(*args, **kwargs)
        count = len(self.down) // dist.get_world_size(group)  # EP: experts per rank
        mine = slice(dist.get_rank(group) * count, (dist.get_rank(group) + 1) * count)  # EP
        self.gate_up = nn.Parameter(self.gate_up[mine].detach().clone())  # EP
        self.down = nn.Parameter(self.down[mine].detach().clone())  # EP
        self.ep = AllToAll(self.experts, num_local_experts=count, ep_group=group)  # EP

    def forward(self, x):
        """[T, H] to [T, H], this rank's tokens."""
        ids, weights = self.route(x)
        plan = self.ep.prepare(ids, weights)  # EP: counts, splits, permutation
        received, ticket = self.ep.dispatch(x, plan)  # EP: tokens go to the ranks of their experts
        rows = self.experts(received.by_expert(), received.offsets) * received.weights[:, None]
        return self.ep.combine(received.sum(rows), ticket)  # EP: and the results come back


def step(model, x, target, share, *, learning_rate=0.5):
    """One step of plain SGD; `share` is this batch's part of the whole. Gives back the loss."""
    model.zero_grad()
    loss = (model(x) - target).square().mean() * share
    loss.backward()
    if isinstance(model, ParallelMoE):
        # An expert's gradient is the sum over all batches already; the router's is this batch's alone.
        dist.all_reduce(model.router.weight.grad)
        loss = loss.detach()
        dist.all_reduce(loss)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= learning_rate * parameter.grad
    return loss.item()


def main():
    """Train both and compare."""
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    alone = MoE().to(device)
    torch.manual_seed(0)
    parallel = ParallelMoE(group=dist.group.WORLD).to(device)
    x, target = torch.randn(2, ranks, 16, 32, generator=torch.Generator().manual_seed(1)).to(device)
    for number in range(5):
        one = step(alone, x.flatten(0, 1), target.flatten(0, 1), 1.0)
        many = step(parallel, x[rank], target[rank], 1 / ranks)
        if rank == 0:
            print(f"step {number}: loss {one:.6f} on one process, {many:.6f} on {ranks} ranks")
        assert abs(one - many) < 1e-5, (one, many)
    held = sum(p.numel() for p in parallel.parameters()) / sum(
        p.numel() for p in alone.parameters()
    )
    if rank == 0:
        print(f"equal; each rank holds {held:.0%} of the parameters")
    # gloo's threads end with the last reference to the group; one that outlives Python aborts it.
    del parallel
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
