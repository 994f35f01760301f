"""One MoE layer, ours beside native transformers': `python layer.py [--out FILE]`."""

from __future__ import annotations

from typing import Any

from common import main

EP_SIZES = (8, 4, 2)


def measure() -> dict[str, Any]:
    """Of each EP size and implementation: bytes sent in a layer, bytes kept per token, seconds.

    `dispatch_seconds`: of dispatch and combine with experts that compute nothing.
    """
    import moe_layer

    from ep_testing import RankPool

    pool = RankPool()
    found: dict[str, Any] = {}
    big, small = moe_layer.QWEN3_30B, moe_layer.SMALL
    for ep in EP_SIZES:
        sent = pool.run(moe_layer.wire_bytes, big, ep, timeout=200)
        kept = pool.run(moe_layer.saved_bytes, big, ep, "none", timeout=200)
        seconds = pool.run(moe_layer.layer_times, small, ep, 5, timeout=200)[0]
        alone = pool.run(moe_layer.dispatch_times, small, ep, 25, timeout=200)[0]
        found[str(ep)] = {
            name: {
                "sent_bytes": sum(rank[at] for rank in sent),
                "saved_bytes_per_token": sum(rank[at] for rank in kept) / (8 * big.tokens),
                "seconds": seconds[at],
                "dispatch_seconds": alone[at],
            }
            for at, name in enumerate(("native", "all_to_all"))
        }
    pool.close()
    return found


if __name__ == "__main__":
    main(measure)
