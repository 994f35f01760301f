"""DeepGEMM Mega MoE as far as it goes without the chip: against a stand-in with its signatures.

The stand-in has the functions of DeepGEMM 2.6.1 that are called, computes what the kernel computes, keeps
weights in a layout of its own so that untransformed ones give wrong results, and fills new buffers with
numbers that show if they are used.
"""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ep_dispatch import AllReduce, AllToAll, Auto, DeepGemmMegaMoe
from ep_dispatch.fp8 import quantize_rows

FP4 = torch.tensor(
    [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64
)


class SymmBuffer:
    def __init__(self, group, num_experts, num_max_tokens_per_rank, num_topk, hidden):
        tokens = -(-num_max_tokens_per_rank // 384) * 384
        self.group, self.num_experts, self.num_topk = group, num_experts, num_topk
        self.num_max_tokens_per_rank = tokens
        self.x = torch.full((tokens, hidden), float("nan")).to(torch.float8_e4m3fn)
        self.x_sf = torch.full((tokens, hidden // 128), 0x7F7F7F7F, dtype=torch.int32)
        self.topk_idx = torch.full((tokens, num_topk), 0)
        self.topk_weights = torch.full((tokens, num_topk), float("nan"))

    def destroy(self):
        self.x = self.x_sf = self.topk_idx = self.topk_weights = self.group = None


def get_symm_buffer_for_mega_moe(group, num_experts, num_max_tokens_per_rank, num_topk, hidden,
                                 intermediate_hidden, use_fp8_dispatch=None, mma_type="fp8xfp4",
                                 activation="swiglu"):  # fmt: skip
    dist.barrier(group)  # allocating is a collective
    sys.modules["deep_gemm"].allocated.append(num_max_tokens_per_rank)
    return SymmBuffer(group, num_experts, num_max_tokens_per_rank, num_topk, hidden)


def transform_sf_into_required_layout(sf, mn, k, recipe, num_groups=None, is_sfa=None,
                                      disable_ue8m0_cast=False, psum_layout=None):  # fmt: skip
    assert sf.dtype == torch.float32
    assert recipe == (1, 32)
    assert sf.shape == (num_groups, mn, k // 32)
    mantissa, exponent = torch.frexp(sf)
    assert (mantissa == 0.5).all(), "scales are powers of two"
    return (exponent - 1 + 127).to(torch.uint8).view(torch.int32)


def transform_weights_for_mega_moe(l1_weights, l2_weights, activation="swiglu"):
    """Rows in reverse order stand for the kernel's layout."""
    for weight, scale in (l1_weights, l2_weights):
        assert (weight.dtype, scale.dtype) == (torch.int8, torch.int32)
        assert weight.is_contiguous()
    return tuple(tuple(t.flip(1) for t in layer) for layer in (l1_weights, l2_weights))


def dequantized(weight, scale):
    """[E, N, K] of packed FP4 [E, N, K / 2], the low half of a byte first, and packed scales."""
    codes = weight.view(torch.uint8).long()
    values = FP4[torch.stack([codes & 15, codes >> 4], dim=-1)].flatten(2)
    exponents = scale.view(torch.uint8).int() - 127
    return torch.ldexp(values, exponents.repeat_interleave(32, dim=-1))


def restored(values, scales):
    exponents = scales.view(torch.uint8).int() - 127
    return torch.ldexp(values.double(), exponents.repeat_interleave(32, dim=-1))


def moe_of(x, ids, weights, gate_up, down, first, clamp=None):
    out = torch.zeros_like(x)
    for expert in range(len(down)):
        token, slot = torch.where(ids == first + expert)
        gate, up = (x[token] @ gate_up[expert].T).chunk(2, dim=-1)
        if clamp is not None:
            gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
        rows = (nn.functional.silu(gate) * up) @ down[expert].T
        out = out.index_add(0, token, rows * weights[token, slot, None])
    return out


def fp8_fp4_mega_moe(y, l1_weights, l2_weights, sym_buffer, cumulative_local_expert_recv_stats=None,
                     recipe=(1, 1, 32), activation="swiglu", activation_clamp=None, fast_math=True):  # fmt: skip
    buffer, n = sym_buffer, y.shape[0]
    assert y.dtype == torch.bfloat16
    assert 0 < n <= buffer.num_max_tokens_per_rank
    group, rank = buffer.group, dist.get_rank(buffer.group)
    parts = (
        restored(buffer.x[:n], buffer.x_sf[:n]),
        buffer.topk_idx[:n],
        buffer.topk_weights[:n].double(),
    )
    x, ids, weights = (gathered(part, group) for part in parts)
    sys.modules["deep_gemm"].routes += int((ids >= 0).sum())
    sys.modules["deep_gemm"].rounds.append(n)
    gate_up, down = (dequantized(*(t.flip(1) for t in layer)) for layer in (l1_weights, l2_weights))
    out = moe_of(x, ids, weights, gate_up, down, rank * len(down), activation_clamp)
    dist.all_reduce(out, group=group)
    y.copy_(out[rank * n : (rank + 1) * n])


def gathered(x, group):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts)


def install(**changes):
    """Put the stand-in where `import deep_gemm` finds it, and let this device pass for the chip."""
    library = ModuleType("deep_gemm")
    for function in (get_symm_buffer_for_mega_moe, transform_sf_into_required_layout,
                     transform_weights_for_mega_moe, fp8_fp4_mega_moe):  # fmt: skip
        setattr(library, function.__name__, function)
    library.allocated, library.routes, library.rounds = [], 0, []
    sys.modules["deep_gemm"] = library
    import ep_dispatch.megamoe

    ep_dispatch.megamoe.device_problem = lambda: None
    ep_dispatch.megamoe.release_buffers()
    return library


class FP4Experts(nn.Module):
    """Weights as a quantized checkpoint has them; the forward is never used."""

    def __init__(self, count, hidden=128, intermediate=256, seed=0, scale_dtype=torch.float8_e8m0fnu,
                 **config):  # fmt: skip
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.config = SimpleNamespace(_experts_implementation="deepgemm_megamoe", **config)
        for name, shape in (("gate_up_proj", (count, 2 * intermediate, hidden)),
                            ("down_proj", (count, hidden, intermediate))):  # fmt: skip
            packed = torch.randint(-128, 128, (*shape[:2], shape[2] // 2), generator=generator)
            exponents = torch.randint(120, 124, (*shape[:2], shape[2] // 32), generator=generator)
            self._add(name, packed.to(torch.int8))
            scale = exponents.to(torch.uint8)
            if scale_dtype != torch.uint8:
                scale = scale.view(torch.float8_e8m0fnu).to(scale_dtype)
            self._add(f"{name}_scale_inv", scale)

    def _add(self, name, tensor):
        self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def whole(self):
        return tuple(
            dequantized(w.data, s.data.float().log2().add(127).to(torch.uint8).view(torch.int32))
            for w, s in ((self.gate_up_proj, self.gate_up_proj_scale_inv),
                         (self.down_proj, self.down_proj_scale_inv))
        )  # fmt: skip

    def part(self, rank, count):
        for name, parameter in list(self.named_parameters()):
            self._parameters[name] = nn.Parameter(
                parameter.data[rank * count : (rank + 1) * count], requires_grad=False
            )
        return self

    def forward(self, *args):
        raise AssertionError("the kernel runs the experts")


def layer(rank, world, group, kind=DeepGemmMegaMoe, seed=0, settings=None, **config):
    experts = FP4Experts(8, seed=seed, **config)
    whole = experts.whole() if config.get("scale_dtype") != torch.uint8 else None
    experts.part(rank, 8 // world)
    implementation = kind(
        experts.forward,
        num_local_experts=8 // world,
        ep_group=group,
        tp_group=group,
        experts=experts,
        **(settings or {}),
    )
    return implementation, whole


def inputs(tokens, top_k=3, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, 128, generator=generator).bfloat16()
    ids = torch.rand(tokens, 8, generator=generator).topk(top_k).indices
    return x, ids, torch.rand(tokens, top_k, generator=generator)


@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", [DeepGemmMegaMoe, Auto])
def test_equals_the_reference(ranks, moe, world, kind):
    """Uneven slices, slices without tokens, one token, none; the padding adds nothing."""

    def run(rank):
        library = install()
        implementation, whole = layer(rank, world, dist.group.WORLD, kind)
        for tokens in (13, 8, 1, 3, 0):
            x, ids, weights = inputs(tokens)
            with torch.no_grad():
                out = implementation(x, ids, weights)
            cast = restored(*quantize_rows(x))
            expected = moe_of(cast, ids, weights.double(), *whole, 0)
            assert out.dtype == torch.bfloat16
            assert out.shape == x.shape
            assert moe.error(out, expected) < 4e-3  # the rounding of the bf16 output
        assert len(library.allocated) == 1
        assert library.routes == (13 + 8 + 1 + 3) * 3  # every route once, none of the padding

    ranks.run(run, world=world)


def test_other_dtypes_scales_and_settings(ranks, moe):
    """Float32 hidden states, skipped slots, scales in float32 or as bare exponents, a clamp."""

    def run(rank):
        install()
        x, ids, weights = inputs(9)
        ids[2] = -1
        ids[5, 1] = -1
        for scale_dtype in (torch.float32, torch.float8_e8m0fnu, torch.uint8):
            implementation, _ = layer(
                rank, 4, dist.group.WORLD, scale_dtype=scale_dtype, swiglu_limit=0.5
            )
            whole = FP4Experts(8).whole()
            with torch.inference_mode():
                out = implementation(x.float(), ids.int(), weights.bfloat16())
            cast = restored(*quantize_rows(x))
            expected = moe_of(cast, ids, weights.bfloat16().double(), *whole, 0, clamp=0.5)
            assert out.dtype == torch.float32
            assert (out[2] == 0).all()
            assert moe.error(out, expected) < 4e-3

    ranks.run(run, world=4)


def test_layers_share_a_buffer_that_grows(ranks, moe):
    """One buffer for all layers of a group and shape; a larger batch replaces it; it can be freed."""

    def run(rank):
        library = install()
        from ep_dispatch.megamoe import _buffers, release_buffers

        layers = [layer(rank, 2, dist.group.WORLD, seed=seed)[0] for seed in (0, 1)]
        with torch.no_grad():
            for tokens in (20, 10, 700, 768, 800, 30):
                for one in layers:
                    one(*inputs(tokens))
        assert library.allocated == [10, 400]
        (buffers,) = _buffers.values()
        (buffer,) = buffers.values()
        assert buffer.num_max_tokens_per_rank == 768
        with torch.no_grad():
            layers[0](*inputs(20, top_k=2))
        assert len(library.allocated) == 3
        release_buffers()
        assert buffer.x is None
        assert not _buffers

    ranks.run(run, world=2)


@pytest.mark.parametrize("world", [1, 2])
def test_tokens_beyond_the_buffer_go_in_rounds(ranks, world):
    """One allocation whatever comes; full rounds, and one for which some ranks have no token."""

    def run(rank):
        library = install()
        bounded, _ = layer(rank, world, dist.group.WORLD, settings={"max_tokens": 5})
        rounds = {3: [-(-3 // world)], 384 * world: [384], 768 * world + 1: [384, 384, 1]}
        outputs = {}
        with torch.no_grad():
            for tokens, expected in rounds.items():
                library.rounds.clear()
                library.routes = 0
                outputs[tokens] = bounded(*inputs(tokens))
                assert library.rounds == expected
                assert library.routes == tokens * 3  # no token twice, none left out
            assert library.allocated == [5]
            library = install()
            growing, _ = layer(rank, world, dist.group.WORLD)
            for tokens, output in outputs.items():
                assert torch.equal(output, growing(*inputs(tokens)))
            assert len(library.rounds) == len(rounds)

    ranks.run(run, world=world)


def test_nothing_is_allocated_while_a_graph_is_captured(ranks, moe):
    """A larger batch goes in rounds then; without any buffer it is an error."""

    def run(rank):
        library = install()
        import ep_dispatch.megamoe as module

        implementation, whole = layer(rank, 2, dist.group.WORLD)
        captures = module.capturing
        x, ids, weights = inputs(1000)
        try:
            with torch.no_grad():
                module.capturing = lambda: True
                with pytest.raises(RuntimeError, match="run a batch once before capturing"):
                    implementation(x, ids, weights)
                module.capturing = captures
                implementation(*inputs(2))
                module.capturing = lambda: True
                out = implementation(x, ids, weights)
        finally:
            module.capturing = captures
        assert library.allocated == [1]
        assert library.rounds == [1, 384, 116]
        expected = moe_of(restored(*quantize_rows(x)), ids, weights.double(), *whole, 0)
        assert moe.error(out, expected) < 4e-3

    ranks.run(run, world=2)


def test_ranks_that_want_different_buffers(ranks):
    """All of them are told, before anything is allocated."""

    def run(rank):
        library = install()
        settings = {"max_tokens": 8 if rank else None}
        implementation, _ = layer(rank, 2, dist.group.WORLD, settings=settings)
        with torch.no_grad(), pytest.raises(ValueError, match=r"buffers of \[4, 8\] tokens"):
            implementation(*inputs(8))
        assert library.allocated == []
        for wrong in (0, -1, 2.0, True):
            with pytest.raises(ValueError, match=f"positive integer.*got {wrong}"):
                layer(rank, 2, dist.group.WORLD, settings={"max_tokens": wrong})

    ranks.run(run, world=2)


def test_transformed_weights_replace_the_others_and_are_not_saved(ranks):
    """Memory is not doubled, and a checkpoint of what only the kernel understands is refused."""

    def run(rank):
        install()
        implementation, _ = layer(rank, 2, dist.group.WORLD)
        experts = implementation.experts
        before = {name: p.data_ptr() for name, p in experts.named_parameters()}
        experts.state_dict()
        with torch.no_grad():
            implementation(*inputs(4))
        after = {name: p.data_ptr() for name, p in experts.named_parameters()}
        (gate_up, _), (down, _) = implementation._layers
        assert before.keys() == after.keys()
        assert after["gate_up_proj"] == gate_up.data_ptr()
        assert after["down_proj"] == down.data_ptr()
        model = nn.Module()
        model.experts = experts
        with pytest.raises(RuntimeError, match=r"experts were transformed .* cannot be saved"):
            model.state_dict()

    ranks.run(run, world=2)


def test_inference_only(ranks):
    def run(rank):
        install()
        implementation, _ = layer(rank, 2, dist.group.WORLD)
        x, ids, weights = inputs(4)
        for args in (
            (x.float().requires_grad_(), ids, weights),
            (x, ids, weights.requires_grad_()),
        ):
            with pytest.raises(RuntimeError, match=r"inference only.*torch.no_grad"):
                implementation(*args)
            with torch.no_grad():
                implementation(*args)

    ranks.run(run, world=2)


def test_refused_when_built_with_all_that_is_missing(monkeypatch):
    """On a CPU, without the package, with other experts: one error at load, not one in forward."""
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    experts = nn.Linear(4, 4)
    with pytest.raises(ValueError, match="cannot run here") as failure:
        DeepGemmMegaMoe(experts, num_local_experts=4)
    message = str(failure.value)
    assert "this process has no CUDA" in message
    assert "deep_gemm cannot be imported" in message
    assert "Linear lacks gate_up_proj" in message
    assert '"all_to_all"' in message


def built(experts, monkeypatch, capability=(10, 0), missing=(), error=None):
    """The message of the refusal, or None."""
    library = ModuleType("deep_gemm")
    for name in ("fp8_fp4_mega_moe", "get_symm_buffer_for_mega_moe", "transform_sf_into_required_layout",
                 "transform_weights_for_mega_moe"):  # fmt: skip
        if name not in missing:
            setattr(library, name, lambda *args: None)
    monkeypatch.setitem(sys.modules, "deep_gemm", library)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU X")
    from ep_dispatch.megamoe import megamoe_problems

    return "; ".join(megamoe_problems(experts))


def test_each_refusal_says_what_is_wrong(monkeypatch):
    assert built(FP4Experts(2), monkeypatch) == ""
    assert built(FP4Experts(2), monkeypatch, capability=(12, 0)) == ""
    assert "GPU X has 9.0" in built(FP4Experts(2), monkeypatch, capability=(9, 0))
    assert "lacks fp8_fp4_mega_moe" in built(
        FP4Experts(2), monkeypatch, missing=["fp8_fp4_mega_moe"]
    )
    assert "multiples of 128, got 64 and 256" in built(FP4Experts(2, hidden=64), monkeypatch)
    assert "must be SiLU, got 'gelu'" in built(FP4Experts(2, hidden_act="gelu"), monkeypatch)
    assert "pass `experts=`" in built(None, monkeypatch)
    experts = FP4Experts(2)
    experts.down_proj_scale_inv = nn.Parameter(torch.zeros(2, 128, 2), requires_grad=False)
    assert "down_proj_scale_inv must hold a scale per 32 weights, [2, 128, 8]" in built(
        experts, monkeypatch
    )
    experts = FP4Experts(2)
    experts.gate_up_proj = nn.Parameter(experts.gate_up_proj.float())
    assert "gate_up_proj must hold packed FP4" in built(experts, monkeypatch)


def test_a_library_whose_import_fails(monkeypatch, tmp_path):
    (tmp_path / "deep_gemm.py").write_text("assert None is not None, 'no CUDA toolkit'")
    monkeypatch.delitem(sys.modules, "deep_gemm", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    from ep_dispatch.megamoe import megamoe_problems

    assert any("AssertionError: no CUDA toolkit" in p for p in megamoe_problems(FP4Experts(2)))


@pytest.mark.parametrize("kind", [AllToAll, AllReduce])
def test_other_implementations_refuse_such_experts(kind):
    with pytest.raises(
        ValueError, match=r'with ep_implementation="auto" or "deepgemm_megamoe" only'
    ):
        kind(FP4Experts(2), num_local_experts=2)


def test_layouts_and_shards_that_do_not_fit(ranks, moe):
    def run(rank):
        install()
        experts = FP4Experts(8)
        with pytest.raises(ValueError, match=r"ep_size == tp_size"):
            DeepGemmMegaMoe(experts, num_local_experts=4, ep_group=dist.group.WORLD)
        with pytest.raises(ValueError, match="needs a process group"):
            DeepGemmMegaMoe(experts, num_local_experts=8)
        group = dist.group.WORLD
        whole = DeepGemmMegaMoe(experts, num_local_experts=4, ep_group=group, tp_group=group)
        with (
            torch.no_grad(),
            pytest.raises(ValueError, match=r"hold this rank's 4 experts, got \[8,"),
        ):
            whole(*inputs(4))
        with torch.no_grad(), pytest.raises(ValueError, match="hidden_states must be"):
            whole(*(x[None] for x in inputs(4)))

    ranks.run(run, world=2)
