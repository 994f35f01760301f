"""An implementation of one's own: `all_to_all` that counts how many rows each expert got.

    torchrun --nproc-per-node 4 my_ep.py

Once the class is registered, its name is a value of `ep_implementation` like the built-in ones.
"""

import torch
import torch.distributed as dist

from ep_dispatch import AllToAll, EPImplementationInterface


class CountingAllToAll(AllToAll):
    """Keeps `load`, the rows that each local expert has computed. One object per experts module."""

    def __init__(self, experts_forward, **settings):
        super().__init__(experts_forward, **settings)
        self.load = torch.zeros(self.num_local_experts, dtype=torch.int64)

    def dispatch(self, hidden_states, plan):
        """Count, then do what `all_to_all` does."""
        self.load += torch.tensor(plan.rows_per_expert)
        return super().dispatch(hidden_states, plan)


EPImplementationInterface.register("my_ep", CountingAllToAll)


def main():
    """Every rank sends its tokens to random experts; rank 0 prints what each expert got."""
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    implementation = EPImplementationInterface.get("my_ep")(
        lambda rows, local_ids, weights: rows * weights,  # experts that do nothing
        num_local_experts=2,
        ep_group=dist.group.WORLD,
    )
    torch.manual_seed(dist.get_rank())
    x, weights = torch.randn(10, 8), torch.full((10, 2), 0.5)
    ids = torch.rand(10, 2 * ranks).topk(2).indices
    out = implementation(x, ids, weights)
    torch.testing.assert_close(out, x)
    loads = [torch.empty_like(implementation.load) for _ in range(ranks)]
    dist.all_gather(loads, implementation.load)
    if dist.get_rank() == 0:
        print("rows per expert:", torch.cat(loads).tolist())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
